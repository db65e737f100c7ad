"""Bugs by the stage in which each shows first; see `parity_tests.zoo`."""
