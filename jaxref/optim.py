"""One AdamW step on parameters by name, with torch's definition of every term.

optax against torch, checked in torch 2.13 and optax 0.2.8:
- AdamW (torch.optim.AdamW, arXiv 1711.05101): the same update. torch first scales the parameter by 1 - lr * decay and
  then subtracts lr * m^ / (sqrt(v^) + eps); optax subtracts lr * (m^ / (sqrt(v^) + eps) + decay * parameter). Equal in
  exact arithmetic, not in the last bit. Both add eps outside the root, after the bias correction, and both multiply the
  decay by lr.
- Clipping: torch (clip_grad_norm_) multiplies by min(1, limit / (norm + 1e-6)); optax.clip_by_global_norm divides by
  the norm alone and leaves gradients at or below the limit untouched, where torch still scales them just below it.
  So the clipping here is not optax's.
- Weight decay: torch decays what its parameter groups say (by default all). Here a function of the parameter's name
  decides.

Updates run eagerly: under jit, XLA would contract products and sums into FMAs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Arrays = dict[str, jax.Array]


def adamw(
    learning_rate: float | Callable[[Any], Any],
    decays: Callable[[str], bool],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_grad_norm: float | None = None,
) -> optax.GradientTransformation:
    """Make an AdamW with torch's defaults, after an optional clipping of the global norm.

    `learning_rate`: a number, or a function of the number of steps taken (0 at the first). `decays`: whether a
    parameter of this name decays.
    Raises ValueError for a value outside its range.
    """
    for field, value, valid in (
        ("learning_rate", learning_rate, callable(learning_rate) or learning_rate >= 0),
        ("b1", b1, 0 <= b1 < 1),
        ("b2", b2, 0 <= b2 < 1),
        ("eps", eps, eps >= 0),
        ("weight_decay", weight_decay, weight_decay >= 0),
        ("max_grad_norm", max_grad_norm, max_grad_norm is None or max_grad_norm > 0),
    ):
        if not valid:
            raise ValueError(f"{field}: {value} is out of range")

    def mask(params: Mapping[str, Any]) -> dict[str, bool]:
        return {name: decays(name) for name in params}

    clip = optax.identity() if max_grad_norm is None else clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask))


def learning_rates(
    peak: float,
    steps: int,
    schedule: str = "constant",
    warmup: int = 0,
    floor_share: float = 0.0,
    decay_steps: int = 1,
    decay: str = "linear",
) -> np.ndarray:
    """Return the learning rate of each step, float64 [steps], from optax's schedules.

    `warmup`: that many steps rise in equal parts, the last of them to the peak. `schedule`: `constant`, or `linear` or
    `cosine` from the peak, at the first step after the warmup, towards `floor_share` of it, which a step after the last
    would have. `wsd` keeps the peak and falls so in the last `decay_steps`: `linear`, or `sqrt`, which is 1 - sqrt(x).
    Raises ValueError for another schedule or decay.
    """
    falling = max(steps - warmup, 1)
    falls = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, floor_share * peak, falling),
        "cosine": lambda: optax.cosine_decay_schedule(peak, falling, floor_share),
        "wsd": lambda: optax.join_schedules([optax.constant_schedule(peak), decays[decay]], [falling - decay_steps]),
    }
    decays = {
        "linear": optax.linear_schedule(peak, floor_share * peak, decay_steps),
        "sqrt": lambda done: peak * (1 - (1 - floor_share) * jnp.sqrt(done / decay_steps)),
    }
    if decay not in decays:
        raise ValueError(f"decay: {decay!r} is unknown; choose from {', '.join(decays)}")
    if schedule not in falls:
        raise ValueError(f"schedule: {schedule!r} is unknown; choose from {', '.join(falls)}")
    rises = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    rate = optax.join_schedules([rises, falls[schedule]()], [warmup])
    return np.array([np.asarray(rate(jnp.float64(number)), np.float64) for number in range(steps)])


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Multiply every gradient by min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does."""

    def clip(gradients: Any, _params: Any) -> Any:
        factor = jnp.minimum(limit / (optax.tree.norm(gradients) + 1e-6), 1.0)
        return jax.tree.map(lambda gradient: gradient * factor.astype(gradient.dtype), gradients)

    return optax.stateless(clip)


def step(
    optimizer: optax.GradientTransformation, params: Arrays, state: optax.OptState, gradients: Arrays
) -> tuple[Arrays, optax.OptState, jax.Array]:
    """Return (new parameters, new state, global norm of the gradients before clipping). `state` starts as
    `optimizer.init(params)`.

    Raises ValueError for 16-bit parameters: a step would vanish in their rounding; train a float32 or float64 copy.
    """
    for name, array in params.items():
        if array.dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"{name}: dtype {array.dtype} is too coarse; cast to float32 first (jaxref.storage.weights.cast)"
            )
    updates, state = optimizer.update(gradients, state, params)
    return jax.tree.map(jnp.add, params, updates), state, optax.tree.norm(gradients)
