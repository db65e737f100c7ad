"""GELU in the MLP's gate."""

import torch.nn.functional as F

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _forward(self, x):
    return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


BUG = Bug(
    what="GELU for SiLU",
    where=(
        "activations taken from the wrong field of a config: Megatron-Bridge PR 4661 (Gemma), TensorRT-LLM issue 10446"
    ),
    stage="forward",
    apply=lambda: in_every_family("MLP", "forward", lambda _: _forward),
)
