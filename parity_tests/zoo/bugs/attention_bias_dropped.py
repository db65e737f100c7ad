"""Linear layers without their bias; of the families here, Qwen2's q, k and v have one."""

from unittest.mock import patch

import torch.nn.functional as F
from torch import nn

from parity_tests.zoo import Bug

BUG = Bug(
    what="attention bias dropped",
    where="Qwen2 through loaders made for Llama: ANEForge PR 253, OminiX-MLX PR 7, Fast-LLM PR 398, candle-vllm PR 167",
    stage="forward",
    apply=lambda: patch.object(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
    likely={"model": "qwen2"},
)
