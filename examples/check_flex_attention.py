"""Judge plain FlexAttention with its own document mask:

parity check examples/check_flex_attention.py:attend
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from parity_tests.check import attention

ON_GPU = torch.cuda.is_available()


# On a CPU FlexAttention has no backward pass. A plain document mask knows no anchor.
@attention(layout="BHTD", dtypes=["bfloat16"], lacks=["anchor"] if ON_GPU else ["anchor", "backward"])
def attend(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor, scale: float) -> Tensor:
    """Attention within each document; -1 is padding."""

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document_ids[b, i] == document_ids[b, j]) & (document_ids[b, i] >= 0)

    B, T = document_ids.shape
    blocks = create_block_mask(same_document, B, None, T, T, device=q.device)
    return flex_attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)  # type: ignore[return-value]
