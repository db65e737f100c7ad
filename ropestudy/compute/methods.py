"""Controls and remedies that change q, k or the tables in a way that a `Rounding` cannot express.

Legend: S runs of one row (each with its own positions) · T tokens of a row · H query heads · K key/value heads · D
head_dim · C = D / 2 rotated pairs.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxref.rope import cos_sin, rotate
from jaxref.rounding import Format, Rounding, find_format, round_to


@dataclass(frozen=True)
class Method:
    """How q and k are rotated, apart from the roundings. Hashable. The default is what the oracle does.

    angles: `float64` computes angles, cos and sin in float64 in any carrier; `inv_freq` and `angle` then round nothing.
    phases: seed of one constant random phase per rotary pair, added to every angle of q and k alike: it cancels in each
        dot product as a shift does. With float64 angles only.
    before: q and k are rounded to this format before they are rotated. `Rounding` decides what is rounded after.
    split: rotated q and k are kept as hi + lo, each of this format: the operands of a product in several terms. The
        four products hi hi + hi lo + lo hi + lo lo are one product of the sums here.
    per_head: q, k and v are rounded to this format, each key/value head (and the query heads that read it) with one
        scale that makes its largest entry the format's largest number, as FlashAttention-3 takes fp8. q and k before or
        after they are rotated.
    """

    angles: Literal["carrier", "float64"] = "carrier"
    phases: int | None = None
    before: Format = None
    split: Format = None
    per_head: Format = None
    per_head_when: Literal["before", "after"] = "after"

    def __post_init__(self) -> None:
        assert self.phases is None or self.angles == "float64", "phases are added to float64 angles"
        for name in (self.before, self.split, self.per_head):
            assert name is None or find_format(name), f"{name}: no such format"


AS_THE_ORACLE = Method()


class Tables(NamedTuple):
    """cos and sin [S, T, C] in the carrier, as rounded."""

    cos: jax.Array
    sin: jax.Array

    def take(self, runs: list[int]) -> "Tables":
        """Return the tables of some of the runs."""
        index = np.asarray(runs)
        return Tables(self.cos[index], self.sin[index])


def tables(positions_ST: Any, inv_freq_C: Any, attention_scaling: float, rounding: Rounding, method: Method) -> Tables:
    """Return the tables of every run.

    positions_ST: integers [S, T]; inv_freq_C: float64 [C]; attention_scaling: as `jaxref.rope.cos_sin` takes them.
    """
    if method.angles == "carrier":
        return Tables(*cos_sin(positions_ST, inv_freq_C, attention_scaling, rounding))
    # In numpy: float64 whatever the carrier is, and one cast to it, which a float32 carrier's own table has too.
    angle_STC = np.asarray(positions_ST, np.float64)[..., None] * np.asarray(inv_freq_C)
    angle_STC += phases_C(method, len(inv_freq_C))
    cos, sin = (jnp.asarray(f(angle_STC) * attention_scaling, rounding.dtype) for f in (np.cos, np.sin))
    return Tables(rounding.round("table", cos), rounding.round("table", sin))


def phases_C(method: Method, pairs: int) -> np.ndarray:
    """Return the constant phase of each rotary pair in radians, float64 [C]; zeros without."""
    if method.phases is None:
        return np.zeros(pairs)
    return np.random.default_rng((method.phases, 7)).uniform(0, 2 * np.pi, pairs)


def rotate_heads(x_STHD: jax.Array, tables: Tables, rounding: Rounding, method: Method, site: str) -> jax.Array:
    """`jaxref.rope.rotate`, changed as the method says; the same shape, in the carrier. site: as there."""
    if method.before is not None:
        x_STHD = round_to(x_STHD, method.before)
    if method.split is not None:
        return two_terms(rotate(x_STHD, tables.cos, tables.sin, rounding.without(site), site), method.split)
    return rotate(x_STHD, tables.cos, tables.sin, rounding, site)


def round_per_head(x_STHD: jax.Array, fmt: str, kv_heads: int) -> jax.Array:
    """Return x rounded to `fmt` with one scale for each key/value head of each run; 0 where all of a head is 0.

    What is returned is descaled in the carrier: a kernel multiplies its float32 logits by the scales instead.
    """
    form = find_format(fmt)
    assert form is not None
    S, T, H, D = x_STHD.shape
    x_STKGD = x_STHD.reshape(S, T, kv_heads, H // kv_heads, D)
    largest = jnp.abs(x_STKGD).max((1, 3, 4), keepdims=True)
    scale = jnp.where(largest > 0, largest, 1) / form.largest
    rounded: jax.Array = round_to(x_STKGD / scale, fmt)  # type: ignore[assignment]
    return (rounded * scale).reshape(x_STHD.shape)


def two_terms(x: jax.Array, fmt: str) -> jax.Array:
    """Return hi + lo, hi = x and lo = x - hi rounded to `fmt`: exact in the carrier (a bf16 split needs 17 bits)."""
    high: jax.Array = round_to(x, fmt)  # type: ignore[assignment]
    low: jax.Array = round_to(x - high, fmt)  # type: ignore[assignment]
    return high + low
