"""Damage what a user gives to the commands, thousands of times, and count tracebacks and hangs: both must be zero."""
