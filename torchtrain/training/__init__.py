"""Training: the loss, the optimizer, the loop, what is measured and what is left behind."""
