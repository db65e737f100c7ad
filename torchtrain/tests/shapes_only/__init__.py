"""Runs of any size on a device that has shapes and no numbers: memory, waits and copies of the trainer's step."""
