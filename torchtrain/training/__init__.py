"""Training: the loss, the optimizer, one step, and the files of events."""
