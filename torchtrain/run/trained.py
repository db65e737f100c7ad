"""The models that a run has left: exported folders, by step."""

from pathlib import Path

from anchorline.errors import UserError, quoted
from torchtrain.checkpoint.folder import step_of
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
