"""Bugs of the forward pass: positions, frequencies and the rotation."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parity_tests.gate.case import SIZES
from parity_tests.zoo import Bug, bug
from parity_tests.zoo.patch import Context, frequencies, in_every_family, positions, rotation, swap, tables
from torchtrain.modeling import rope
from torchtrain.modeling.rope import extend, rotated_dimensions
from torchtrain.modeling.rotation import rotate_in_float32


@bug(positions)
def interleave_reversed(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    changed = position_ids_BT.clone()
    for row, documents in zip(changed, document_ids_BT, strict=True):
        for document in documents[documents > 0].unique():
            own = row[documents == document]
            jumps = (own.diff() != 1).nonzero().flatten() + 1
            row[documents == document] = torch.cat(own.tensor_split(jumps.cpu())[::-1])
    return changed


def _of(rope_type: str, change: Callable[[Any, Tensor], Tensor]) -> Context:
    """Use `change(rotary, inv_freq_C)` for the inverse frequencies of a type."""
    return frequencies(
        lambda rotary, own: change(rotary, own) if _parameters(rotary)["rope_type"] == rope_type else own
    )


def _parameters(rotary: Any) -> dict[str, Any]:
    return rotary.config.rope_parameters


def _default(rotary: Any, C: int) -> Tensor:
    return _parameters(rotary)["rope_theta"] ** -(torch.arange(C, device=rotary.inv_freq.device) / C)


@bug(_of, "linear")
def linear_interpolated_twice(rotary, inv_freq_C: Tensor) -> Tensor:
    return inv_freq_C / _parameters(rotary)["factor"]


@bug(_of, "llama3")
def llama3_boundaries_swapped(rotary, inv_freq_C: Tensor) -> Tensor:
    config = copy.deepcopy(rotary.config)
    low, high = (config.rope_parameters[name] for name in ("low_freq_factor", "high_freq_factor"))
    config.rope_parameters |= {"low_freq_factor": high, "high_freq_factor": low}
    return ROPE_INIT_FUNCTIONS["llama3"](config, inv_freq_C.device)[0]


@bug(_of, "llama3")
def llama3_not_scaled(rotary, inv_freq_C: Tensor) -> Tensor:
    return _default(rotary, len(inv_freq_C))


@bug(_of, "longrope")
def longrope_short_factors(rotary, inv_freq_C: Tensor) -> Tensor:
    factor_C = torch.tensor(_parameters(rotary)["short_factor"], device=inv_freq_C.device)
    return _default(rotary, len(inv_freq_C)) / factor_C


def _static(config, rope, length):
    extended = extend(config, rope, length)
    if rope.type == "ntk":
        d, theta = rotated_dimensions(config), config.rope_parameters["rope_theta"]
        stretch = extended.rope_parameters["rope_theta"] / theta
        extended.rope_parameters["rope_theta"] = theta * stretch ** ((d - 2) / d)
    return extended


def _dynamic(rotary, inv_freq_C: Tensor) -> Tensor:
    theta, C = _parameters(rotary)["rope_theta"], len(inv_freq_C)
    place_C = torch.arange(C, device=inv_freq_C.device) / C
    stretch = inv_freq_C[-1] ** (-1 / place_C[-1]) / theta
    return (theta * stretch ** ((C - 1) / C)) ** -place_C


@Bug
@contextmanager
def ntk_exponent() -> Iterator[None]:
    with swap(extend, _static), _of("dynamic", _dynamic):
        yield


_CACHED = 2048

positions_clamped = Bug(lambda: positions(lambda position_ids_BT, _: position_ids_BT.clamp(max=_CACHED - 1)))


@bug(positions)
def positions_ignored(position_ids_BT: Tensor, _: Tensor) -> Tensor:
    return torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device).expand_as(position_ids_BT)


@bug(positions)
def positions_of_first_row(position_ids_BT: Tensor, _: Tensor) -> Tensor:
    return position_ids_BT[:1].expand_as(position_ids_BT)


@bug(positions)
def positions_off_after_boundary(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    return position_ids_BT + (document_ids_BT - 1).clamp(min=0)


@bug(positions)
def positions_reset(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    index_T = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return index_T - torch.where(begins_BT, index_T, 0).cummax(dim=1).values


@bug(tables)
def rope_angles_in_bf16(_: object, position_ids_BT: Tensor, inv_freq_C: Tensor) -> tuple[Tensor, Tensor]:
    angle = (position_ids_BT[..., None].float() * inv_freq_C).bfloat16().float()
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


@bug(frequencies)
def rope_half_of_the_head(_: object, inv_freq_C: Tensor) -> Tensor:
    C = inv_freq_C.shape[0]
    return torch.where(torch.arange(C, device=inv_freq_C.device) < C // 2, inv_freq_C, 0)


def _rotate(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos_B1TD, sin_B1TD))
    turned = torch.stack((-x_BHTD[..., 1::2], x_BHTD[..., ::2]), dim=-1).flatten(-2)
    return x_BHTD * cos + turned * sin


@bug(rotation)
def rope_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


rope_inv_freq_in_bf16 = Bug(lambda: frequencies(lambda _, inv_freq_C: inv_freq_C.bfloat16().float()))
rope_positions_in_bf16 = Bug(lambda: positions(lambda position_ids_BT, _: position_ids_BT.bfloat16().long()))


def _turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


@bug(rotation)
def rope_sign(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + _turn(q) * sin, k * cos + _turn(k) * sin


@bug(rotation)
def rope_sign_of_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import rotate_half

    return q * cos + rotate_half(q) * sin, k * cos - rotate_half(k) * sin


@bug(frequencies)
def rope_theta(_: object, inv_freq_C: Tensor) -> Tensor:
    C = inv_freq_C.shape[0]
    return inv_freq_C * 10.0 ** -(torch.arange(C, device=inv_freq_C.device) / C)


@bug(_of, "yarn")
def yarn_ramp_reversed(rotary, inv_freq_C: Tensor) -> Tensor:
    kept_C = _default(rotary, len(inv_freq_C))
    return (
        kept_C + kept_C / _parameters(rotary)["factor"] - inv_freq_C
    )  # the two blends of a ramp and of its reverse add up to this


@bug(in_every_family, "RotaryEmbedding", "forward")
def yarn_without_attention_factor(original, self, x, position_ids):
    with patch.object(self, "attention_scaling", 1.0):
        return original(self, x, position_ids)


def _rotated(count: Callable[[int, int], tuple[int, int]]) -> Context:
    """Let `count(D, R)`, given a head's D dimensions and its R that rotate, say how many rotate, and of how many they
    are made.
    """

    def other(rotary, inv_freq_C: Tensor) -> Tensor:
        rotated, of = count(SIZES["head_dim"], 2 * inv_freq_C.shape[0])
        return _parameters(rotary)["rope_theta"] ** (-torch.arange(0, rotated, 2, device=inv_freq_C.device) / of)

    return frequencies(other)


partial_ignored = Bug(lambda: _rotated(lambda D, R: (D, D)))
partial_of_whole_frequencies = Bug(lambda: _rotated(lambda D, R: (R, D)))
partial_rounded_up = Bug(lambda: _rotated(lambda D, R: (R + -R % 8, R + -R % 8)))


@bug(rotation)
def partial_at_the_end(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    R = cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        kept, part = x[..., :-R], x[..., -R:]
        return torch.cat((kept, part * cos - _turn(part) * sin), dim=-1)

    return turn(q), turn(k)


rotation_in_half = Bug(lambda: swap(rotate_in_float32, lambda model: None))


@bug(tables)
def rope_table_in_bf16(rotary, position_ids_BT: Tensor, inv_freq_C: Tensor) -> tuple[Tensor, Tensor]:
    angle = position_ids_BT[..., None].float() * torch.cat((inv_freq_C, inv_freq_C))
    return angle.cos().bfloat16().float(), angle.sin().bfloat16().float()


partial_ntk_of_the_head = Bug(lambda: patch.object(rope, "rotated_dimensions", rope._head_dim))
