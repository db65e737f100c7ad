"""Rotary position embedding: inverse frequencies of every type, tables, rotation, each rounding by name.

Types and where they come from: default (RoFormer, arXiv 2104.09864) · linear (position interpolation, arXiv 2306.15595) · ntk
(static NTK-aware: the default type with base s^(d/(d-2)); transformers has no name for it) · dynamic (dynamic NTK:
the base grows with the sequence) · yarn (arXiv 2309.00071) · llama3 (Llama 3.1) · longrope (arXiv 2402.13753). Where transformers
has the type, its `modeling_rope_utils.py` is what users run, and the formulas here are those, in float64.

Legend: B batch · T tokens of a row · H heads · D head_dim · C = D / 2 rotated pairs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxref.rounding import Rounding

TYPES = ("default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")

# The base the paper trains each length with (arXiv 2411.13476).
PAPER_ROPE_THETA = {32_768: 1e6, 65_536: 5e6, 131_072: 1e7, 262_144: 5e7}

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}


def paper_theta(length: int) -> float:
    """The paper's base for a context length; a length it has none for is a ValueError."""
    if length not in PAPER_ROPE_THETA:
        raise ValueError(f"context length {length}: the paper has a base for {', '.join(map(str, PAPER_ROPE_THETA))}")
    return PAPER_ROPE_THETA[length]


@dataclass(frozen=True)
class RopeSpec:
    """A type and its parameters, under transformers' names. Hashable.

    Raises ValueError: an unknown type, a parameter the type needs and has not, factors of a length other than D / 2.
    """

    head_dim: int
    theta: float
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in TYPES:
            raise ValueError(f"rope_type: {self.rope_type!r} is unknown; known: {', '.join(TYPES)}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim}; RoPE rotates pairs, give an even number")
        if not self.theta > 1:
            raise ValueError(f"rope_theta: {self.theta}; give a number above 1")
        for name in _NEEDS[self.rope_type]:
            if getattr(self, name) is None:
                raise ValueError(f"{name}: missing; rope_type {self.rope_type!r} needs it")
        for name in ("short_factor", "long_factor"):
            given = getattr(self, name)
            if given is not None and len(given) != self.head_dim // 2:
                raise ValueError(f"{name}: {len(given)} factors for {self.head_dim // 2} pairs")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeSpec":
        """Read transformers 5's `rope_parameters`, or the older `rope_theta` and `rope_scaling`, from a `config.json`.

        Raises ValueError: what `RopeSpec` raises, and a partial rotation.
        """
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = given.get("rope_theta", config.get("rope_theta", 10_000.0))
        rope_type = given.get("rope_type", given.get("type", "default"))
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError("partial_rotary_factor: only whole heads are rotated here")
        # What is not written falls back as in transformers: the length the scaling starts from, and the ratio of the two.
        longest = config.get("max_position_embeddings")
        original = given.get(
            "original_max_position_embeddings", config.get("original_max_position_embeddings", longest)
        )
        if rope_type == "dynamic":
            original = longest
        factor = given.get("factor")
        if factor is None and rope_type in ("yarn", "longrope") and longest and original:
            factor = longest / original
        known = {f.name for f in fields(cls)} - {"head_dim", "theta", "rope_type", "factor"}
        rest = {name: value for name, value in given.items() if name in known and value is not None}
        rest |= {name: tuple(rest[name]) for name in ("short_factor", "long_factor") if name in rest}
        rest["original_max_position_embeddings"] = None if rope_type in ("default", "linear", "ntk") else original
        return cls(head_dim=head_dim, theta=float(theta), rope_type=rope_type, factor=factor, **rest)

    def to_hf(self) -> dict[str, Any]:
        """`rope_parameters` as transformers 5 writes them; `ntk` becomes the default type with its larger base."""
        if self.rope_type == "ntk":
            return {"rope_type": "default", "rope_theta": _ntk_base(self.theta, self.factor, self.head_dim)}
        standard = {f.name: f.default for f in fields(self)}
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("head_dim", "theta", "rope_type")}
        changed = {name: value for name, value in rest.items() if value != standard[name]}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}
        return {"rope_type": self.rope_type, "rope_theta": self.theta, **lists}


def inverse_frequencies(spec: RopeSpec, seq_len: int | None = None) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor on cos and sin, in float64.

    Args:
        spec: the type and its parameters.
        seq_len: largest position of the batch + 1; only `dynamic` and `longrope` look at it.

    Returns:
        float64 [C], radians a token; and the attention scaling (1 but for `yarn` and `longrope`).
    """
    exponents_C = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    default_C = 1.0 / spec.theta**exponents_C
    match spec.rope_type:
        case "default":
            return default_C, 1.0
        case "linear":
            return default_C / _given(spec.factor), 1.0
        case "ntk":
            return 1.0 / _ntk_base(spec.theta, spec.factor, spec.head_dim) ** exponents_C, 1.0
        case "dynamic":
            factor, original = _given(spec.factor), _given(spec.original_max_position_embeddings)
            length = max(seq_len or 0, original)
            stretch = factor * length / original - (factor - 1)
            return 1.0 / (spec.theta * stretch ** (spec.head_dim / (spec.head_dim - 2))) ** exponents_C, 1.0
        case "yarn":
            return _yarn(spec, default_C)
        case "llama3":
            return _llama3(spec, default_C), 1.0
        case "longrope":
            return _longrope(spec, default_C, seq_len)
    raise AssertionError(spec.rope_type)


def cos_sin(
    position_ids_BT: Any, inv_freq_C: Any, attention_scaling: float, rounding: Rounding
) -> tuple[jax.Array, jax.Array]:
    """Tables of cos and sin [B, T, C] in the carrier.

    Args:
        position_ids_BT: integers [B, T], below 2^53 (2^24 are exact in a float32 carrier).
        inv_freq_C: float64 [C] from `inverse_frequencies`; the carrier takes it with one rounding.
        attention_scaling: factor on both tables.
        rounding: sites `inv_freq`, `angle`, `table`.
    """
    inv_freq_C = rounding.round("inv_freq", jnp.asarray(inv_freq_C, dtype=jnp.float64).astype(rounding.dtype))
    position_BT1 = jnp.asarray(position_ids_BT).astype(rounding.dtype)[..., None]
    angle_BTC = rounding.round("angle", position_BT1 * inv_freq_C)
    cos_BTC, sin_BTC = jnp.cos(angle_BTC), jnp.sin(angle_BTC)
    if attention_scaling != 1.0:
        cos_BTC, sin_BTC = cos_BTC * attention_scaling, sin_BTC * attention_scaling
    return rounding.round("table", cos_BTC), rounding.round("table", sin_BTC)


def rotate(x_BTHD: Any, cos_BTC: jax.Array, sin_BTC: jax.Array, rounding: Rounding, site: str) -> jax.Array:
    """Rotate pairs (i, i + D/2), the half-split convention of transformers' Llama.

    (a, b) -> (a cos - b sin, b cos + a sin)

    Args:
        x_BTHD: queries or keys [B, T, H, D]; taken into the carrier.
        cos_BTC, sin_BTC: tables in the carrier.
        rounding: sites `rope_product`, `rope_sum` and the one named by `site`.
        site: `q_rotated` or `k_rotated`.
    """
    x_BTHD = jnp.asarray(x_BTHD).astype(rounding.dtype)
    a, b = jnp.split(x_BTHD, 2, axis=-1)
    cos, sin = cos_BTC[:, :, None], sin_BTC[:, :, None]

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return rounding.round("rope_product", x * y)

    first = rounding.round("rope_sum", product(a, cos) - product(b, sin))
    second = rounding.round("rope_sum", product(b, cos) + product(a, sin))
    return rounding.round(site, jnp.concatenate([first, second], axis=-1))


def _given(value: Any) -> Any:
    assert value is not None, "RopeSpec checks what its type needs"
    return value


def _ntk_base(theta: float, factor: float | None, head_dim: int) -> float:
    return theta * _given(factor) ** (head_dim / (head_dim - 2))


def _yarn(spec: RopeSpec, default_C: np.ndarray) -> tuple[np.ndarray, float]:
    """Interpolate slow pairs, keep fast ones, ramp between, measured in rotations over the original context."""
    factor, original, D = _given(spec.factor), _given(spec.original_max_position_embeddings), spec.head_dim

    def pair_of(rotations: float) -> float:
        return D * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    if low == high:
        high += 0.001
    ramp_C = np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
    inv_freq_C = default_C / factor * ramp_C + default_C * (1 - ramp_C)

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if spec.attention_factor is not None:
        return inv_freq_C, spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return inv_freq_C, mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return inv_freq_C, mscale()


def _llama3(spec: RopeSpec, default_C: np.ndarray) -> np.ndarray:
    """Divide long wavelengths by the factor, keep short ones, blend between."""
    factor, original = _given(spec.factor), _given(spec.original_max_position_embeddings)
    low, high = _given(spec.low_freq_factor), _given(spec.high_freq_factor)
    wavelength_C = 2 * math.pi / default_C
    blend_C = (original / wavelength_C - low) / (high - low)
    blended_C = (1 - blend_C) * default_C / factor + blend_C * default_C
    long_or_blended_C = np.where(wavelength_C > original / low, default_C / factor, blended_C)
    return np.where(wavelength_C < original / high, default_C, long_or_blended_C)


def _longrope(spec: RopeSpec, default_C: np.ndarray, seq_len: int | None) -> tuple[np.ndarray, float]:
    """Divide each pair by its own searched factor: the long set beyond the original context, the short set within."""
    factor, original = _given(spec.factor), _given(spec.original_max_position_embeddings)
    factors = spec.long_factor if seq_len is not None and seq_len > original else spec.short_factor
    scaling = spec.attention_factor
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return default_C / np.asarray(_given(factors), dtype=np.float64), scaling
