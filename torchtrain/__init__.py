"""Anchorline's trainer: long-context training with AnchorAttention on Hugging Face models.

    import torchtrain

    rows = torchtrain.pack(texts, tokenizer, sequence_length=65536)
    model = torchtrain.attach(model)
    loss = model(**torchtrain.collate([rows[0], rows[1]])).loss

Importing the package is cheap; torch and transformers are loaded by the first call that needs them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from torchtrain.data import PackedRows

    Model = TypeVar("Model", bound=nn.Module)

__version__ = "0.1.0"
__all__ = ["attach", "collate", "extend", "pack", "register"]


def attach(model: "Model", engine: str = "auto", keep_anchor: bool = False) -> "Model":
    """Set Anchorline's attention on a model and check every layer; see `torchtrain.attention.attach.attach`."""
    from torchtrain.attention.attach import attach as attach_checked

    return attach_checked(model, engine, keep_anchor)


def register() -> None:
    """Register Anchorline's attention with transformers; see `torchtrain.attention.hf.register`."""
    from torchtrain.attention.hf import register as register_with_transformers

    register_with_transformers()


def pack(
    documents: Iterable[Any],
    tokenizer: "PreTrainedTokenizerFast",
    sequence_length: int,
    variant: str = "anchor",
    *,
    text_field: str = "text",
    domain_field: str | None = None,
    append_eos: bool = True,
    seed: int = 0,
    **settings: Any,
) -> "PackedRows":
    """Tokenise documents and pack them into rows, as the trainer does; see `torchtrain.library.pack`."""
    from torchtrain.library import pack as pack_documents

    names = {"text_field": text_field, "domain_field": domain_field, "append_eos": append_eos, "seed": seed}
    return pack_documents(documents, tokenizer, sequence_length, variant, **names, **settings)


def extend(config: "PretrainedConfig", sequence_length: int, **rope: Any) -> "PretrainedConfig":
    """Return a copy of a model's config with RoPE for longer rows; see `torchtrain.library.extend`."""
    from torchtrain.library import extend as extend_config

    return extend_config(config, sequence_length, **rope)


def collate(rows: Sequence[Mapping[str, Any]]) -> "dict[str, Tensor]":
    """Stack packed rows into the arguments of a causal language model's call; see `torchtrain.library.collate`."""
    from torchtrain.library import collate as collate_rows

    return collate_rows(rows)
