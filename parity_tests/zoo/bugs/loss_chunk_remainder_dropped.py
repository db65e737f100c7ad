"""The tokens that do not fill a last chunk are left out of the loss."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.marks import IGNORED
from torchtrain.training.loss import chunked_cross_entropy


def _make(original):
    def whole_chunks(head, hidden, shift_labels, chunk):
        counted = shift_labels != IGNORED
        place = counted.flatten().cumsum(0).view_as(shift_labels)
        kept = int(counted.sum()) // chunk * chunk
        return original(head, hidden, shift_labels.masked_fill(place > kept, IGNORED), chunk)

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
