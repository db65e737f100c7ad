"""What training needs of a model: hidden states, and the head that makes logits of them; the shapes and numbers of its
weights; and checks of its config before any weight is read, and of the model once it is loaded.

Legend: B batch · T tokens of a row · M model width · V vocabulary.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from anchorline.errors import UserError
from torchtrain.attention.masks import hide_nothing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def hidden_states(model: "PreTrainedModel", batch: Mapping[str, Tensor], plan: Any = None) -> Tensor:
    """Run the model without its head: [B, T, M], under the batch's documents and positions."""
    return model.base_model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        document_ids=batch["document_ids"],
        attention_mask=hide_nothing(batch["input_ids"]),
        plan=plan,
        use_cache=False,
    ).last_hidden_state


def head_of(model: "PreTrainedModel") -> nn.Module:
    """Return the module that makes logits [.., V] of hidden states [.., M]."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    return head


class LogitRule(NamedTuple):
    """How a model turns its head's output x into a logit: cap tanh(x factor / divisor / cap)."""

    factor: float = 1.0  # Falcon-H1
    divisor: float = 1.0  # Granite
    cap: float | None = None  # Gemma 2; without one the logit is x factor / divisor

    @classmethod
    def of(cls, model: "PreTrainedModel") -> Self:
        """Read a model's config."""
        config = model.config.get_text_config(decoder=True)
        return cls(
            factor=getattr(config, "lm_head_multiplier", None) or 1.0,
            divisor=getattr(config, "logits_scaling", None) or 1.0,
            cap=getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits, each step rounded to the dtype of x, as transformers does."""
        x = x * self.factor / self.divisor
        return x if self.cap is None else torch.tanh(x / self.cap) * self.cap


AS_THEY_ARE = LogitRule()


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's whole shape, also where it is cut up among ranks."""
    return getattr(parameter, "ds_shape", parameter.shape)


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, or None.

    Reads each once, and copies nothing.
    """
    for name, x in tensors:
        if x.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(x)))):
            return name
    return None


def check_config(config: "PretrainedConfig", length: int) -> None:
    """Refuse what the attention engines do not honour, before any weight is read. Raises UserError: no fixed number of
    positions, attention dropout, or a chunk of attention shorter than the rows.
    """
    if getattr(config, "max_position_embeddings", None) is None:
        raise UserError(
            f"model.source: {config.model_type} names no max_position_embeddings in its config.json and is not "
            "supported"
        )
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"model.source: attention_dropout {dropout} in its config.json is not supported; set it to 0 in a local "
            "copy"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < length and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(
            f"model.source: its attention_chunk_size of {chunk} tokens is shorter than pack.sequence_length {length} "
            "and is not supported; shorten the rows or choose a model without one"
        )


@torch.no_grad()
def check_head(model: "PreTrainedModel") -> None:
    """Check that logits are what `LogitRule` makes of head(hidden states), which the chunked loss relies on. Raises
    UserError: the model does more (scales its logits by a parameter of another name, as Cohere does).
    """
    batch = _tiny_batch(model)
    model.eval()
    logits_BTV = model(**batch, use_cache=False).logits
    own_BTV = LogitRule.of(model).logits(head_of(model)(hidden_states(model, batch)))
    if not torch.equal(own_BTV.float(), logits_BTV.float()):
        raise UserError(
            f"model.source: {model.config.model_type} does more than one linear layer to make logits (scales them), "
            "which the chunked loss does not support"
        )


def _tiny_batch(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Make one row of two documents of four tokens, no anchor."""
    tokens = torch.arange(8, device=model.device)[None]
    return {"input_ids": tokens + 1, "position_ids": tokens, "document_ids": tokens // 4 + 1}
