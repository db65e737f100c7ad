"""Runs that tests of their faults begin with, and what makes a step a bad one."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.tests.forks import forks
from torchtrain.tests.runs import Place, make_place
from torchtrain.training import step

QUIET = Console(quiet=True)
# So that it is certain which checkpoints there are when a run is killed in a step.
WAITING = "save.asynchronous=false"


@pytest.fixture(scope="session")
def place(model_folder, corpus, tmp_path_factory) -> Place:
    """Its model and corpus are copies that a test may change, if it changes them back."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(model_folder(), folder / "source")
    shutil.copy2(corpus, folder / "documents.jsonl")
    return make_place(folder, forks(), folder / "source", folder / "documents.jsonl")


@pytest.fixture(scope="session")
def straight(place) -> Path:
    assert place.train("straight") == 0, place.log("straight")
    return place.folder / "straight"


@pytest.fixture
def interrupted(place, straight, request) -> str:
    """The name of a run that was killed in its fifth step, with checkpoints of steps 2 and 4."""
    assert place.train(request.node.name, WAITING, at="gradient", nth=5) == -signal.SIGKILL
    return request.node.name


@pytest.fixture
def run(place, tmp_path):
    """Return a function that trains in this process with overrides, and the run's folder."""
    folder = tmp_path / "run"

    def train(*overrides: str):
        config = load_config(place.config, [f"run.folder={folder}", "save.last=1", *overrides])
        return recipe.train(config, console=QUIET)

    return train, folder


@pytest.fixture
def fresh(place, tmp_path):
    """Return a function that trains two steps in this process with `run.folder`, and the folder it is relative to."""

    def train(folder: str, *overrides: str, **how: bool):
        changes = ["save.last=1", "train.steps=2", *overrides, f"run.folder={json.dumps(str(folder))}"]
        return recipe.train(load_config(place.config, changes), **how, console=QUIET)

    return train, tmp_path


@pytest.fixture
def done(place, straight, tmp_path) -> Path:
    """A copy of a finished run, with checkpoints, exports and a model."""
    return Path(shutil.copytree(straight, tmp_path / "run"))


@pytest.fixture(scope="session")
def stopped(place, straight) -> Path:
    """A run that was killed in its fifth step; copy it before it is changed."""
    assert place.train("stopped", WAITING, at="gradient", nth=5) == -signal.SIGKILL
    return place.folder / "stopped"


def poison(monkeypatch, steps: set[int], what: str) -> list[dict[str, torch.Tensor]]:
    """Make loss or gradient of steps (from 1) not finite; return a list that gets the masters of every step as it
    begins.
    """
    real, seen = step.accumulate, []

    def accumulate(strategy, *rest):
        seen.append({str(i): x.detach().clone() for i, x in enumerate(strategy.optimizer.masters)})
        norm = strategy.norm

        def poisoned_norm():
            strategy.optimizer.masters[1].grad[0] = float(what)
            return norm()

        if len(seen) in steps and what not in ("loss", "spike"):
            strategy.norm = poisoned_norm
        losses, pairs = real(strategy, *rest)
        strategy.norm = norm
        if len(seen) in steps and what == "loss":
            losses.overall.total = float("inf")
        elif len(seen) in steps and what == "spike":
            losses.overall.total *= 3
        return losses, pairs

    monkeypatch.setattr(step, "accumulate", accumulate)
    return seen


def fails(code: int):
    """Return what fails, whatever it is called with, as the system does."""

    def fail(*_, **__):
        raise OSError(code, os.strerror(code), "a file")

    return fail


def resume(run: Path):
    """Go on with a run in this process, wherever it was copied to."""
    return recipe.resume(load_config(run / "config.yaml", [f"run.folder={run}"]), console=QUIET)
