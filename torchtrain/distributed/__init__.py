"""One computation over many processes: who does what, how rows are cut, and the engines that hold the state."""
