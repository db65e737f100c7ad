"""The base package, which all others import: files, settings, errors. It computes nothing: no numpy, torch or jax.

Code that computes nothing cannot make both sides wrong alike. So the oracle, the trainer and the judge may share it.
"""
