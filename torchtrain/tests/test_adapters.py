"""`model.lora`: adapters are trained and nothing else, and what comes of it is what PEFT and transformers read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from anchorline.errors import UserError
from torchtrain.checkpoint.fragments import KINDS
from torchtrain.config import LoraSettings, load_config
from torchtrain.modeling.adapters import add_adapters
from torchtrain.run import recipe
from torchtrain.tests.runs import assert_same
from torchtrain.tests.tiny import tiny_model
from torchtrain.training.events import read_metrics

QUIET = Console(quiet=True)
LORA = {"rank": 4, "alpha": 8, "target_modules": "all-linear", "also_train": ["norm", "embed_tokens"]}


@pytest.fixture(scope="module")
def ways(place, tmp_path_factory):
    """Return a function from a name and overrides to a run's folder; each is trained once."""
    folder, made = tmp_path_factory.mktemp("lora"), dict[str, Path]()

    def train(name: str, *overrides: str) -> Path:
        if name not in made:
            given = [f"model.lora={json.dumps(LORA)}", "train.steps=6", *overrides, f"run.folder={folder / name}"]
            recipe.train(load_config(place.config, given), console=QUIET)
            made[name] = folder / name
        return made[name]

    return train


def test_runs(ways):
    run = ways("straight")
    events = [e for e in read_metrics(run / "metrics.jsonl") if e["event"] == "evaluation"]
    assert events[-1]["loss"] < events[0]["loss"]
    print(sorted(p.name for p in run.rglob("*")), events[0]["loss"], events[-1]["loss"])
