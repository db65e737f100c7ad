"""Anchorline's trainer: long-context training with AnchorAttention on Hugging Face models.

    import torchtrain

    torchtrain.register()
    model.set_attn_implementation("anchor")
    model(input_ids, position_ids=position_ids, document_ids=document_ids, use_cache=False)

Importing the package is cheap; torch and transformers are loaded by the first call that needs them.
"""

import time

STARTED = time.perf_counter()  # of the process, but for Python itself
__version__ = "0.1.0"
__all__ = ["register"]


def register() -> None:
    """Register Anchorline's attention with transformers; see `torchtrain.attention.hf.register`."""
    from torchtrain.attention.hf import register as register_with_transformers

    register_with_transformers()
