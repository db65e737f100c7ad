"""The residual stream is kept in bfloat16 between layers of a float32 model."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _make(original):
    def forward(self, hidden_states, *args, **kwargs):
        return original(self, hidden_states, *args, **kwargs).bfloat16().to(hidden_states.dtype)

    return forward


BUG = Bug(
    what="residual stream in bf16",
    where="autocast around a float32 model, and offloaded activations in half precision (seen in reviews)",
    stage="forward",
    apply=lambda: in_every_family("DecoderLayer", "forward", _make),
    likely={"dtype": "float32"},
)
