"""The held-out loss and the interval of its change, however a run was resumed or spread."""

import io
import json
import signal

import numpy as np
import pytest
import torch
from rich.console import Console

import torchtrain
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.data import stack_rows
from torchtrain.distributed.shard import assign_held_out
from torchtrain.distributed.world import World
from torchtrain.run import report
from torchtrain.tests.run_fixtures import WAITING
from torchtrain.tests.tiny import tiny_tokenizer
from torchtrain.training import held_out
from torchtrain.training.held_out import HeldOut
from torchtrain.training.micro_batch import make_micro_batch

BLOCKS = {"set": {"torchtrain.training.held_out.BLOCK": 16}}  # several to a row of the tiny corpus


@pytest.mark.sweep
def test_a_resumed_run_and_one_of_two_processes_print_the_interval_too(place):
    def interval(name: str) -> str:
        (line,) = [line for line in place.log(name).splitlines() if "95% interval over blocks" in line]
        return line

    def before(name: str, step: int) -> list[float]:
        return Manifest.read(place.folder / name / "checkpoints" / f"step-{step:08d}").progress.before_blocks

    assert place.train("blocks", WAITING, **BLOCKS) == 0
    assert place.train("blocks-again", WAITING, at="gradient", nth=5, **BLOCKS) == -signal.SIGKILL
    assert place.resume("blocks-again", **BLOCKS) == 0
    assert interval("blocks-again") == interval("blocks")
    assert len(before("blocks", 6)) > 10
    for name, spread in (("each-row", ()), ("half-rows", ("distributed.sequence_parallel=2",))):
        assert place.train(name, WAITING, *spread, processes=2, **BLOCKS) == [0, 0]
        assert interval(name)
        assert len(before(name, 6)) == len(before("blocks", 6))
    assert before("each-row", 6) == before("blocks", 6)


@pytest.mark.parametrize("whole_documents", [False, True])
@pytest.mark.parametrize(("size", "shared", "micro_batch"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 2), (3, 3, 1)])
def test_blocks_hold_the_same_tokens_however_rows_are_spread(monkeypatch, size, shared, micro_batch, whole_documents):
    """A token's loss is its own number here, so a block with another token has another mean."""
    monkeypatch.setattr(held_out, "BLOCK", 16)
    texts = ["ab " * n for n in (3, 9, 14, 8, 9, 5, 12, 11, 7, 10, 9, 13, 6, 9)]
    packed = torchtrain.pack(texts, tiny_tokenizer(), 96)
    rows = [{**row, "input_ids": np.arange(96) * (i + 1), "contexts": np.arange(96)} for i, row in enumerate(packed)]

    def blocks(world: World, micro_batch: int) -> list[torch.Tensor]:
        found = []
        for first, dealt in assign_held_out(rows, micro_batch, world):
            batch = make_micro_batch(stack_rows(dealt), world, HeldOut(["a"], 64).labels_of)
            found.append(held_out._losses_in_order(batch, batch.part["input_ids"].float(), first, world))
        return found

    ranks = [World(rank, size, shared, whole_documents=whole_documents) for rank in range(size)]
    spread = [of for world in ranks for of in blocks(world, micro_batch)]
    alone = held_out._means_of_blocks(blocks(World(), 1))
    assert len(alone) > 10
    assert held_out._means_of_blocks(spread) == alone


def test_the_change_of_the_held_out_loss_has_an_interval():
    before, after = (HeldOut(["a"], 64) for _ in range(2))
    shown = io.StringIO()
    for held, blocks in ((before, [2.0, 3.0, 2.5]), (after, [1.9, 2.8, 2.3])):
        held.blocks = blocks
        held.overall.total, held.overall.tokens = sum(blocks), 3
    Console(file=shown, width=120).print(report.final_table(before, after, 10, 1.0))
    # Student's: -1/6 and 4.303 standard errors of sqrt(1/300) / sqrt(3) on both sides.
    assert "change -0.3101 to -0.0232 (95% interval over blocks of 256 tokens)" in " ".join(shown.getvalue().split())


def events(folder, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize(("phase", "nth"), [("evaluation", 6), ("gradient", 4), ("state", 1)])
def test_it_is_measured_on_the_way_and_changes_nothing(place, straight, phase, nth):
    every = (WAITING, "held_out.every=1")
    if not (place.folder / "on-the-way").exists():
        assert place.train("on-the-way", *every) == 0, place.log("on-the-way")
    whole = place.folder / "on-the-way"
    assert [event["step"] for event in events(whole, "evaluation")] == [0, 1, 2, 3, 4, 5, 6]
    assert events(whole, "step") == events(straight, "step")
    assert events(whole, "evaluation")[::6] == events(straight, "evaluation")
    name = f"on-the-way-{phase}"
    assert place.train(name, *every, at=phase, nth=nth) == -signal.SIGKILL
    assert place.resume(name) == 0, place.log(name)
    assert (place.folder / name / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_nothing_is_held_out_and_nothing_measured(place):
    all_of_it = (WAITING, "data.held_out_share=0", "held_out.every=2")
    assert place.train("all-of-it", *all_of_it) == 0, place.log("all-of-it")
    assert "held out  nothing (data.held_out_share 0)" in place.log("all-of-it")
    run = place.folder / "all-of-it"
    assert (run / "loss.png").is_file()
    assert events(run, "evaluation") == []


def test_epochs_make_the_steps(place):
    epochs = (WAITING, "train.steps=null", "train.epochs=0.7", "train.schedule=linear", "evaluation.every=0")
    assert place.train("epochs", *epochs) == 0, place.log("epochs")
    run = place.folder / "epochs"
    steps = json.loads((run / "run.json").read_text())["steps"]
    (said,) = (line for line in place.log("epochs").splitlines() if line.startswith("data  "))
    rows = int(said.split(" in ")[1].split()[0])
    assert steps == -(-int(np.ceil(0.7 * rows)) // 2) > 3
    assert f"training  {steps} steps of 2 rows" in place.log("epochs")
    assert [event["step"] for event in events(run, "step")] == [*range(1, steps + 1)]
    assert place.train("epochs-again", *epochs, at="gradient", nth=4) == -signal.SIGKILL
    assert place.train("epochs-again", *epochs, "--resume") == 0, place.log("epochs-again")
    assert (place.folder / "epochs-again" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_whole_epochs_have_the_rows_that_they_count():
    rows = torchtrain.pack(["ab " * n for n in range(3, 40)], tiny_tokenizer(), 48, variant="anchor+tag")
    assert [rows.locate(rows.count(epochs)) for epochs in (1, 2, 3)] == [(1, 0), (2, 0), (3, 0)]
