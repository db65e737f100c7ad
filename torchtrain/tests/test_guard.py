"""Bad steps, injected: nothing is updated, their rows are noted, and they are left out only if asked."""

import json
import shutil

import pytest
import torch

from anchorline.errors import UserError
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.status import status_lines
from torchtrain.tests.run_fixtures import (
    QUIET,
    poison,
)
from torchtrain.tests.runs import STEPS
from torchtrain.training.events import read_metrics
from torchtrain.training.guard import WINDOW


@pytest.mark.parametrize(
    ("what", "fault"), [("loss", "the loss is inf"), ("nan", "norm is nan"), ("inf", "norm is inf")]
)
def test_a_bad_step_stops_before_it_updates_and_its_rows_are_noted(run, place, monkeypatch, what, fault):
    train, folder = run
    poison(monkeypatch, {3}, what)
    with pytest.raises(
        UserError, match=rf"step 3: .*{fault}; nothing was updated; its rows are in {folder}/bad_steps"
    ) as caught:
        train()
    assert "lower train.learning_rate (0.02)" in str(caught.value)
    noted = json.loads((folder / "bad_steps" / "step-00000003.json").read_text())
    assert fault in noted["fault"]
    assert [row["row"] for row in noted["rows"]] == [4, 5]
    assert all(span["domain"] in ("numbers", "letters") for row in noted["rows"] for span in row["spans"])
    assert any("bad step   3: its rows are in" in line for line in status_lines(folder))
    # Nothing of the step is in the run: it goes on from the checkpoint, and the step is good now.
    monkeypatch.undo()
    recipe.resume(load_config(folder / "config.yaml"), console=QUIET)
    assert [e["step"] for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "step"] == list(
        range(1, STEPS + 1)
    )


@pytest.mark.parametrize("what", ["loss", "nan"])
def test_bad_steps_are_left_out_only_if_asked_and_as_many(run, monkeypatch, what):
    train, folder = run
    seen = poison(monkeypatch, {2, 3, 5}, what)
    with pytest.raises(
        UserError, match=r"step 5: .* \(2 steps were left out before it\).* train.skip_bad_steps above 2"
    ):
        train("train.skip_bad_steps=2")
    assert all(torch.equal(x, seen[1][name]) for name, x in seen[3].items()), "steps 2 and 3 left the weights alone"
    assert not all(torch.equal(x, seen[3][name]) for name, x in seen[4].items())
    steps = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "step"]
    assert ["left_out" in e for e in steps] == [False, True, True, False]
    assert what == "loss" or [e["gradient_norm"] is None for e in steps] == [False, True, True, False]
    checkpoint = Checkpoints(folder / "checkpoints").open(4)
    assert checkpoint is not None
    assert (checkpoint.progress.skipped_steps, checkpoint.progress.updates) == (2, 2)


def test_a_leap_of_the_loss(run, monkeypatch):
    train, folder = run
    long = (f"train.steps={WINDOW + 2}", "train.learning_rate=1e-5", "save.every=0")
    poison(monkeypatch, {WINDOW + 1}, "spike")
    train(*long)  # off by default
    shutil.rmtree(folder)
    monkeypatch.undo()
    poison(monkeypatch, {WINDOW + 1}, "spike")
    with pytest.raises(
        UserError, match=rf"step {WINDOW + 1}: the loss is .*, above train.loss_spike 2 x .*nothing was updated"
    ):
        train(*long, "train.loss_spike=2.0")


# --- weights that are not numbers -------------------------------------------------------------------------------------


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
