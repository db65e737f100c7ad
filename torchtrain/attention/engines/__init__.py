"""The engines: ways to compute attention under the mask rule, and the choice among them."""
