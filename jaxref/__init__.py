"""Anchorline's oracle: a slow, obvious JAX reference in which every rounding is chosen by name.

Importing jaxref sets JAX's flag `jax_enable_x64`, and nothing else: the oracle computes in float64, which JAX otherwise
turns into float32 without a word. The flag holds for the whole process, so other JAX code in it sees 64-bit defaults
too.
"""

import os
import sys

if (jax := sys.modules.get("jax")) is not None:
    jax.config.update("jax_enable_x64", True)
else:
    # JAX reads this when it is imported. That takes half a second, for which `jaxref --help` and `jaxref mask` need not
    # wait.
    os.environ["JAX_ENABLE_X64"] = "1"
