"""The gradients of all micro-batches but the last are cleared."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.modeling.head import hidden_states


def _make(original):
    def clear(model, batch, plan=None):
        model.zero_grad()
        return original(model, batch, plan)

    return clear


BUG = Bug(
    what="gradients cleared between micro-batches",
    where="RAE issue 67: zero_grad inside the accumulation loop",
    stage="gradients",
    apply=lambda: wrap(hidden_states, _make),
    likely={"dtype": "float32"},
)
