"""Whether two checkpoints hold the same weights, up to the dtype in which they are stored."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from anchorline.errors import UserError, some
from jaxref.model import to_arrays
from jaxref.storage.weights import cast, load_hf
from parity_tests.gate.case import TINY, find_folder

_COARSEST = ("float16", "bfloat16", "float32", "float64")


def check_same_weights(model: str, against: str, dtype: str) -> None:
    """Check that each tensor of the one is the other's, rounded to the coarser of the two dtypes, and fit to be judged.

    model, against: folders or ids.
    dtype: in which `model` is to run.
    Raises UserError: naming the tensors that differ; a dtype finer than what either stores, so that the same weights
        would differ by their storing; float16 beside bfloat16, neither of which holds the other; or a tiny model, whose
        weights are drawn, not stored.
    """
    for name in (model, against):
        if name in TINY:
            raise UserError(f"--against: {name!r} is a tiny random model; name two folders or ids")
    arrays_x, arrays_y = _arrays(model), _arrays(against)
    for one, other, where in ((arrays_x, arrays_y, against), (arrays_y, arrays_x, model)):
        if missing := sorted(set(one) - set(other)):
            raise UserError(f"--against {against}: {some(missing)} not in {where}; these are two models")
    stored = {str(x.dtype) for arrays in (arrays_x, arrays_y) for x in arrays.values()}
    if stored >= {"float16", "bfloat16"}:
        raise UserError(
            f"--against {against}: one stores float16 and the other bfloat16; neither holds the other's weights, so "
            "they cannot be compared; give the weights that both were rounded from"
        )
    coarsest = min(stored, key=_COARSEST.index)
    if _COARSEST.index(dtype) > _COARSEST.index(coarsest):
        raise UserError(f"--dtype {dtype}: finer than the {coarsest} in which weights are stored; choose {coarsest}")
    different = [name for name in arrays_x if not _same(arrays_x[name], arrays_y[name])]
    if different:
        raise UserError(
            f"--against {against}: {len(different)} of {len(arrays_x)} tensors hold other weights than {model}: "
            f"{some(different)}; only models of the same weights can be held against each other"
        )


def _arrays(model: str) -> dict[str, jnp.ndarray]:
    config, decoder = load_hf(Path(find_folder(model)))
    arrays = to_arrays(decoder)
    if config.tie_word_embeddings:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    return arrays


def _same(x: jnp.ndarray, y: jnp.ndarray) -> bool:
    coarser = min(str(x.dtype), str(y.dtype), key=_COARSEST.index)
    x, y = cast((x, y), coarser)  # type: ignore[arg-type]
    return x.shape == y.shape and np.array_equal(np.asarray(x), np.asarray(y))
