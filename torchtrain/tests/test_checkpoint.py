"""Checkpoints without a run: a strategy gets back what it had; retention, leftovers, order."""

import errno
import os
import random
import shutil

import numpy as np
import pytest
import torch

from anchorline.errors import UserError
from torchtrain.checkpoint import rng
from torchtrain.checkpoint.state import state_of
from torchtrain.distributed.world import ALONE
from torchtrain.tests.checkpoint_fixtures import TRAIN, contents, make_strategy, same, save
from torchtrain.tests.tiny import tiny_model
from torchtrain.training.strategy import Replicated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("updates", [0, 2])
def test_a_strategy_gets_back_what_it_had(checkpoints, dtype, updates):
    strategy = make_strategy(dtype, updates)
    save(checkpoints, 10, strategy)
    was = contents(strategy)
    again = make_strategy(dtype, updates=1)
    assert not same(contents(again), was)
    manifest = checkpoints.open()
    assert manifest is not None
    assert manifest.progress.recent_losses == [0.1, 1 / 3]
    checkpoints.load(state_of(again), manifest, ALONE)
    assert same(contents(again), was)
    for one in (strategy, again):  # and goes on alike
        for master in one.optimizer.masters:
            master.grad = torch.ones_like(master)
        one.step(1e-2)
    assert same(contents(again), contents(strategy))


def test_another_model_is_refused(checkpoints):
    save(checkpoints, 1, make_strategy())
    manifest = checkpoints.open()
    other = Replicated(tiny_model("llama", intermediate_size=40), TRAIN)
    with pytest.raises(
        UserError, match=r"gate_proj.weight is \[48, 32\] in the checkpoint and \[40, 32\] in the model"
    ):
        checkpoints.load(state_of(other), manifest, ALONE)


def test_generators_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    random.gauss()  # one of a pair: the other is part of the state
    np.random.randn()
    rng.write(tmp_path, 0, rng.capture())
    first = draw()
    assert draw() != first
    rng.read(tmp_path / rng.rng_file(0))
    assert draw() == first


def test_the_last_good_ones_are_kept_whatever_the_clock_says(checkpoints, monkeypatch):
    strategy = make_strategy()
    clock = iter(range(10_000, 0, -1))
    monkeypatch.setattr("time.time", lambda: next(clock))
    for step in (1, 2, 3):
        save(checkpoints, step, strategy, keep=2)
        os.utime(checkpoints.path(step), (1e9 - step, 1e9 - step))  # as if written before the one before
    assert checkpoints.steps() == [2, 3]
    manifest = checkpoints.open()
    assert manifest is not None
    assert manifest.progress.step == 3
    shutil.rmtree(checkpoints.path(3))
    (checkpoints.path(3)).mkdir()  # no good one: it does not count as one that is kept
    save(checkpoints, 4, strategy, keep=2)
    assert checkpoints.steps() == [2, 3, 4]
    save(checkpoints, 5, strategy, keep=2)
    assert checkpoints.steps() == [4, 5]


def test_nothing_is_removed_before_the_new_one_is_there(checkpoints, monkeypatch):
    strategy = make_strategy()
    save(checkpoints, 1, strategy, keep=1)
    monkeypatch.setattr("torchtrain.checkpoint.store.commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2, strategy, keep=1)
    assert checkpoints.steps() == [1]
    assert checkpoints.path(2).with_name("step-00000002.partial").is_dir()
    monkeypatch.undo()
    checkpoints.sweep()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]
    save(checkpoints, 2, strategy, keep=1)
    assert checkpoints.steps() == [2]


def test_an_older_one_that_cannot_be_removed_is_not_called_unsaved(checkpoints, monkeypatch):
    strategy = make_strategy(updates=0)
    save(checkpoints, 1, strategy)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("torchtrain.checkpoint.folder.set_aside", refuse)
    with pytest.raises(
        UserError, match=r"step-00000002: is saved, but an older .*permission denied \(.*step-00000001\)"
    ):
        save(checkpoints, 2, strategy, keep=1)
    assert checkpoints.open(2) is not None
