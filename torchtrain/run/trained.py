"""The models that a run has left: exported folders, by step; and how they were trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anchorline.errors import UserError, quoted
from torchtrain.checkpoint.folder import step_of
from torchtrain.config import Config
from torchtrain.config_history import restore_meaning
from torchtrain.evaluation.results import Training
from torchtrain.run.folder import RunFolder
from torchtrain.run.outputs import MODEL, Outputs


def last_models(path: Path, last: int) -> list[tuple[str, int | None, Path]]:
    """Return the last exported models of a run: of each its name, its step if that is known, and its folder.

    Args:
        path: the run's folder.
        last: how many, at most; the trained model is the last.

    Raises:
        UserError: the run has left none yet, or `outputs.json` is damaged.
    """
    run = RunFolder(path)
    found: list[tuple[str, int | None, Path]] = [(of.name, step_of(of.name), of) for of in run.exports_of_steps()]
    if run.model.is_dir():
        steps = Outputs.read(run.outputs).finished
        found = [model for model in found if model[1] != steps]  # the same weights
        found.append((MODEL, steps, run.model))
    if not found:
        raise UserError(f"{quoted(path)}: has left no model yet; torchtrain status tells where it stands")
    return found[-last:]


def training_of(config: Config, record: Mapping[str, Any]) -> Training:
    """Return how a run's models are trained.

    Args:
        config: the run's.
        record: of its setup, as `run.json` holds it: identity, and what the corpus is made of.
    """
    identity, corpus = record["identity"], record.get("corpus", {})
    data = identity.get("data", {})
    if "prepared" in data:  # a store by its fingerprint alone
        data = corpus.get("made_of") or {}
    return Training(
        model=config.model.source,
        variant=config.pack.variant,
        sequence_length=config.pack.sequence_length,
        rope=identity.get("model", {}).get("rope_parameters") or {},
        steps=config.train.steps,
        sequences_per_step=config.train.sequences_per_step,
        data=data,
    )


def read_training(path: Path) -> Training:
    """Return how the models of a run were trained.

    Raises:
        UserError: there is no run, or its record is damaged.
    """
    run = RunFolder(path)
    record = run.check_run()
    try:
        return training_of(Config.model_validate(restore_meaning(record["config"])), record)
    except (ValidationError, AttributeError, TypeError):
        raise UserError(f"{quoted(run.record)}: is damaged: it lacks what its run is made of; put it back") from None
