"""Cross entropy over a large vocabulary without ever holding the logits of a whole row.

Legend: n tokens that have a label · M model width · V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtrain.training.labels import Labels


def chunked_cross_entropy(
    head: nn.Module, hidden: Tensor, labels: Labels, chunk: int, *, calls: int = 0
) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of the labels, `chunk` tokens at a time.

    Tokens without a label never reach the head. A chunk's logits are dropped after its losses are taken and made
    anew in the backward pass, so at most [chunk, V] logits exist at a time.

    Args:
        head: maps [n, M] to logits [n, V].
        hidden: hidden states [.., M].
        labels: which tokens of the flattened [..] have one; on hidden's device. Nothing here waits for it.
        chunk: tokens whose logits exist at one time.
        calls: how often the head is called at least, if need be on no tokens. Ranks that hold a part of its weights
            each (ZeRO 3) must call it equally often, however many labels each has.

    Returns:
        The sum, a scalar to call backward on, in float32 (or in hidden's dtype if that is wider); and each token's loss
        [..], detached, 0 where there is no label. Of no labels at all the sum is 0, with a gradient of zeros.
    """
    hidden_nM = hidden.flatten(0, -2).index_select(0, labels.index_n)
    losses_n = chunked_loss(head, hidden_nM, labels.labels_n, chunk, calls)
    each = losses_n.new_zeros(hidden.shape[:-1])
    each.view(-1).index_copy_(0, labels.index_n, losses_n.detach())
    return losses_n.sum(), each


def chunked_loss(head: nn.Module, hidden_nM: Tensor, labels_n: Tensor, chunk: int, calls: int = 0) -> Tensor:
    """Return the loss of each of n tokens, all labelled; see `chunked_cross_entropy`."""
    parts = list(zip(hidden_nM.split(chunk), labels_n.split(chunk), strict=True))
    parts += [(hidden_nM[:0], labels_n[:0])] * (calls - len(parts))
    return torch.cat([checkpoint(_cross_entropy, head, part_M, part, use_reentrant=False) for part_M, part in parts])


def _cross_entropy(head: nn.Module, hidden_nM: Tensor, labels_n: Tensor) -> Tensor:
    logits_nV = head(hidden_nM)
    wide = torch.promote_types(logits_nV.dtype, torch.float32)
    return F.cross_entropy(logits_nV.to(wide), labels_n, reduction="none")
