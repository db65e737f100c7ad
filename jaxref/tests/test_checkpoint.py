"""Orbax round trips, and what is refused."""

from dataclasses import replace

import jax
import ml_dtypes
import pytest

from anchorline.errors import UserError
from jaxref.model import to_arrays
from jaxref.optim import adamw, step
from jaxref.storage.checkpoint import restore, save
from jaxref.storage.weights import from_arrays
from jaxref.tests.decoders import tiny
from jaxref.tests.test_weights import assert_bitwise

OPTIMIZER = adamw(1e-2, lambda name: not name.endswith("norm.weight"), max_grad_norm=1.0)


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    decoder = tiny("llama", num_hidden_layers=1)
    params = to_arrays(decoder)
    params, state, _ = step(OPTIMIZER, params, OPTIMIZER.init(params), gradients=params)
    save(tmp_path / "step", from_arrays(decoder.config, params), state)
    params, state, _ = step(OPTIMIZER, params, state, gradients=params)

    resumed, resumed_state = restore(tmp_path / "step", decoder.config, OPTIMIZER)
    arrays = to_arrays(resumed)
    arrays, resumed_state, _ = step(OPTIMIZER, arrays, resumed_state, gradients=arrays)
    assert_bitwise(arrays, params)
    assert_bitwise(*(dict(enumerate(jax.tree.leaves(tree))) for tree in (resumed_state, state)))


def test_what_does_not_fit_is_refused(tmp_path):
    decoder = tiny("llama", ml_dtypes.bfloat16)
    save(tmp_path / "step", decoder)
    with pytest.raises(ValueError, match=r"folder: .* exists; give a new one"):
        save(tmp_path / "step", decoder)
    with pytest.raises(ValueError, match=r"rms_norm_eps: 1e-06 is not the checkpoint's 1e-05"):
        restore(tmp_path / "step", replace(decoder.config, rms_norm_eps=1e-6))
    with pytest.raises(ValueError, match=r"optimizer: .* holds no optimizer state"):
        restore(tmp_path / "step", decoder.config, OPTIMIZER)
    with pytest.raises(UserError, match=r"not a checkpoint of jaxref"):
        restore(tmp_path / "nothing", decoder.config)
