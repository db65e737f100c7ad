"""Qwen3's norms of q and k after the rotation. Without their weights the two would commute."""

from unittest.mock import patch

from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from parity_tests.zoo import Bug

_attend = modeling_qwen3.Qwen3Attention.forward
_rotate = modeling_qwen3.apply_rotary_pos_emb


def _forward(self, *args, **kwargs):
    norms = self.q_norm.forward, self.k_norm.forward

    def rotate_then_norm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(norm(x) for norm, x in zip(norms, _rotate(q, k, cos, sin), strict=True))

    with (
        patch.object(self.q_norm, "forward", lambda x: x),
        patch.object(self.k_norm, "forward", lambda x: x),
        patch.object(modeling_qwen3, "apply_rotary_pos_emb", rotate_then_norm),
    ):
        return _attend(self, *args, **kwargs)


BUG = Bug(
    what="q and k normed after RoPE",
    where=(
        "models do both: Qwen3 and Gemma 3 norm before, Hunyuan after (OLMo issue 806); nanochat "
        "issue 743 calls the other order a bug"
    ),
    stage="forward",
    apply=lambda: patch.object(modeling_qwen3.Qwen3Attention, "forward", _forward),
    likely={"model": "qwen3"},
)
