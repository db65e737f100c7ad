"""What training relies on in a model: of its config before any weight is read, of the model once it is loaded.

Legend: B batch · T tokens of a row · V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.modeling.head import head_of, hidden_states

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def check_config(config: "PretrainedConfig", length: int) -> None:
    """Refuse what the attention engines do not honour, before any weight is read.

    Raises:
        UserError: no fixed number of positions, attention dropout, or a window or chunk of attention shorter than the
            rows.
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
    from torchtrain.attention.masks import MASKED_LAYER_TYPES

    for what, setting in MASKED_LAYER_TYPES.items():
        reach = getattr(config, setting, None)
        is_used = what in (getattr(config, "layer_types", None) or [what])
        if reach is not None and is_used and reach < length:
            raise UserError(
                f"model.source: its {setting} of {reach} tokens is shorter than pack.sequence_length {length} and is "
                "not supported; shorten the rows or choose a model without one"
            )


@torch.no_grad()
def check_head(model: "PreTrainedModel") -> None:
    """Check that logits are head(hidden states) and nothing more, which the chunked loss relies on.

    Raises:
        UserError: the model does more (scales or caps its logits, as Gemma 2 and Cohere do).
    """
    batch = _tiny_batch(model)
    model.eval()
    logits_BTV = model(**batch, use_cache=False).logits
    own_BTV = head_of(model)(hidden_states(model, batch))
    if not torch.equal(own_BTV.float(), logits_BTV.float()):
        raise UserError(
            f"model.source: {model.config.model_type} does more than one linear layer to make logits (scales or caps "
            "them), which the chunked loss does not support"
        )


def _tiny_batch(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Make one row of two documents of four tokens, no anchor."""
    tokens = torch.arange(8, device=model.device)[None]
    return {"input_ids": tokens + 1, "position_ids": tokens, "document_ids": tokens // 4 + 1}
