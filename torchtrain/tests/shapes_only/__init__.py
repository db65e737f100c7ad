"""Runs of any size on a device that has shapes and no numbers: memory, host waits and copies of the trainer's own step."""
