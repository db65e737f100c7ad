"""The gradient of the head's weights is that of the last chunk of the loss alone."""

import torch

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.training.loss import chunked_cross_entropy


def _make(original):
    def last_chunk(head, hidden, labels, chunk, **how):
        before = max(len(labels) - 1, 0) // chunk * chunk
        total, each = original(head, hidden, labels, chunk, **how)
        if not before or not torch.is_grad_enabled():
            return total, each
        early = type(labels)(labels.index_n[:before], labels.labels_n[:before])
        # What the earlier chunks give the head is taken away again; hidden keeps its own.
        theirs, _ = original(head, hidden.detach(), early, chunk, **how)
        return total - (theirs - theirs.detach()), each

    return last_chunk


BUG = Bug(
    what="the head's gradient overwritten by each chunk of the loss",
    where="seen in reviews of fused linear cross entropies: `=` for `+=` in the loop over chunks",
    stage="gradients",
    apply=lambda: wrap(chunked_cross_entropy, _make),
)
