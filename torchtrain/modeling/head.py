"""A causal language model in its two parts: hidden states, and the head that makes logits of them.

Legend: B batch · T tokens of a row · M model width · V vocabulary.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

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
