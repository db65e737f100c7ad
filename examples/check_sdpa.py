"""`F.scaled_dot_product_attention` before the judge, with the packed row's mask as a boolean [B, 1, T, T]:

parity check examples/check_sdpa.py:attend
"""

import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import attention


@attention(layout="BHTD")
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention with a boolean mask, True is visible."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
