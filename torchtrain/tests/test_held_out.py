"""The held-out loss and the interval of its change, however a run was resumed or spread."""

import io
import signal

import numpy as np
import pytest
import torch
from rich.console import Console

import torchtrain
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.data import collate
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
    rows = [{**packed[i], "input_ids": np.arange(96) * (i + 1)} for i in range(len(packed))]

    def blocks(world: World, micro_batch: int) -> list[torch.Tensor]:
        found = []
        for first, dealt in assign_held_out(rows, micro_batch, world):
            batch = make_micro_batch(collate(dealt), world, HeldOut(["a"], 64).labels_of)
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
