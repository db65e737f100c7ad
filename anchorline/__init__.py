"""The floor all parts stand on: files, settings, errors. Nothing computes, nothing imports numpy, torch, jax.

What cannot compute cannot be wrong on both sides alike, so it may stand once for the oracle, the trainer and the judge.
"""
