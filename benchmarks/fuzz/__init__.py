"""Damage what a user gives to the commands, thousands of times, and count tracebacks and hangs: both must be zero.

`valid` makes what is right; `kinds` damages a copy of it (by `damage`, with `values`) and names a command; `runner`
runs it in a process of its own; `report` says what was found.
"""
