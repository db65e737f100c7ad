"""Weights that are not numbers are neither trained nor exported."""

import shutil

import pytest
import safetensors.torch
import torch

from anchorline.errors import UserError
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.run.status import status_lines


def spoil(monkeypatch, at, value):
    """Let one weight become `value` in the update of that number."""
    real, calls = torch.optim.AdamW.step, []

    def step(optimizer, *arguments):
        out = real(optimizer, *arguments)
        calls.append(1)
        if len(calls) == at:
            optimizer.param_groups[0]["params"][1].data.view(-1)[7] = value
        return out

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.parametrize(("save", "what"), [(1, "nan"), (0, "inf")])
def test_weights_that_the_last_step_spoils_are_not_exported(fresh, monkeypatch, save, what):
    train, here = fresh
    spoil(monkeypatch, at=2, value=float(what))
    with pytest.raises(
        UserError, match=r"(master of )?model\.layers\.0\.\S+ is not finite after step 2; .*learning_rate"
    ):
        train(here / "run", f"save.every={save}")
    assert not (here / "run" / "model").exists()
    assert Checkpoints(here / "run" / "checkpoints").steps() == [1][:save]
    lines = list(status_lines(here / "run"))
    assert lines[0].endswith("interrupted")


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_source_whose_weights_are_no_numbers_is_named_early(fresh, place, what):
    train, here = fresh
    shutil.copytree(place.folder / "source", here / "source")
    path = here / "source" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"].view(-1)[5] = what
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"model.source .*: model.layers.1.mlp.up_proj.weight holds a number that is not finite"
    ):
        train(here / "run", f"model.source={here}/source")
    assert not (here / "run").exists()
