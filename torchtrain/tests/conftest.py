"""A tiny corpus and configs of tiny models; no network, one thread."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import yaml

from torchtrain.tests.checkpoint_fixtures import checkpoints  # noqa: F401
from torchtrain.tests.run_fixtures import done, fresh, interrupted, place, run, stopped, straight  # noqa: F401
from torchtrain.tests.tiny import tiny_model, tiny_settings, tiny_tokenizer, write_corpus

torch.set_num_threads(1)


def _of_the_process() -> dict[str, Any]:
    """What libraries change for a whole process, and what then changes in tests of other files."""
    return {
        "torch.nn.functional.linear": torch.nn.functional.linear,  # DeepSpeed's ZeRO 3 puts its own there, for good
        "the default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "a process group": torch.distributed.is_initialized(),
        **_of_the_compiler(),
    }


def _of_the_compiler() -> dict[str, Any]:
    """What torch.compile remembers of the C++ compiler, where it was asked: one that could do nothing stays so."""
    if (vectors := sys.modules.get("torch._inductor.cpu_vec_isa")) is None:
        return {"C++ for vectors": True}
    return {"C++ for vectors": not vectors.valid_vec_isa_list.cache_info().currsize or bool(vectors.pick_vec_isa())}


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the last test of a file that leaves the process changed, not one of another file that happens to follow."""
    before = _of_the_process()
    yield
    assert [name for name, value in _of_the_process().items() if value != before[name]] == []


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
    """A .jsonl of two domains (`write_corpus`)."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents.jsonl")


@pytest.fixture
def tree(model_folder, corpus, tmp_path) -> dict[str, Any]:
    """A config that trains a tiny Llama at twice its length; change it, then give it to `write_config`."""
    return tiny_settings(tmp_path, model_folder(), corpus)


@pytest.fixture
def write_config(tmp_path):
    """Return a function that writes a tree as YAML and returns the path."""

    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return write
