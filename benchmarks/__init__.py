"""Programs for developers: timings, sweeps and long tests. Each is a command of its own; none is installed."""
