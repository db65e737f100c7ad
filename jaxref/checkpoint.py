"""Orbax checkpoints: parameters, and an optimizer's state where there is one, back bit for bit.

A checkpoint is a folder of Orbax items: `params` (by Hugging Face name), `optimizer` (optional) and `about` (JSON: the decoder's
config and every parameter's dtype). Orbax writes beside and renames, so a folder of that name is a whole checkpoint.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from anchorline.errors import UserError
from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder
from jaxref.weights import from_arrays, parameter_shapes, to_arrays


def save(folder: str | Path, decoder: Decoder, optimizer_state: optax.OptState | None = None) -> None:
    """Write a checkpoint. Raises UserError if `folder` exists: a checkpoint is never overwritten."""
    folder = Path(folder).absolute()
    if folder.exists():
        raise UserError(f"folder: {folder} exists; give a new one")
    params = to_arrays(decoder)
    dtypes = {name: str(array.dtype) for name, array in params.items()}
    items = {
        "about": ocp.args.JsonSave({"config": _plain(decoder.config), "dtypes": dtypes}),
        "params": ocp.args.StandardSave(params),
    }
    if optimizer_state is not None:
        items["optimizer"] = ocp.args.StandardSave(optimizer_state)
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, ocp.args.Composite(**items))


def restore(
    folder: str | Path, config: DecoderConfig, optimizer: optax.GradientTransformation | None = None
) -> tuple[Decoder, optax.OptState | None]:
    """(decoder, the state of `optimizer` or None) of a checkpoint.

    `optimizer`: the transformation whose state was saved (its numbers may differ, its structure not).
    Raises FileNotFoundError for a folder that is no checkpoint; ValueError for a config other than the saved one and
    for an optimizer's state that was not saved.
    """
    folder = Path(folder).absolute()
    if not (folder / "about").is_dir():
        raise FileNotFoundError(f"{folder}: not a checkpoint of jaxref")
    if optimizer is not None and not (folder / "optimizer").is_dir():
        raise UserError(f"optimizer: {folder} holds no optimizer state; it was saved without one")
    with _checkpointer() as checkpointer:
        about = checkpointer.restore(folder, ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        _refuse_other_config(_plain(config), about["config"])
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(about["dtypes"][name]))
            for name, shape in parameter_shapes(config).items()
        }
        items = {"params": ocp.args.StandardRestore(params)}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardRestore(jax.eval_shape(optimizer.init, params))
        restored = checkpointer.restore(folder, ocp.args.Composite(**items))
    return from_arrays(config, restored["params"]), restored.get("optimizer")


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def _plain(config: DecoderConfig) -> dict[str, Any]:
    """The config as JSON gives it back."""
    return json.loads(json.dumps(asdict(config)))


def _refuse_other_config(given: dict[str, Any], saved: dict[str, Any]) -> None:
    for field in sorted(given.keys() | saved.keys()):
        if given.get(field) != saved.get(field):
            raise UserError(f"{field}: {given.get(field)!r} is not the checkpoint's {saved.get(field)!r}")
