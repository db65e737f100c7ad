"""The mean divides by all tokens, those without a label included."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.training.loss import chunked_cross_entropy


def _make(original):
    def dilute(head, hidden, labels, chunk, **how):
        total, each = original(head, hidden, labels, chunk, **how)
        share = len(labels) / each.numel()
        return total * share, each * share

    return dilute


BUG = Bug(
    what="tokens without a label counted in the mean",
    where="Fast-LLM PR 426: a cross entropy whose mean divided by all tokens, masked ones too",
    stage="loss",
    apply=lambda: wrap(chunked_cross_entropy, _make),
)
