"""Rotary position embedding: inverse frequencies of every type, tables, rotation, each rounding by name.

| type       | inverse frequencies, f = theta^(-2i/D)                                   | source            |
| ---------- | ------------------------------------------------------------------------ | ----------------- |
| `default`  | f                                                                        | arXiv 2104.09864  |
| `linear`   | f / factor (position interpolation)                                      | arXiv 2306.15595  |
| `ntk`      | f of the base theta factor^(D/(D-2)); transformers has no name for it    | arXiv 2309.00071  |
| `dynamic`  | the same with a factor that grows with the sequence                      | arXiv 2309.00071  |
| `yarn`     | fast pairs f, slow pairs f / factor, a ramp between                      | arXiv 2309.00071  |
| `llama3`   | short waves f, long waves f / factor, a blend between                    | Llama 3.1         |
| `longrope` | f over a searched factor for each pair                                   | arXiv 2402.13753  |
| `proportional` | f / factor of the first pairs, 0 of the others                       | Gemma 4           |

Read `inverse_frequencies`, `cos_sin` and `rotate`. A first reader may skip the functions after `rotate`, one for each
type.

Formulas and names are those of transformers' `modeling_rope_utils.py`, for the types that it has, with one difference.
Its `dynamic` depends on earlier calls; here `dynamic` is a function of its arguments.

Frequencies are computed in 50 decimal digits and rounded once, so they are the float64 numbers nearest to the formulas.

Legend: B batch · A batch, or 1 · T tokens of a row · H heads · D head_dim · C = D / 2 rotated pairs.
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxref.rope_spec import DIGITS, RopeSpec, decimal, ntk_base
from jaxref.rounding import Rounding

_TWO_PI = Decimal("6.2831853071795864769252867665590057683943387987502")


def inverse_frequencies(spec: RopeSpec, seq_len: int | None = None) -> tuple[np.ndarray, float]:
    """Return inverse frequencies, float64 [C] in radians a token, and the attention scaling, a factor on cos and sin.

    seq_len: the largest position + 1, at which `dynamic` and `longrope` look; None is the original length or less.
    """
    D = spec.head_dim
    with localcontext(prec=DIGITS):
        base = ntk_base(spec, seq_len) if spec.rope_type in ("ntk", "dynamic") else Decimal(spec.theta)
        plain = [base ** (-Decimal(2 * i) / D) for i in range(D // 2)]
        scale: Callable[..., Decimal] = _SCALED.get(spec.rope_type, _keep)
        scaled = [scale(frequency, pair, spec, seq_len) for pair, frequency in enumerate(plain)]
        return np.array([float(frequency) for frequency in scaled]), float(_attention_scaling(spec))


def cos_sin(
    position_ids_BT: Any, inv_freq_C: Any, attention_scaling: float, rounding: Rounding
) -> tuple[jax.Array, jax.Array]:
    """Return tables cos, sin [B, T, C] in the carrier, rounded at `position`, `inv_freq`, `angle` and `table`.

    position_ids_BT: integers [B, T], below 2^24 in a float32 carrier, which holds no others exactly.
    inv_freq_C: float64 [C] from `inverse_frequencies`; the carrier takes it with one rounding.
    attention_scaling: from the same.
    """
    inv_freq_C = rounding.round("inv_freq", jnp.asarray(inv_freq_C, rounding.dtype))
    position_BT1 = rounding.round("position", jnp.asarray(position_ids_BT, rounding.dtype))[..., None]
    angle_BTC = rounding.round("angle", position_BT1 * inv_freq_C)
    cos_BTC = rounding.round("table", jnp.cos(angle_BTC) * attention_scaling)
    sin_BTC = rounding.round("table", jnp.sin(angle_BTC) * attention_scaling)
    return cos_BTC, sin_BTC


def rotate(x_ATHD: Any, cos_BTC: jax.Array, sin_BTC: jax.Array, rounding: Rounding, site: str) -> jax.Array:
    """Rotate the pairs (i, i + C), transformers' half-split convention: (a, b) -> (a cos - b sin, b cos + a sin).

    What a head has beyond 2 C is left as it is.

    x_ATHD: queries or keys [B, T, H, D], in the carrier as the tables are; or [1, T, H, D], rotated by every table.
    site: `q_rotated` or `k_rotated`, rounded after `rope_product` and `rope_sum`.
    """
    C = cos_BTC.shape[-1]
    a, b, rest = jnp.split(jnp.asarray(x_ATHD), (C, 2 * C), axis=-1)
    cos, sin = cos_BTC[:, :, None], sin_BTC[:, :, None]

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return rounding.round("rope_product", x * y)

    first = rounding.round("rope_sum", product(a, cos) - product(b, sin))
    second = rounding.round("rope_sum", product(b, cos) + product(a, sin))
    rest = jnp.broadcast_to(rest, (*first.shape[:3], rest.shape[3]))
    return rounding.round(site, jnp.concatenate([first, second, rest], axis=-1))


def _keep(frequency: Decimal, pair: int, spec: RopeSpec, seq_len: int | None) -> Decimal:
    return frequency


def _linear(frequency: Decimal, pair: int, spec: RopeSpec, seq_len: int | None) -> Decimal:
    return frequency / decimal(spec.factor)


def _yarn(frequency: Decimal, pair: int, spec: RopeSpec, seq_len: int | None) -> Decimal:
    def pair_that_rotates(times: float) -> Decimal:
        turns = decimal(spec.original_max_position_embeddings) / (decimal(times) * _TWO_PI)
        return spec.head_dim * turns.ln() / (2 * Decimal(spec.theta).ln())

    low, high = pair_that_rotates(spec.beta_fast), pair_that_rotates(spec.beta_slow)
    if spec.truncate:
        low, high = Decimal(math.floor(low)), Decimal(math.ceil(high))
    low, high = max(low, Decimal(0)), min(high, Decimal(spec.head_dim - 1))
    width = high - low or Decimal("0.001")
    ramp = min(max((pair - low) / width, Decimal(0)), Decimal(1))
    return frequency / decimal(spec.factor) * ramp + frequency * (1 - ramp)


def _llama3(frequency: Decimal, pair: int, spec: RopeSpec, seq_len: int | None) -> Decimal:
    low, high, factor = decimal(spec.low_freq_factor), decimal(spec.high_freq_factor), decimal(spec.factor)
    waves = decimal(spec.original_max_position_embeddings) * frequency / _TWO_PI  # that fit the original length
    if waves > high:
        return frequency
    if waves < low:
        return frequency / factor
    blend = (waves - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def _longrope(frequency: Decimal, pair: int, spec: RopeSpec, seq_len: int | None) -> Decimal:
    beyond = (seq_len or 0) > (spec.original_max_position_embeddings or 0)
    factors = spec.long_factor if beyond else spec.short_factor
    assert factors is not None
    return frequency / decimal(factors[pair])


def _proportional(frequency: Decimal, pair: int, spec: RopeSpec, seq_len: int | None) -> Decimal:
    rotated = int((spec.partial_rotary_factor or 1) * spec.head_dim // 2)
    return frequency / decimal(spec.factor or 1) if pair < rotated else Decimal(0)


_SCALED = {
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}


def _attention_scaling(spec: RopeSpec) -> Decimal:
    if spec.rope_type not in ("yarn", "longrope"):
        return Decimal(1)
    if spec.attention_factor is not None:
        return Decimal(spec.attention_factor)
    factor = decimal(spec.factor)
    if spec.rope_type == "longrope":
        return (1 + factor.ln() / decimal(spec.original_max_position_embeddings).ln()).sqrt()

    def temperature(weight: float) -> Decimal:
        return Decimal("0.1") * Decimal(weight) * factor.ln() + 1

    if spec.mscale and spec.mscale_all_dim:
        return temperature(spec.mscale) / temperature(spec.mscale_all_dim)
    return temperature(1)
