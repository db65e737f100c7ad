"""Asking the oracle: our settings in its words, our models and arrays in its types. The gate, `parity check`, the
comparison of layers and the tests of training all ask it here.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from optax import GradientTransformation
from torch import Tensor

from anchorline.tolerance import UNIT_ROUNDOFF
from jaxref.attention import attention
from jaxref.model import Decoder
from jaxref.optim import adamw, learning_rates, step
from jaxref.rope import inverse_frequencies
from jaxref.rounding import Rounding
from parity_tests.report.names import sort_key
from torchtrain.config import TrainConfig

Arrays = dict[str, np.ndarray]

_HALF = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}
_EAGER = ("dense", "eager")  # they round like transformers' eager attention, all others like FlashAttention-2


def preset_name(engine: str, dtype: torch.dtype | str, rotation: str = "model") -> str:
    """The rounding preset of an engine, of an attention of transformers, or of what rounds like `flash` or `eager`.

    float64 has no roundings of its own to allow and is judged by what float32 errs. `rotation` is `model.rotation`.
    """
    eager = engine in _EAGER
    kinds = {"float64": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    kind = kinds[str(dtype).removeprefix("torch.")]
    if eager:
        return kind if kind == "fp32" else f"hf_eager_{kind}"
    return f"paper_{kind}" if rotation == "float32" else f"flash_{kind}"


def rates_of(train: TrainConfig) -> np.ndarray:
    """The oracle's learning rate at each step, float64 [steps]."""
    return learning_rates(
        train.learning_rate,
        train.steps,
        train.schedule,
        train.warmup_steps,
        train.min_learning_rate_share,
        train.decay_steps or 1,
        train.decay,
    )


def adamw_of(train: TrainConfig, weights: Mapping[str, Any], left_out: int = 0) -> GradientTransformation:
    """The oracle's AdamW under a run's settings, its schedule included; weights of two or more dimensions decay.

    left_out: the step, from 1, that is no update: its rate passes unused. 0: none.
    """
    rates = jnp.asarray(np.delete(rates_of(train), [left_out - 1] if left_out else []))
    return adamw(
        lambda step: rates[step],
        lambda name: weights[name].ndim >= 2,
        *train.betas,
        train.epsilon,
        train.weight_decay,
        max_grad_norm=train.clip_norm,
    )


def first_step(train: TrainConfig, before: Mapping[str, Any], gradients: Mapping[str, Any], dtype: Any) -> Arrays:
    """The weights after the oracle's first AdamW step from `before`, all of it in `dtype`."""
    optimizer = adamw_of(train, before)
    weights, gradients = ({name: jnp.asarray(side[name], dtype) for name in before} for side in (before, gradients))
    after, _, _ = step(optimizer, weights, optimizer.init(weights), gradients)
    return {name: np.asarray(x) for name, x in after.items()}


def to_numpy(x: Tensor) -> np.ndarray:
    """Torch tensor to numpy, bit for bit; bfloat16 becomes ml_dtypes' bfloat16."""
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(_HALF[x.dtype]) if x.dtype in _HALF else x.numpy()


def widen(x: Tensor) -> np.ndarray:
    """Return a copy in numpy, exact, of float32 at least: numpy has no bfloat16."""
    return x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32), copy=True).numpy()


def oracle_taps(
    decoder: Decoder, batch: Mapping[str, Any], rounding: Rounding, query_block: int | None = None
) -> Arrays:
    """Run the oracle on a batch of the five arrays, torch or numpy; return its taps in the order of the pass."""
    given = (batch[name] for name in ("input_ids", "position_ids", "document_ids"))
    ids, positions, documents = (to_numpy(x) if isinstance(x, Tensor) else x for x in given)
    _, taps = decoder(ids, positions, documents, rounding, query_block=query_block, taps=True)
    # The table comes last: of wrong positions, q and k after RoPE say more.
    return {
        name: np.asarray(taps[name]) for name in sorted(taps, key=lambda name: (name == "rope_table", sort_key(name)))
    }


def likely_errors_of_rotation(
    decoder: Decoder, taps: Mapping[str, np.ndarray], position_ids_BT: Any
) -> dict[str, float]:
    """Return the likely error of RoPE's table, and of q and k after RoPE, by `oracle_taps`' names; `taps`: the truth.

    A frequency takes one to four float32 operations (power, reciprocal, the type's own), and the angle one more. All
    tokens share a frequency's error, so an array has only a few independent errors, one for each pair that turns fast.
    The reference's may by luck be a seventh of another's. One operation errs 0.4 of a unit roundoff (root mean square),
    so five err about one unit roundoff of the angle.
    """
    positions = np.asarray(position_ids_BT)
    frequencies_C, scaling = inverse_frequencies(decoder.config.rope, int(positions.max()) + 1)
    angle_BTC = positions[..., None] * frequencies_C
    turned_BTC = UNIT_ROUNDOFF["float32"] * angle_BTC
    moved_BT1R = np.concatenate([turned_BTC, turned_BTC], axis=-1)[:, :, None]

    def error(tap_BTHD: np.ndarray) -> float:
        return float(np.sqrt(np.square(moved_BT1R * tap_BTHD[..., : moved_BT1R.shape[3]]).sum() / tap_BTHD.size))

    table = error_of_table(angle_BTC, scaling, taps["rope_table"].size)
    return {"rope_table": table} | {name: error(taps[name]) for name in taps if name.endswith("_rope")}


def error_of_table(angle_BTC: np.ndarray, scaling: float, size: int) -> float:
    """Return the likely error of RoPE's table of cos and sin, of so many numbers."""
    return float(np.sqrt(np.square(UNIT_ROUNDOFF["float32"] * scaling * angle_BTC).sum() / size))


def attention_arrays(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    weight_BTHD: jax.Array,
    document_ids_BT: Any,
    rounding: Rounding,
    scale: float | None = None,
    query_block: int | None = None,
    sinks_H: Any = None,
    **layer: Any,
) -> dict[str, jax.Array]:
    """`out`, `lse`, and `dq`, `dk`, `dv` of sum(out * weight), from arrays of the rounding's carrier. Can be traced.

    With sinks also `dsinks`. `layer`: `softcap`, `window` and `keep_anchor` of the layer.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks_H: Any) -> tuple[jax.Array, jax.Array]:
        return attention(q, k, v, document_ids_BT, rounding, scale, query_block, sinks_H, **layer)

    (out, lse), pull = jax.vjp(run, q_BTHD, k_BTKD, v_BTKD, sinks_H)
    gradients = dict(zip(("dq", "dk", "dv", "dsinks"), pull((weight_BTHD, jnp.zeros_like(lse))), strict=True))
    return {"out": out, "lse": lse} | {name: x for name, x in gradients.items() if x is not None}
