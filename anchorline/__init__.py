"""The base package, which all others import: files, settings, errors. It computes nothing: no numpy, torch or jax.

What cannot compute cannot be wrong on both sides alike, so it may stand once for the oracle, the trainer and the judge.
"""
