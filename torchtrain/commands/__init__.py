"""What each command asks for and calls, by kind."""
