"""Experiments of many runs that differ in what is asked: arithmetic, mask variant, seed. Everything else is paired."""
