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

Read `inverse_frequencies` (`jaxref.frequencies`, a function for each type), `cos_sin` and `rotate`.

Formulas and names are those of transformers' `modeling_rope_utils.py`, for the types that it has, with one difference.
Its `dynamic` depends on earlier calls; here `dynamic` is a function of its arguments.

Legend: B batch · A batch, or 1 · T tokens of a row · H heads · D head_dim · C = D / 2 rotated pairs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxref.frequencies import inverse_frequencies as inverse_frequencies
from jaxref.rounding import Rounding


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
