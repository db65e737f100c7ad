"""The arguments of each command, and the functions that it calls."""
