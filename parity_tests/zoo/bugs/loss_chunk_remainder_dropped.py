"""The tokens that do not fill a last chunk are left out of the loss."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.training.labels import Labels
from torchtrain.training.loss import chunked_cross_entropy


def _make(original):
    def whole_chunks(head, hidden, labels, chunk, **how):
        kept = len(labels) // chunk * chunk
        return original(head, hidden, Labels(labels.index_n[:kept], labels.labels_n[:kept]), chunk, **how)

    return whole_chunks


BUG = Bug(
    what="last partial chunk of the loss dropped",
    where=(
        "seen in reviews of chunked losses (view(-1, chunk) after a floor division); mlx-lm PR 1413 "
        "fixes the like for micro-batches"
    ),
    stage="loss",
    apply=lambda: wrap(chunked_cross_entropy, _make),
)
