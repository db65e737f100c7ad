"""Compute attention and outputs under several conditions.

`conditions` names what is compared. `methods` holds changes that a `Rounding` cannot express. `pieces` are compiled
parts of a layer, `engine` runs a model with them, and `measures` are the paper's.
"""
