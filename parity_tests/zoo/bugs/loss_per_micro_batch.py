"""Each micro-batch's gradient is that of its own mean, divided by their number; a mean per rank is the same arithmetic."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import swap
from torchtrain.attention import make_plan
from torchtrain.modeling.load import head_of, hidden_states
from torchtrain.training.loop import backward
from torchtrain.training.loss import IGNORE, chunked_cross_entropy
from torchtrain.training.metrics import Losses


def _backward(model, batches, domains, chunk):
    losses, live_pairs = Losses(domains), 0
    for batch in batches:
        plan = make_plan(batch["document_ids"])
        live_pairs += plan.live_pairs
        hidden_BTM = hidden_states(model, batch, plan)
        total, each_BT = chunked_cross_entropy(head_of(model), hidden_BTM, batch["shift_labels"], chunk)
        labelled = (batch["shift_labels"] != IGNORE).sum().clamp(min=1)
        (total / labelled / len(batches)).backward()
        losses.add(each_BT, batch)
    return losses, live_pairs


BUG = Bug(
    what="loss averaged per micro-batch or rank",
    where="transformers up to 4.45 (PR 34191, issue 34242) and everyone: torchtune PR 1875, torchtitan PR 2206, prime-rl PR 583",
    stage="gradients",
    apply=lambda: swap(backward, _backward),
)
