"""One computation over many processes: who does what, how rows are cut, and the strategies that hold the state."""
