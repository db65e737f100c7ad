"""A tiny corpus and configs of tiny models; no network, one thread."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import yaml

from torchtrain.tests.run_fixtures import interrupted, place, run, straight  # noqa: F401
from torchtrain.tests.tiny import POSITIONS, tiny_model, tiny_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Return a function from a family (and config changes) to a folder with its model and tokenizer."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **changes: Any) -> Path:
        key = json.dumps([family, changes], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            tiny_model(family, **changes).save_pretrained(made[key])
            tiny_tokenizer().save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A .jsonl of two domains, 24 documents each of 20 to 89 tokens: counting up, and the alphabet again and again."""
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(24):
            numbers = " ".join(str(n) for n in range(i, i + 8 + i // 2))
            letters = ("abcdefghijklmnopqrstuvwxyz " * 4)[i : i + 20 + 3 * i]
            for domain, text in (("numbers", numbers), ("letters", letters)):
                file.write(json.dumps({"text": text, "domain": domain}) + "\n")
    return path


@pytest.fixture
def tree(model_folder, corpus, tmp_path) -> dict[str, Any]:
    """A config that trains a tiny Llama at twice its length; change it, then give it to `write_config`."""
    return {
        "run": {"folder": str(tmp_path / "run"), "seed": 3},
        "model": {"source": str(model_folder()), "dtype": "float32"},
        "rope": {"theta": 50_000.0},
        "data": {
            "sources": [{"files": str(corpus), "domain_field": "domain"}],
            "cache": str(tmp_path / "cache"),
            "held_out_share": 0.1,
        },
        "pack": {"sequence_length": 2 * POSITIONS, "variant": "anchor"},
        "train": {"steps": 12, "sequences_per_step": 2, "learning_rate": 0.02, "warmup_steps": 2, "loss_chunk": 50},
        "held_out": {"sequences": 2},
    }


@pytest.fixture
def write_config(tmp_path):
    """Return a function that writes a tree as YAML and returns the path."""

    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return write
