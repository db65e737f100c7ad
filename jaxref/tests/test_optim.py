"""AdamW and clipping against their formulas in exact rational or 50-digit arithmetic."""

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from jaxref.optim import adamw, learning_rates, step

SETTINGS = {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.1}


def by_hand(parameter, gradients, lr, b1, b2, eps, weight_decay):
    """torch.optim.AdamW's own order, in 50 digits: decay first, then the step."""
    with mpmath.workdps(50):
        p, m, v = mpmath.mpf(parameter), mpmath.mpf(0), mpmath.mpf(0)
        for t, g in enumerate(map(mpmath.mpf, gradients), start=1):
            p *= 1 - mpmath.mpf(lr) * mpmath.mpf(weight_decay)
            m = b1 * m + (1 - mpmath.mpf(b1)) * g
            v = b2 * v + (1 - mpmath.mpf(b2)) * g * g
            p -= lr * (m / (1 - mpmath.mpf(b1) ** t)) / (mpmath.sqrt(v / (1 - mpmath.mpf(b2) ** t)) + eps)
        return float(p)


def test_three_steps_are_the_closed_form():
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=4), rng.normal(size=(3, 4))
    optimizer = adamw(0.01, decays=lambda name: name == "matrix", **SETTINGS)
    params = {"matrix": jnp.asarray(start), "bias": jnp.asarray(start)}
    state = optimizer.init(params)
    for gradient in gradients:
        params, state, norm = step(optimizer, params, state, dict.fromkeys(params, jnp.asarray(gradient)))
        assert float(norm) == pytest.approx(float(np.sqrt(2 * (gradient**2).sum())), rel=16 * 2.0**-53)
    for name, decay in (("matrix", 0.1), ("bias", 0.0)):
        expected = [by_hand(start[i], gradients[:, i], 0.01, **SETTINGS | {"weight_decay": decay}) for i in range(4)]
        # About 20 roundings a step of numbers below |p| + lr; a wrong formula is off by lr * decay or more.
        bound = 3 * 20 * 2.0**-53 * (np.abs(expected) + 0.01)
        assert (np.abs(np.asarray(params[name]) - expected) <= bound).all()
    assert (params["matrix"] != params["bias"]).all()


@pytest.mark.parametrize("limit", [1.0, 5.0, 100.0])
def test_clipping_is_torchs(limit):
    """Gradients (3, 4) have the norm 5. torch: coefficient min(1, limit / (5 + 1e-6)), which scales at 5.0 too."""
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    optimizer = adamw(1.0, lambda name: True, max_grad_norm=limit)
    _, state, norm = step(optimizer, params, optimizer.init(params), gradients)
    assert float(norm) == 5.0
    seen = {name: float(mu[0]) / (1 - 0.9) for name, mu in state[1][0].mu.items()}
    coefficient = min(1.0, limit / (5.0 + 1e-6))
    assert seen["a"] == pytest.approx(3 * coefficient, rel=8 * 2.0**-53)
    assert seen["b"] == pytest.approx(4 * coefficient, rel=8 * 2.0**-53)


def test_a_schedule_starts_at_step_zero():
    params = {"w": jnp.array([1.0])}
    optimizer = adamw(lambda count: jnp.where(count == 0, 0.0, 1.0), lambda name: True)
    state = optimizer.init(params)
    once, state, _ = step(optimizer, params, state, {"w": jnp.array([1.0])})
    twice, _, _ = step(optimizer, once, state, {"w": jnp.array([1.0])})
    assert once["w"] == params["w"]
    assert twice["w"] != once["w"]


def test_bad_values_are_one_clear_line():
    for field, value in (("b1", 1.0), ("eps", -1.0), ("weight_decay", -0.1), ("max_grad_norm", 0.0)):
        with pytest.raises(ValueError, match=f"{field}: {value} is out of range"):
            adamw(0.1, lambda name: True, **{field: value})
    coarse = {"w": jnp.ones(1, jnp.bfloat16)}
    optimizer = adamw(0.1, lambda name: True)
    with pytest.raises(ValueError, match=r"w: dtype bfloat16 is too coarse"):
        step(optimizer, coarse, optimizer.init(coarse), coarse)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"steps": 3}, [8, 8, 8]),
        ({"steps": 6, "warmup": 4}, [2, 4, 6, 8, 8, 8]),
        ({"steps": 3, "warmup": 1}, [8, 8, 8]),
        ({"steps": 6, "warmup": 2, "schedule": "linear"}, [4, 8, 8, 6, 4, 2]),
        ({"steps": 4, "schedule": "linear", "floor_share": 0.5}, [8, 7, 6, 5]),
        ({"steps": 3, "schedule": "cosine", "floor_share": 0.25}, [8, 6.5, 3.5]),
        ({"steps": 2, "warmup": 2, "schedule": "cosine"}, [4, 8]),
        ({"steps": 6, "warmup": 2, "schedule": "wsd", "decay_steps": 2}, [4, 8, 8, 8, 8, 4]),
        (
            {"steps": 5, "schedule": "wsd", "decay_steps": 4, "decay": "sqrt", "floor_share": 0.5},
            [8, 8, 6, 8 - 4 * 0.5**0.5, 8 - 4 * 0.75**0.5],
        ),
    ],
)
def test_learning_rates_by_hand(settings, expected):
    """Of numbers of this size, half a dozen roundings."""
    rates = learning_rates(8.0, **settings)
    assert rates.dtype == np.float64
    np.testing.assert_allclose(rates, expected, rtol=6 * np.finfo(np.float64).eps)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule: 'cosin' is unknown; choose from constant, linear, cosine, wsd"):
        learning_rates(1.0, 2, "cosin")
    with pytest.raises(ValueError, match="decay: 'cosine' is unknown; choose from linear, sqrt"):
        learning_rates(1.0, 2, "wsd", decay="cosine")
