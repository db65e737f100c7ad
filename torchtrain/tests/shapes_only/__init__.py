"""Runs of any size on a device that has shapes and no numbers: the memory of the trainer's step."""
