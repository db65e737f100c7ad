"""The activation stands on the wrong half of a fused projection."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _forward(self, x):
    return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


BUG = Bug(
    what="gate and up swapped",
    where="mlx-lm PR 767: silu(x) * gate for silu(gate) * x; OpenVINO PR 32683",
    stage="forward",
    apply=lambda: in_every_family("MLP", "forward", lambda _: _forward),
)
