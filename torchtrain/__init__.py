"""Anchorline's trainer: long-context training with AnchorAttention on Hugging Face models.

    import torchtrain

    rows = torchtrain.pack(texts, tokenizer, sequence_length=65536)
    model = torchtrain.attach(model)
    loss = model(**torchtrain.collate([rows[0], rows[1]])).loss

Importing the package is cheap: the first use of a function imports torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtrain.attention.attach import attach
    from torchtrain.attention.hf import register
    from torchtrain.library import collate, extend, pack

__version__ = "0.1.0"
__all__ = ["attach", "collate", "extend", "pack", "register"]

_ELSEWHERE = {"attach": "attention.attach", "register": "attention.hf"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'library')}"), name)
