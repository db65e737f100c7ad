"""RoPE: the oracle's frequencies against transformers' own functions, its roundings against torch bit for bit.

What was found (transformers 5.23, torch 2.13, on a CPU):
- In exact arithmetic the two sides agree for every type: transformers' own code, run on 200-bit numbers and rounded
  once, is the oracle's float64.
- In float32 the correctly rounded frequency is the oracle's. transformers' is at most one unit in the last place away
  for `default` and `linear` where D is a power of two, so that the exponents 2i/D are exact. Elsewhere it is farther: 6
  units at D = 96 and 7 at D = 66, because a rounded exponent counts times log(theta); 14 for llama3 and 20 for yarn
  without truncation, both at D = 96, because their blends subtract numbers close to each other. Its own operations set
  the bound there.
- In bfloat16 and float16 the tables may differ only where a float32 cosine lies next to a tie (on the machine of this
  note they differed nowhere), and on equal tables every rotated element is the same, compiled or not.

Legend: B batch · T tokens of a row · H heads · D head_dim · C = D / 2 rotated pairs.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, modeling_rope_utils
from transformers.models.llama import modeling_llama

from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rope_spec import RopeSpec
from jaxref.rounding import preset

U = mpmath.mpf(2) ** -24  # unit roundoff of float32
ORIGINAL = 8192
EXTENDED = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def parameters(rope_type: str, head_dim: int) -> dict[str, Any]:
    pairs = head_dim // 2
    return {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": EXTENDED,
        "yarn, not truncated": EXTENDED | {"factor": 40.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.75},
        "llama3": EXTENDED | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": EXTENDED
        | {
            "short_factor": [1 + i / (7 * pairs) for i in range(pairs)],
            "long_factor": [1 + 63 * i / pairs for i in range(pairs)],
        },
    }[rope_type]


# transformers' exponent d / (d - 2) is a Python float: exact for 66, so that `dynamic` can be compared exactly too.
CASES = [
    (rope_type, head_dim, theta)
    for rope_type in ("default", "linear", "yarn", "yarn, not truncated", "llama3", "longrope")
    for head_dim in (64, 96, 128)
    for theta in (1e4, 5e5, 5e7)
] + [("dynamic", 66, theta) for theta in (1e4, 5e5, 5e7)]
LENGTHS = (None, 3 * ORIGINAL)  # at which `dynamic` and `longrope` look


def config_of(rope_type: str, head_dim: int, theta: float) -> LlamaConfig:
    rope = {"rope_type": rope_type.split(",")[0], "rope_theta": theta} | parameters(rope_type, head_dim)
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=ORIGINAL if rope_type == "dynamic" else 4 * ORIGINAL,
        rope_parameters=rope,
    )


def transformers_frequencies(config: LlamaConfig, seq_len: int | None) -> tuple[Any, Any]:
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        return modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=seq_len)


class Tracked:
    """An exact number, and a bound on how far a float32 computation of it can be.

    The standard model: every operation rounds once, by at most u of its result; a Python number is rounded when it
    meets a tensor; a number over a tensor is a reciprocal and a product; `pow` errs by a unit in the last place, 2u.
    """

    def __init__(self, exact: Any, error: Any = 0):
        self.exact, self.error = mpmath.mpf(exact), mpmath.mpf(error)

    def _rounded(self, roundings: int = 1) -> "Tracked":
        held = self.error == 0 and mpmath.mpf(float(np.float32(float(self.exact)))) == self.exact
        return self if held else Tracked(self.exact, self.error + roundings * U * (abs(self.exact) + self.error))

    @staticmethod
    def of(x: Any) -> "Tracked":
        return x if isinstance(x, Tracked) else Tracked(x)._rounded()

    def __add__(self, other: Any) -> "Tracked":
        other = Tracked.of(other)
        return Tracked(self.exact + other.exact, self.error + other.error)._rounded()

    def __mul__(self, other: Any) -> "Tracked":
        other = Tracked.of(other)
        error = abs(self.exact) * other.error + abs(other.exact) * self.error + self.error * other.error
        return Tracked(self.exact * other.exact, error)._rounded()

    def reciprocal(self) -> "Tracked":
        return Tracked(1 / self.exact, self.error / (abs(self.exact) * (abs(self.exact) - self.error)))._rounded()

    def __truediv__(self, other: Any) -> "Tracked":
        other = Tracked.of(other)
        error = (abs(self.exact) * other.error + abs(other.exact) * self.error) / (
            abs(other.exact) * (abs(other.exact) - other.error)
        )
        return Tracked(self.exact / other.exact, error)._rounded()

    def __rpow__(self, base: Any) -> "Tracked":
        base = Tracked.of(base)
        farthest = (base.exact + base.error) ** (self.exact + self.error)
        return Tracked(base.exact**self.exact, farthest - base.exact**self.exact)._rounded(2)

    def __neg__(self) -> "Tracked":
        return Tracked(-self.exact, self.error)

    def __sub__(self, other: Any) -> "Tracked":
        return self + -Tracked.of(other)

    def __rsub__(self, other: Any) -> "Tracked":
        return Tracked.of(other) - self

    def __rtruediv__(self, other: Any) -> "Tracked":
        return self.reciprocal() * other

    def __lt__(self, other: Any) -> bool:
        return self.exact < Tracked.of(other).exact

    def __gt__(self, other: Any) -> bool:
        return self.exact > Tracked.of(other).exact

    __radd__, __rmul__ = __add__, __mul__


class TrackedTensor(np.ndarray):
    """An array of `Tracked` with the three methods of a tensor that transformers' RoPE calls."""

    def to(self, *_: Any, **__: Any) -> "TrackedTensor":
        return self

    float = to


def tensor_of(numbers: Any) -> TrackedTensor:
    return np.array([Tracked.of(x) for x in numbers], dtype=object).view(TrackedTensor)


def clamp(x: TrackedTensor, low: float, high: float) -> TrackedTensor:
    return tensor_of([Tracked(low) if t < low else Tracked(high) if t > high else t for t in x])


TRACKED_TORCH = SimpleNamespace(
    float=None,
    float32=None,
    int64=None,
    Tensor=TrackedTensor,
    arange=lambda *bounds, **_: tensor_of(range(*bounds)),
    tensor=lambda numbers, **_: tensor_of(numbers),
    where=lambda condition, x, y: np.where(condition, x, y).view(TrackedTensor),
    clamp=clamp,
)
EXACT_MATH = SimpleNamespace(
    log=mpmath.log,
    sqrt=mpmath.sqrt,
    pi=mpmath.mp.pi,
    floor=lambda x: int(mpmath.floor(x)),
    ceil=lambda x: int(mpmath.ceil(x)),
)


@pytest.fixture(autouse=True)
def _two_hundred_bits():
    with mpmath.workprec(200):
        yield


def tracked_frequencies(monkeypatch, config: LlamaConfig, seq_len: int | None) -> tuple[list[Tracked], Any]:
    with monkeypatch.context() as patch:
        for module in (modeling_rope_utils, modeling_llama):
            patch.setattr(module, "torch", TRACKED_TORCH)
        patch.setattr(modeling_rope_utils, "math", EXACT_MATH)
        # A length of 200 bits keeps `dynamic` from computing its base in Python's float64.
        frequencies, scaling = transformers_frequencies(config, seq_len and mpmath.mpf(seq_len))
    return list(frequencies), scaling


def units_apart(x: np.ndarray, y: np.ndarray) -> int:
    return int(np.abs(x.view(np.int32) - y.view(np.int32)).max())


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize(("rope_type", "head_dim", "theta"), CASES)
def test_frequencies(monkeypatch, rope_type, head_dim, theta, seq_len):
    config = config_of(rope_type, head_dim, theta)
    ours, our_scaling = inverse_frequencies(RopeSpec.from_hf(config.to_dict()), seq_len)
    tracked, exact_scaling = tracked_frequencies(monkeypatch, config, seq_len)
    exact = [t.exact for t in tracked]

    # Exact: transformers' own code on exact numbers, rounded once.
    np.testing.assert_array_equal(ours, [float(x) for x in exact])
    assert our_scaling == float(exact_scaling)

    # In float32 ours is the nearest number ...
    ours32 = ours.astype(np.float32)
    with mpmath.workprec(24):
        np.testing.assert_array_equal(ours32, [float(+x) for x in exact])
    # ... and theirs as near as its operations say.
    theirs32 = transformers_frequencies(config, seq_len)[0].numpy()
    assert theirs32.dtype == np.float32
    for their, t in zip(theirs32, tracked, strict=True):
        assert abs(mpmath.mpf(float(their)) - t.exact) <= t.error
    if math.log2(head_dim).is_integer() and rope_type in ("default", "linear"):
        assert units_apart(ours32, theirs32) <= 1


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POSITIONS = torch.tensor([[*range(40), *range(4000, 4040), *range(32_728, 32_768), *range(131_032, 131_072)]])


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("rope_type", ["default", "yarn", "longrope"])
@pytest.mark.parametrize("half", HALVES)
def test_hf_eager_rotates_bit_for_bit(half, rope_type, compile_):
    dtype, rounding = HALVES[half], preset(f"hf_eager_{half}")
    rope = modeling_llama.LlamaRotaryEmbedding(config_of(rope_type, 64, 5e5))
    x_BTHD = torch.randn(1, POSITIONS.shape[1], 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    their_cos, their_sin = rope(x_BTHD, POSITIONS)
    theirs, _ = modeling_llama.apply_rotary_pos_emb(x_BTHD, x_BTHD, their_cos, their_sin, unsqueeze_dim=2)
    assert theirs.dtype == dtype

    frequencies = rope.inv_freq.double().numpy()  # after the call, which may have chosen the long factors
    jit = jax.jit if compile_ else lambda function: function
    cos, sin = jit(lambda positions: cos_sin(positions, frequencies, rope.attention_scaling, rounding))(
        POSITIONS.numpy()
    )
    angle = (POSITIONS[..., None].float() * rope.inv_freq).double()
    for ours, their, exact in ((cos, their_cos, angle.cos()), (sin, their_sin, angle.sin())):
        assert_tables_equal_but_at_ties(np.asarray(ours), their[..., :32], exact * rope.attention_scaling)

    their_tables = (jnp.asarray(table[..., :32].float().numpy()) for table in (their_cos, their_sin))
    turn = jit(lambda x, cos, sin: rotate(x, cos, sin, rounding, "q_rotated"))
    ours = turn(jnp.asarray(x_BTHD.float().numpy()), *their_tables)
    np.testing.assert_array_equal(ours, theirs.float().numpy())


def assert_tables_equal_but_at_ties(ours: np.ndarray, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Two float32 cosines differ in their last digits, so their roundings may where a tie lies between: within the two
    units in the last place that a faithful cosine and its product with the attention scaling can be off.
    """
    theirs_float = theirs.float().numpy()
    differs = ours != theirs_float
    tie = (ours.astype(np.float64) + theirs_float) / 2
    reach = 2 * np.spacing(np.abs(exact.float().numpy()))
    assert (np.abs(exact.numpy() - tie)[differs] <= reach[differs]).all()
