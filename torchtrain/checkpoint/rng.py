"""The states of all random generators of a process, as tensors."""

import random
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from anchorline.files import FileEntry, write_file
from torchtrain.checkpoint.manifest import DamageError


def rng_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rng-{rank:05d}.safetensors"


def capture() -> dict[str, Tensor]:
    """Return the states of Python's, numpy's, torch's and, where there is CUDA, the current GPU's generator."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_place": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Tensor]) -> None:
    """Set the generators to what `capture` returned."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_place"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def write(folder: Path, rank: int, states: dict[str, Tensor]) -> dict[str, FileEntry]:
    """Write what `capture` returned; return the file's name with what it is."""
    return {rng_file(rank): write_file(folder / rng_file(rank), safetensors.torch.save(states))}


def read(path: Path) -> None:
    """Set the generators from a file. Raises DamageError: it is not such a file."""
    try:
        restore(safetensors.torch.load(path.read_bytes()))
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise DamageError(f"{path}: is not a file of generator states ({error})") from None
