"""Hidden states, and the head that makes logits of them.

Legend: B batch · T tokens of a row · M model width · V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from anchorline.errors import UserError
from torchtrain.attention.masks import hide_nothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


@torch.no_grad()
def check_head(model: "PreTrainedModel") -> None:
    """Check that logits are what `LogitRule` makes of head(hidden states). Raises UserError: the model does more."""
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
    tokens = torch.arange(8, device=model.device)[None]
    return {"input_ids": tokens + 1, "position_ids": tokens, "document_ids": tokens // 4 + 1}
