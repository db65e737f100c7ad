"""Bugs of the forward pass: weights, norms, the MLP and the residual."""

import re
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity_tests.zoo import Bug, bug
from parity_tests.zoo.patch import around, in_every_family, loaded_weights, method
from torchtrain.modeling.load import load_for_training
from torchtrain.products import LinearInFloat32, linear


@Bug
@contextmanager
def attention_bias_dropped():
    """Linear layers without their bias; of the families here, Qwen2's q, k and v have one."""

    def forward(self, x):
        return linear(x, self.weight)

    with patch.object(nn.Linear, "forward", forward), patch.object(LinearInFloat32, "forward", forward):
        yield


def _instead(class_name, forward):
    return in_every_family(class_name, "forward", lambda _, *given: forward(*given))


@bug(method, nn.Embedding, "forward")
def embedding_scaled(embed, self, ids):
    return embed(self, ids) * self.embedding_dim**0.5


@bug(_instead, "MLP")
def gate_and_up_swapped(self, x):
    return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@bug(_instead, "MLP")
def gelu_for_silu(self, x):
    return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


@bug(loaded_weights)
def layers_off_by_one(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    layers = 1 + max((int(i) for i in re.findall(r"layers\.(\d+)\.", " ".join(state_dict))), default=0)

    def name_next(name: str) -> str:
        return re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{(int(match[1]) + 1) % layers}.", name)

    return {name: state_dict[name_next(name)] for name in state_dict}


@bug(in_every_family, "DecoderLayer", "forward")
def residual_in_half(original, self, hidden_states, *args, **kwargs):
    return original(self, hidden_states, *args, **kwargs).bfloat16().to(hidden_states.dtype)


@bug(_instead, "RMSNorm")
def rmsnorm_epsilon_default(self, x: Tensor) -> Tensor:
    epsilon = 1e-5 if self.variance_epsilon == 1e-6 else 1e-6
    wide = x.float()
    return self.weight * (wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


@bug(_instead, "RMSNorm")
def rmsnorm_epsilon_outside(self, x: Tensor) -> Tensor:
    wide = x.float()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
    return self.weight * normed.to(x.dtype)


@bug(_instead, "RMSNorm")
def rmsnorm_in_half(self, x: Tensor) -> Tensor:
    half = x.bfloat16()
    variance = half.pow(2).mean(-1, keepdim=True)
    return self.weight * (half * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


@bug(_instead, "RMSNorm")
def rmsnorm_weight_before_cast(self, x: Tensor) -> Tensor:
    wide = (self.weight * x).float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


_NAME = "model.layers.1.self_attn.o_proj.weight"


@bug(loaded_weights)
def weight_transposed(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    return state_dict | ({_NAME: state_dict[_NAME].T.contiguous()} if _NAME in state_dict else {})


@bug(around, load_for_training)
def frequencies_rounded_on_loading(original, *args, **kwargs):
    model = original(*args, **kwargs)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()
    return model
