"""Orbax checkpoints: save and restore parameters and any optimizer state, bit for bit.

A checkpoint is a folder of Orbax items: `params` (by Hugging Face name), `optimizer` (optional) and `about` (JSON: the
decoder's config and every parameter's dtype). `files.json` records the size and digest of every file. A checkpoint
appears complete or not at all. `convert` makes one of a Hugging Face folder, and back.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import FileEntry, differs, entries_of, read_json, resolve, write_file
from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder, to_arrays
from jaxref.storage.weights import check_new, from_arrays, load_hf, parameter_shapes, save_hf, write_folder

FILES = "files.json"


class _About(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    config: DecoderConfig
    dtypes: dict[str, str]


class _Files(RootModel[dict[str, FileEntry]]):
    """Every file of a checkpoint, by its path."""


def save(folder: str | Path, decoder: Decoder, optimizer_state: optax.OptState | None = None) -> None:
    """Write a checkpoint. Raises UserError: `folder` exists (none is overwritten), or its parent does not."""
    params = to_arrays(decoder)
    about = _About(config=decoder.config, dtypes={name: str(array.dtype) for name, array in params.items()})
    items: dict[str, Any] = {
        "about": ocp.args.JsonSave(json.loads(about.model_dump_json())),
        "params": ocp.args.StandardSave(params),
    }
    if optimizer_state is not None:
        items["optimizer"] = ocp.args.StandardSave(optimizer_state)
    with write_folder(Path(folder).absolute()) as made:
        with _checkpointer() as checkpointer:
            checkpointer.save(made, ocp.args.Composite(**items))
        write_file(made / FILES, (_Files(entries_of(made)).model_dump_json(indent=1) + "\n").encode())


def restore(
    folder: str | Path, config: DecoderConfig | None = None, optimizer: optax.GradientTransformation | None = None
) -> tuple[Decoder, optax.OptState | None]:
    """Read a checkpoint.

    config: what its decoder must be; None takes what it says.
    optimizer: the transformation whose state was saved (its numbers may differ, its structure not).
    Returns (decoder, the state of `optimizer` or None).
    Raises UserError: no checkpoint, or a damaged one; a config other than the saved one; an optimizer's state that was
        not saved.
    """
    folder = Path(folder).absolute()
    if not is_checkpoint(folder):
        raise UserError(f"{quoted(folder)}: not a checkpoint of jaxref")
    if optimizer is not None and not holds_optimizer(folder):
        raise UserError(f"optimizer: {quoted(folder)} holds no optimizer state; it was saved without one")
    _check_files(folder)
    with _checkpointer() as checkpointer, _report_damage(folder):
        found = checkpointer.restore(folder, ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        about = _About.model_validate_json(json.dumps(found))
        if config is not None:
            _check_config(config, about.config)
        shapes = parameter_shapes(about.config)
        params = {name: jax.ShapeDtypeStruct(shape, about.dtypes[name]) for name, shape in shapes.items()}
        items: dict[str, Any] = {"params": ocp.args.StandardRestore(params)}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardRestore(jax.eval_shape(optimizer.init, params))
        restored = checkpointer.restore(folder, ocp.args.Composite(**items))
    return from_arrays(about.config, restored["params"]), restored.get("optimizer")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint: it holds the items that every one has."""
    return (folder / "about").is_dir() and (folder / "params").is_dir()


def holds_optimizer(folder: Path) -> bool:
    """Return whether a checkpoint holds an optimizer's state."""
    return (folder / "optimizer").is_dir()


def convert(source: Path, target: Path) -> str:
    """Convert a folder of either kind into one of the other.

    target: a folder that does not exist; it appears complete or not at all.
    Returns what was done, in words.
    Raises UserError: before anything is written: the source is neither kind, both or damaged, the target cannot be
        made.
    """
    source, target = resolve("source", source), resolve("target", target)
    check_new("target", target)
    if not source.is_dir():
        raise UserError(f"source: {quoted(source)} is not a folder; give one of Hugging Face or a checkpoint of jaxref")
    from_hf, from_orbax = (source / "config.json").exists(), is_checkpoint(source)
    if from_hf and from_orbax:
        raise UserError(
            f"source: {quoted(source)} holds a config.json and a checkpoint too; give a folder that is one of them"
        )
    if from_hf:
        _, decoder = load_hf(source)
        save(target, decoder)
        return f"{quoted(target)}: an Orbax checkpoint of the parameters and what they are computed with; nothing else"
    if from_orbax:
        decoder, _ = restore(source)
        save_hf(target, decoder)
        left = "; the optimizer's state stays behind" if holds_optimizer(source) else ""
        return f"{quoted(target)}: config.json and model.safetensors; add a tokenizer to the folder{left}"
    raise UserError(
        f"source: {quoted(source)} is neither a Hugging Face folder (it has no config.json) nor a checkpoint of jaxref "
        "(it has no about and params)"
    )


def _checkpointer() -> ocp.Checkpointer:
    handlers = {
        "about": ocp.JsonCheckpointHandler(),
        "params": ocp.StandardCheckpointHandler(),
        "optimizer": ocp.StandardCheckpointHandler(),
    }
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers))


def _check_files(folder: Path) -> None:
    try:
        files = _Files.model_validate(read_json(folder / FILES)).root
    except ValidationError as error:
        raise UserError(f"{quoted(folder / FILES)}: {quoted_reason(error)}") from None
    for name, entry in files.items():
        if (how := differs(folder / name, entry)) is not None:
            raise UserError(f"{quoted(folder / name)} {how}; the checkpoint is damaged, take another")


@contextmanager
def _report_damage(folder: Path) -> Iterator[None]:
    """Make one line of whatever Orbax, TensorStore or JSON say of a folder that has the right digests."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{quoted(folder)}: damaged, or not a checkpoint of jaxref ({quoted_reason(error)})") from None


def _check_config(given: DecoderConfig, saved: DecoderConfig) -> None:
    wanted, found = asdict(given), asdict(saved)
    for field in sorted(wanted):
        if wanted[field] != found[field]:
            raise UserError(f"{field}: {wanted[field]!r} is not the checkpoint's {found[field]!r}")
