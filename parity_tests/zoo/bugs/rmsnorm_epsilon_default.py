"""Epsilon 1e-5, the layer's default, where the config says 1e-6 (and the other way round)."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _forward(self, x: Tensor) -> Tensor:
    epsilon = 1e-5 if self.variance_epsilon == 1e-6 else 1e-6
    wide = x.float()
    return self.weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


BUG = Bug(
    what="RMSNorm's epsilon 1e-5 for 1e-6",
    where="MinivLLM PR 82: Qwen3's 1e-6 never reached the layer",
    stage="forward",
    apply=lambda: in_every_family("RMSNorm", "forward", lambda _: _forward),
    likely={"dtype": "float32"},
)
