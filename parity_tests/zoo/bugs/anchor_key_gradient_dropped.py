"""The keys' gradient at the anchor is lost: the copies in front of the documents are made without autograd."""

import torch

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import attention
from torchtrain.marks import ANCHOR


def _make(attend):
    def detach(q, k, v, plan, **options):
        is_anchor = (plan.document_ids_BT == ANCHOR)[:, :, None, None]
        return attend(q, torch.where(is_anchor, k.detach(), k), v, plan, **options)

    return detach


BUG = Bug(
    what="K's anchor gradient dropped",
    where="shared prefixes kept under no_grad, as prefix caches are; seen in reviews of shared-prefix training",
    stage="gradients",
    apply=lambda: attention(_make),
    likely={"variant": "anchor"},
)
