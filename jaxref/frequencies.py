"""Inverse frequencies of every type of RoPE, without JAX: `jaxref.rope` has the table of types and computes with them.

Frequencies are computed in 50 decimal digits and rounded once, so they are the float64 numbers nearest to the formulas.
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np

from jaxref.rope_spec import DIGITS, RopeSpec, decimal, ntk_base

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


_SCALED = {"linear": _linear, "yarn": _yarn, "llama3": _llama3, "longrope": _longrope, "proportional": _proportional}


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
