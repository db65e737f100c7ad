"""Convert parameters, by Hugging Face name, between a folder of safetensors, a dict of arrays and a decoder.

Only `cast` changes the bits of a parameter.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from anchorline.errors import UserError, quoted, quoted_reason, some
from anchorline.files import build_folder, read_json, write_file
from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder, name_leaves, to_arrays

DTYPES = ("float64", "float32", "bfloat16", "float16")
SAFETENSORS_DTYPES = ("F64", "F32", "BF16", "F16")


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter; a tied `lm_head.weight` has none. Matrices are [outputs, inputs]."""
    return {name: leaf.shape for name, leaf in name_leaves(_abstract(config)[1])}


def from_arrays(config: DecoderConfig, arrays: Mapping[str, Any]) -> Decoder:
    """Make a decoder that holds these arrays (numpy or JAX; float64, float32, bfloat16 or float16), each in its own
    dtype.

    Raises UserError, one line, for missing or unexpected names, wrong shapes and dtypes, and an `lm_head.weight` that
    differs from the embedding it is tied to.
    """
    arrays = dict(arrays)
    _check(config, {name: np.shape(array) for name, array in arrays.items()})
    for name, array in arrays.items():
        if str(array.dtype) not in DTYPES:
            raise UserError(f"{name}: dtype {array.dtype} is not one of {', '.join(DTYPES)}")
    if config.tie_word_embeddings and "lm_head.weight" in arrays:
        head, table = np.asarray(arrays.pop("lm_head.weight")), np.asarray(arrays["model.embed_tokens.weight"])
        if head.dtype != table.dtype or head.tobytes() != table.tobytes():
            raise UserError("tie_word_embeddings: true, but lm_head.weight differs from model.embed_tokens.weight")
    graph, state = _abstract(config)
    leaves = [jnp.asarray(arrays[name]) for name, _ in name_leaves(state)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def cast(decoder: Decoder, dtype: str) -> Decoder:
    """Return the same decoder with every parameter rounded once, to nearest even, to `dtype` (see DTYPES)."""
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r}; known are {', '.join(DTYPES)}")

    def round_once(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.float64 and dtype == "bfloat16":
            # This cast goes through float32 and would round twice; after this line it has nothing left to round.
            array = jax.lax.reduce_precision(array, exponent_bits=11, mantissa_bits=7)
        return array.astype(dtype)

    return jax.tree.map(round_once, decoder)


def load_hf(folder: str | Path) -> tuple[DecoderConfig, Decoder]:
    """Read `config.json` and `model.safetensors`, or the shards of `model.safetensors.index.json`, tensor by tensor.

    Names, shapes and dtypes are checked before any tensor is read. Raises UserError: a config that is not implemented;
    weights that are missing, damaged or do not fit it.
    """
    folder = Path(folder)
    config = DecoderConfig.from_hf(read_json(folder / "config.json", "config"))
    files = {name: _open(path) for name, path in _locations(folder).items()}
    # Old Llama checkpoints also store this constant, which follows from the config.
    files = {name: file for name, file in files.items() if not name.endswith("rotary_emb.inv_freq")}
    try:
        slices = {name: file.get_slice(name) for name, file in files.items()}
    except SafetensorError as error:
        raise UserError(f"weights: {quoted(folder)} names what is not in its files ({quoted_reason(error)})") from None
    _check(config, {name: tuple(part.get_shape()) for name, part in slices.items()})
    for name, part in slices.items():
        if part.get_dtype() not in SAFETENSORS_DTYPES:
            raise UserError(f"{name}: dtype {part.get_dtype()} is not one of {', '.join(SAFETENSORS_DTYPES)}")
    return config, from_arrays(config, {name: jnp.asarray(file.get_tensor(name)) for name, file in files.items()})


def save_hf(folder: str | Path, decoder: Decoder) -> None:
    """Write `config.json` and `model.safetensors`, readable by transformers; the folder appears complete or not at all.
    Raises UserError: `folder` exists, or would stand in one that does not.
    """
    arrays = {name: np.asarray(array) for name, array in to_arrays(decoder).items()}
    with write_folder(Path(folder).absolute()) as made:
        made.mkdir()
        save_file(arrays, made / "model.safetensors", metadata={"format": "pt"})
        write_file(made / "config.json", (json.dumps(decoder.config.to_hf(), indent=2) + "\n").encode())


def check_new(field: str, folder: Path) -> None:
    """Refuse a folder that cannot be made. field: what the message names. Raises UserError: something has the name, or
    it would stand in a folder that does not exist.
    """
    if os.path.lexists(folder):
        raise UserError(f"{field}: {quoted(folder)} exists; give a new one")
    if not folder.parent.is_dir():
        raise UserError(f"{field}: {quoted(folder.parent)} is not a folder; make it first")


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary path, at which the block makes the folder. At the end it is renamed to `folder`. A block that
    fails leaves nothing behind. Raises UserError: see `check_new`. Raises OSError: what the system says, such as a full
    disk.
    """
    check_new("folder", folder)
    with build_folder(folder) as made:
        yield made


@lru_cache(maxsize=64)
def _abstract(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Make a decoder of shapes, which costs no memory, and split it."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, None)))


def _check(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    wanted = parameter_shapes(config)
    if config.tie_word_embeddings and "lm_head.weight" in shapes:
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    for problem, names in (
        ("missing", [name for name in wanted if name not in shapes]),
        ("unexpected", [name for name in shapes if name not in wanted]),
    ):
        if names:
            raise UserError(f"weights: {problem} {some(sorted(names), 5)}")
    for name, shape in wanted.items():
        if tuple(shapes[name]) != shape:
            raise UserError(f"{name}: shape {tuple(shapes[name])} is not the {shape} of the config")


def _locations(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.is_file():
            raise UserError(f"weights: {quoted(single)} does not exist; neither does {index.name}")
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    named = read_json(index, "weights").get("weight_map")
    if not isinstance(named, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in named.values()
    ):
        raise UserError(f"weights: {quoted(index)} has no weight_map from tensors to files")
    locations = {name: folder / file for name, file in named.items()}
    for path in sorted(set(locations.values())):
        if not path.is_file():
            raise UserError(f"weights: {quoted(path)} does not exist, but {index.name} names it")
    return locations


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{quoted(path)}: not safetensors, or damaged ({quoted_reason(error)})") from None
