"""Exports of every RoPE type, and readers of other versions in environments of their own to read them."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import extend
from torchtrain.modeling.save import save_folder
from torchtrain.tests.tiny import POSITIONS, tiny_config, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-readers"
LENGTH = 4 * POSITIONS
THETA = 2e4  # no reader's default
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(LENGTH)]  # the first quarter is within the original length

_LISTS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
_LLAMA3 = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "theta raised": {"theta": 5e5},
    "ntk": {"type": "ntk"},
    "linear": {"type": "linear"},
    "dynamic": {"type": "dynamic", "theta": 5e5, "factor": 2.0},
    "yarn": {"type": "yarn"},
    "yarn, factor 8": {"type": "yarn", "factor": 8.0},
    "yarn, all given": {"type": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25},
    "llama3": _LLAMA3,
    "longrope": {"type": "longrope", **_LISTS},
    "longrope, factor 8": {"type": "longrope", **_LISTS, "factor": 8.0},
}


def export_case(folder: Path, settings: dict[str, Any], family: str = "llama", **changes: Any) -> None:
    """Extend a tiny random model to four times its length and save it; weights are large enough to tell positions
    apart.
    """
    own = {"rope_type": "default", "rope_theta": THETA}
    config = extend(tiny_config(family, rope_parameters=own, **changes), RopeConfig(**settings), LENGTH)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 8
    model.generation_config.max_length = POSITIONS
    save_folder(model, tiny_tokenizer(), folder)


def environment(version: str) -> Path | None:
    """Return the Python with a transformers version that `make readers` made, if it has."""
    folder = ENVIRONMENTS / f"transformers-{version}"
    return folder / "bin" / "python" if (folder / ".installed").is_file() else None


def read_with(python: str | Path, folders: Iterable[Path]) -> dict[str, Any]:
    """Return what that Python reads of each folder: see `read_folder.py`."""
    program = Path(__file__).with_name("read_folder.py")
    command = [str(python), str(program), json.dumps(TOKENS), *map(str, folders)]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
