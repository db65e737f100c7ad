"""Bugs of the forward pass: positions, frequencies and the rotation."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parity_tests.gate.case import SIZES
from parity_tests.zoo import Bug
from parity_tests.zoo.patch import Context, frequencies, in_every_family, positions, rotation, swap, tables
from torchtrain.modeling.rope import extend, rotated_dimensions
from torchtrain.modeling.rotation import rotate_in_float32


def _interleave_reversed_reverse(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    changed = position_ids_BT.clone()
    for row, documents in zip(changed, document_ids_BT, strict=True):
        for document in documents[documents > 0].unique():
            own = row[documents == document]
            jumps = (own.diff() != 1).nonzero().flatten() + 1
            row[documents == document] = torch.cat(own.tensor_split(jumps.cpu())[::-1])
    return changed


interleave_reversed = Bug(
    what="interleaved chunks at the wrong positions",
    where=(
        "AnchorContext's splitter of interleaved chunks slices the whole sequence, not the "
        "document: chunks land in wrong places"
    ),
    stage="forward",
    apply=lambda: positions(_interleave_reversed_reverse),
    likely={"variant": ("anchor+interleave", "intra+interleave")},
)


def _again(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters = rotary.config.rope_parameters
    return inv_freq_C / parameters["factor"] if parameters["rope_type"] == "linear" else inv_freq_C


linear_interpolated_twice = Bug(
    what="linear scaling applied twice",
    where=(
        "seen in reviews: interpolation moved from the positions to inv_freq (as transformers did) and left in both; "
        "sglang PR 33558 squares YaRN's factor alike"
    ),
    stage="forward",
    apply=lambda: frequencies(_again),
    likely={"rope": "linear"},
)


def _swap(rotary, inv_freq_C: Tensor) -> Tensor:
    if rotary.config.rope_parameters["rope_type"] != "llama3":
        return inv_freq_C
    config = copy.deepcopy(rotary.config)
    low, high = (config.rope_parameters[name] for name in ("low_freq_factor", "high_freq_factor"))
    config.rope_parameters |= {"low_freq_factor": high, "high_freq_factor": low}
    return ROPE_INIT_FUNCTIONS["llama3"](config, inv_freq_C.device)[0]


llama3_boundaries_swapped = Bug(
    what="llama3 boundaries swapped",
    where=(
        "seen in reviews of ports: wavelength bounds are original length over each factor, so the "
        "high factor bounds the short waves"
    ),
    stage="forward",
    apply=lambda: frequencies(_swap),
    likely={"rope": "llama3"},
)


def _keep(rotary, inv_freq_C: Tensor) -> Tensor:
    if rotary.config.rope_parameters["rope_type"] != "llama3":
        return inv_freq_C
    C = inv_freq_C.shape[0]
    return rotary.config.rope_parameters["rope_theta"] ** -(torch.arange(C, device=inv_freq_C.device) / C)


# A Llama 3.1 checkpoint run with plain RoPE: the config's scaling is parsed and never read.
llama3_not_scaled = Bug(
    what="llama3 scaling ignored",
    where=(
        "mlxcel issue 1355, felafax issue 59, tiny-vllm PR 1, mlir-air PR 1948: short prompts look "
        "right, long ones fall apart"
    ),
    stage="forward",
    apply=lambda: frequencies(_keep),
    likely={"rope": "llama3"},
)


def _always_short(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters = rotary.config.rope_parameters
    if parameters["rope_type"] != "longrope":
        return inv_freq_C
    C = inv_freq_C.shape[0]
    factor_C = torch.tensor(parameters["short_factor"], device=inv_freq_C.device)
    return parameters["rope_theta"] ** -(torch.arange(C, device=inv_freq_C.device) / C) / factor_C


longrope_short_factors = Bug(
    what="LongRoPE's short factors beyond the original length",
    where="Phi-3 and Phi-4 ports: vLLM PR 27431, MLC-LLM PR 3375, mlxcel issue 1358 choose one list for all lengths",
    stage="forward",
    apply=lambda: frequencies(_always_short),
    likely={"rope": "longrope"},
)


def _static(config, rope, length):
    extended = extend(config, rope, length)
    if rope.type == "ntk":
        d, theta = rotated_dimensions(config), config.rope_parameters["rope_theta"]
        stretch = extended.rope_parameters["rope_theta"] / theta
        extended.rope_parameters["rope_theta"] = theta * stretch ** ((d - 2) / d)
    return extended


def _dynamic(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters, C = rotary.config.rope_parameters, inv_freq_C.shape[0]
    if parameters["rope_type"] != "dynamic":
        return inv_freq_C
    place_C = torch.arange(C, device=inv_freq_C.device) / C
    stretch = inv_freq_C[-1] ** (-1 / place_C[-1]) / parameters["rope_theta"]
    return (parameters["rope_theta"] * stretch ** ((C - 1) / C)) ** -place_C


@contextmanager
def _ntk_exponent() -> Iterator[None]:
    with swap(extend, _static), frequencies(_dynamic):
        yield


# The base times the factor, without the exponent d / (d - 2) that divides the slowest pair by the factor.
ntk_exponent = Bug(
    what="NTK-aware base without its exponent",
    where=(
        "seen in reviews of ports: base * s for base * s ** (d / (d - 2)), which arXiv 2309.00071 "
        "derives in section 3.1"
    ),
    stage="forward",
    apply=_ntk_exponent,
    likely={"rope": ("ntk", "dynamic")},
)


_CACHED = 2048

# Positions beyond the cached cos and sin read the last row of the table: an indexed gather that clamps in silence.
positions_clamped = Bug(
    what="positions clamped to the cached table",
    where=(
        "JAX gathers clamp out-of-range indices by default, so a cos/sin table that is too short "
        "gives no error (seen in reviews)"
    ),
    stage="forward",
    apply=lambda: positions(lambda position_ids_BT, _: position_ids_BT.clamp(max=_CACHED - 1)),
)


def _arange(position_ids_BT: Tensor, _: Tensor) -> Tensor:
    return torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device).expand_as(position_ids_BT)


positions_ignored = Bug(
    what="position_ids ignored",
    where="Megatron-LM issue 453, Megatron-LLM issue 23, NeMo Automodel PR 2377: RoPE tables taken by row index",
    stage="forward",
    apply=lambda: positions(_arange),
    likely={"variant": ("intra_reset", "anchor+interleave", "intra+interleave")},
)


def _first_row(position_ids_BT: Tensor, _: Tensor) -> Tensor:
    return position_ids_BT[:1].expand_as(position_ids_BT)


positions_of_first_row = Bug(
    what="the first row's positions for every row",
    where="seen in reviews of cos/sin caches shaped [1, T, D]",
    stage="forward",
    apply=lambda: positions(_first_row),
    likely={"variant": ("intra_reset", "anchor+interleave", "intra+interleave")},
)


def _shift(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    return position_ids_BT + (document_ids_BT - 1).clamp(min=0)


# Each boundary shifts the positions after it by one, as a separator that was counted and then removed.
positions_off_after_boundary = Bug(
    what="positions off by one after each boundary",
    where="nanoVLM issue 201: positions counted through a pad token between packed samples",
    stage="forward",
    apply=lambda: positions(_shift),
    likely={"variant": ("anchor", "intra")},
)


def _restart(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    index_T = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return index_T - torch.where(begins_BT, index_T, 0).cummax(dim=1).values


# Every document starts at 0 where positions should run on: the anchor is at every document's first place.
positions_reset = Bug(
    what="positions reset in every document (anchor included)",
    where=(
        "padding-free collators that reset positions by themselves (transformers' "
        "DataCollatorWithFlattening) under a recipe that must not"
    ),
    stage="forward",
    apply=lambda: positions(_restart),
    likely={"variant": "anchor"},
)


def _rope_angles_in_bf16(_: object, position_ids_BT: Tensor, inv_freq_C: Tensor) -> tuple[Tensor, Tensor]:
    angle = (position_ids_BT[..., None].float() * inv_freq_C).bfloat16().float()
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


# cos and sin of angles that were rounded to bfloat16: at position 1000 an angle is off by up to 2 radians.
rope_angles_in_bf16 = Bug(
    what="cos and sin of angles in bf16",
    where=(
        "transformers before 4.38.2 under autocast (PR 29285), modded-nanogpt issue 39; the subject of arXiv 2411.13476"
    ),
    stage="forward",
    apply=lambda: tables(_rope_angles_in_bf16),
)


def _partial(_: object, inv_freq_C: Tensor) -> Tensor:
    C = inv_freq_C.shape[0]
    return torch.where(torch.arange(C, device=inv_freq_C.device) < C // 2, inv_freq_C, 0)


rope_half_of_the_head = Bug(
    what="half of each head rotated",
    where="seen in reviews of ports: GPT-NeoX's partial rotary factor left on for a model that rotates whole heads",
    stage="forward",
    apply=lambda: frequencies(_partial),
)


def _rotate(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos_B1TD, sin_B1TD))
    turned = torch.stack((-x_BHTD[..., 1::2], x_BHTD[..., ::2]), dim=-1).flatten(-2)
    return x_BHTD * cos + turned * sin


def _interleave(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


# Neighbouring pairs rotate together (GPT-J, Meta's Llama) though the weights are for halves (GPT-NeoX).
rope_interleaved = Bug(
    what="interleaved pairs instead of halves",
    where=(
        "every port between Meta's and transformers' Llama: transformers issue 25199, "
        "flash-attention issue 288, shainet PR 111"
    ),
    stage="forward",
    apply=lambda: rotation(_interleave),
)


rope_inv_freq_in_bf16 = Bug(
    what="inv_freq rounded by model.to(bf16)",
    where=(
        "transformers issue 25681, GPT-NeoX PR 1016, and NeMo Automodel PR 2549 in 2026: seven model families at once"
    ),
    stage="forward",
    apply=lambda: frequencies(lambda _, inv_freq_C: inv_freq_C.bfloat16().float()),
)


# Positions in the model's dtype: from 256 on, bfloat16 cannot tell neighbours apart.
rope_positions_in_bf16 = Bug(
    what="positions counted in bf16",
    where="GPT-NeoX issue 1003 and PR 1016: arange(...).type_as(inv_freq), so that 256 and 257 are one position",
    stage="forward",
    apply=lambda: positions(lambda position_ids_BT, _: position_ids_BT.bfloat16().long()),
)


def _turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def _backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _turn(q) * sin, k * cos + _turn(k) * sin


# Both halves are turned the other way. Scores keep: q and k turn together; the taps after RoPE do not.
rope_sign = Bug(
    what="rotation in the other direction",
    where=(
        "seen in reviews of hand-written kernels: rotate_half as (x2, -x1); a model trained with it "
        "cannot tell, a ported one can"
    ),
    stage="forward",
    apply=lambda: rotation(_backwards),
)


def _oppose(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos - rotate_half(k) * sin


rope_sign_of_keys = Bug(
    what="keys rotated backwards",
    where="seen in reviews of fused rotation kernels, where the backward pass (angle negated) was reused for k",
    stage="forward",
    apply=lambda: rotation(_oppose),
)


def _ten_times_the_base(_: object, inv_freq_C: Tensor) -> Tensor:
    C = inv_freq_C.shape[0]
    return inv_freq_C * 10.0 ** -(torch.arange(C, device=inv_freq_C.device) / C)


# The base that every config once had, whatever this config says: f(theta) becomes f(10 theta).
rope_theta = Bug(
    what="theta off by a factor of 10",
    where=(
        "loaders that drop rope_theta and fall back to a default: koboldcpp issue 487 (CodeLlama), "
        "airllm issue 368 (Llama 3)"
    ),
    stage="forward",
    apply=lambda: frequencies(_ten_times_the_base),
)


def _yarn_ramp_reversed_reverse(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters = rotary.config.rope_parameters
    if parameters["rope_type"] != "yarn":
        return inv_freq_C
    C = inv_freq_C.shape[0]
    kept_C = parameters["rope_theta"] ** -(torch.arange(C, device=inv_freq_C.device) / C)
    interpolated_C = kept_C / parameters["factor"]
    return kept_C + interpolated_C - inv_freq_C  # the two blends of a ramp and of its reverse add up to this


# YaRN keeps the slow pairs and interpolates the fast ones: the ramp between is read from the wrong end.
yarn_ramp_reversed = Bug(
    what="YaRN's ramp reversed",
    where="seen in reviews of ports: mask and 1 - mask change places between the paper's code and transformers'",
    stage="forward",
    apply=lambda: frequencies(_yarn_ramp_reversed_reverse),
    likely={"rope": "yarn"},
)


def _yarn_without_attention_factor(original):
    def forward(self, x, position_ids):
        with patch.object(self, "attention_scaling", 1.0):
            return original(self, x, position_ids)

    return forward


# cos and sin lack the factor 0.1 ln(s) + 1 that sharpens attention over the longer context.
yarn_without_attention_factor = Bug(
    what="YaRN without its attention factor",
    where=(
        "exllamav3 issue 259 (1.0.0 to 1.2.1: fluent text that does not follow the prompt); vLLM PR "
        "48623, sglang PR 33558"
    ),
    stage="forward",
    apply=lambda: in_every_family("RotaryEmbedding", "forward", _yarn_without_attention_factor),
    likely={"rope": "yarn"},
)


def _rotated(count: Callable[[int, int], tuple[int, int]]) -> Context:
    """Let `count(D, R)`, given a head's D dimensions and its R that rotate, say how many rotate, and of how many they
    are made.
    """

    def other(rotary, inv_freq_C: Tensor) -> Tensor:
        rotated, of = count(SIZES["head_dim"], 2 * inv_freq_C.shape[0])
        return rotary.config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, rotated, 2, device=inv_freq_C.device) / of
        )

    return frequencies(other)


_PARTIAL = {"model": "partial", "rope": "keep"}

partial_ignored = Bug(
    what="the whole head rotated for a part",
    where="seen in reviews of ports of Phi and GLM: the tables are made of head_dim",
    stage="forward",
    apply=lambda: _rotated(lambda D, R: (D, D)),
    likely=_PARTIAL,
)

# The part's frequencies are the first of the whole head's: theta ** (-2 i / D), not theta ** (-2 i / R).
partial_of_whole_frequencies = Bug(
    what="the whole head's frequencies for a part",
    where="seen in reviews: tables of a whole head, cut to the part that rotates",
    stage="forward",
    apply=lambda: _rotated(lambda D, R: (R, D)),
    likely=_PARTIAL,
)

partial_rounded_up = Bug(
    what="the rotated part rounded up to a multiple of 8",
    where="seen in reviews: transformers cuts head_dim * partial_rotary_factor, a kernel takes multiples of 8",
    stage="forward",
    apply=lambda: _rotated(lambda D, R: (R + -R % 8, R + -R % 8)),
    likely=_PARTIAL,
)


def _rotate_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    R = cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        kept, part = x[..., :-R], x[..., -R:]
        return torch.cat((kept, part * cos - _turn(part) * sin), dim=-1)

    return turn(q), turn(k)


partial_at_the_end = Bug(
    what="the last part of the head rotated for the first",
    where="DeepSeek's heads end with the part that rotates, Phi's and GLM's begin with it (seen in reviews)",
    stage="forward",
    apply=lambda: rotation(_rotate_last),
    likely=_PARTIAL,
)


rotation_in_half = Bug(
    what="rotation in the model's dtype where float32 is asked for",
    where="seen in reviews: a setting without effect; transformers casts cos and sin to the hidden states' dtype",
    stage="forward",
    apply=lambda: swap(rotate_in_float32, lambda model: None),
    likely={"rotation": "float32"},
)


def _table_in_bf16(rotary, position_ids_BT: Tensor, inv_freq_C: Tensor) -> tuple[Tensor, Tensor]:
    angle = position_ids_BT[..., None].float() * torch.cat((inv_freq_C, inv_freq_C))
    return angle.cos().bfloat16().float(), angle.sin().bfloat16().float()


rope_table_in_bf16 = Bug(
    what="cos and sin rounded to bfloat16 before they are used in float32",
    where="seen in reviews: tables that are kept as buffers are cast together with the model",
    stage="forward",
    apply=lambda: tables(_table_in_bf16),
    likely={"rotation": "float32"},
)
