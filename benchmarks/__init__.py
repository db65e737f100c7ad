"""Timings, sweeps and long tests: each has a command of its own, none is part of what is installed."""
