"""Checkpoints without a run: a strategy gets back what it had; retention, leftovers, order."""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from anchorline import files
from anchorline.errors import UserError
from anchorline.files import entry_of
from torchtrain.checkpoint import rng
from torchtrain.checkpoint.manifest import MANIFEST, DamageError, Manifest
from torchtrain.checkpoint.state import state_of
from torchtrain.distributed.world import ALONE
from torchtrain.run.lock import hold, is_held
from torchtrain.tests.checkpoint_fixtures import TRAIN, contents, make_strategy, same, save
from torchtrain.tests.tiny import refused, tiny_model
from torchtrain.training.events import MetricsFile, read_metrics
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


# --- damage of every kind, and hostile files --------------------------------------------------------------------------


STATE, OTHER = "state-00000-000.safetensors", {"bytes": 3, "sha256": "0"}
LIES = [
    *(("files", value) for value in ({}, [], {"x.bin": OTHER}, {f"../{STATE}": OTHER}, {STATE: 3})),
    *((f"files.{name}", value) for name in (STATE, "rng-00000.safetensors") for value in (None, OTHER, {"bytes": -1})),
    *(("files.state-00001-000.safetensors", value) for value in (OTHER, {"bytes": 2**70, "sha256": ""})),
    *(("parameters", value) for value in ({}, [], {"x": [2]}, {"x": ["2"]})),
    *((f"progress.{name}", -1) for name in ("step", "updates", "tokens_seen", "skipped_steps")),
    *(("progress.step", value) for value in (2, 2**70, 1.0, "1", True, None)),
    *(("progress.recent_losses", value) for value in (["a"], [float("nan")], 3)),
    *(("progress.before", value) for value in ([[1.0]], [[1.0, 2.5]])),
    *(("layout.processes", value) for value in (0, -1, 2, 2**62)),
    *(("", value) for value in (None, [], 3)),
    *(("surplus", 1), ("identity", []), ("config", None)),
]


@pytest.mark.parametrize(("place", "value"), LIES)
def test_a_manifest_whose_digest_fits_and_whose_content_does_not_is_refused(checkpoints, place, value):
    strategy = make_strategy()
    save(checkpoints, 1, strategy)
    path = checkpoints.path(1) / MANIFEST
    tree = {"": json.loads(path.read_text())}
    del tree[""]["sha256"]
    *above, key = [""] if not place else ["", *place.split(".", 1)]
    branch = tree
    for name in above:
        branch = branch[name]
    if value is None and place.startswith("files."):
        del branch[key]
    else:
        branch[key] = value
    content = tree[""]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": digest} if isinstance(content, dict) else content))
    said = refused(lambda: checkpoints.load(state_of(strategy), checkpoints.open(), ALONE))
    assert str(checkpoints.path(1)) in said


class Hostile:
    """What runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


def test_a_hostile_pickle_is_refused_and_does_not_run(checkpoints, tmp_path):
    witness = tmp_path / "it ran".replace(" ", "-")
    hostile = pickle.dumps(Hostile(witness))
    pickle.loads(hostile)
    assert witness.exists(), "the pickle is a real one"
    witness.unlink()

    strategy = make_strategy(updates=1)
    save(checkpoints, 1, strategy)
    folder = checkpoints.path(1)
    # In the place of ours, as the hash tells.
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(hostile)
        with pytest.raises(DamageError, match=path.name):
            checkpoints.open()
        path.write_bytes(content)
    # In the place of ours, with a manifest that agrees.
    for path in sorted(folder.glob("*.safetensors")):
        content, manifest = path.read_bytes(), (folder / MANIFEST).read_bytes()
        for disguise in (hostile, len(hostile).to_bytes(8, "little") + hostile):
            path.write_bytes(disguise)
            forged = Manifest.read(folder)
            forged = forged.model_copy(update={"files": {**forged.files, path.name: entry_of(path)}})
            (folder / MANIFEST).write_bytes(forged.dump())
            opened = checkpoints.open()
            assert opened is not None
            with pytest.raises(DamageError, match=f"{path.name}: is not "):
                checkpoints.load(state_of(strategy), opened, ALONE)
        path.write_bytes(content)
        (folder / MANIFEST).write_bytes(manifest)
    assert checkpoints.open() is not None
    assert not witness.exists()


# --- faults of the disk: full, read-only, without locks ---------------------------------------------------------------


def test_a_full_disk(checkpoints, monkeypatch):
    """The kernel's own ENOSPC, at every file in turn: each is opened as /dev/full."""
    strategy = make_strategy(updates=1)
    save(checkpoints, 1, strategy)
    names = [*Manifest.read(checkpoints.path(1)).files, MANIFEST]
    real = os.open
    for name in names:

        def open_full(path, flags, mode=0o777, *, dir_fd=None, full=name):
            writes_it = Path(path).name == full and flags & os.O_WRONLY
            return real("/dev/full", os.O_WRONLY) if writes_it else real(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(files.os, "open", open_full)
        with pytest.raises(UserError) as caught:
            save(checkpoints, 2, strategy)
        assert f"the checkpoint could not be written: {os.strerror(errno.ENOSPC).lower()}" in str(caught.value)
        assert "the last good one is that of step 1; correct that, then: torchtrain resume" in str(caught.value)
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    save(checkpoints, 2, strategy)
    assert checkpoints.steps() == [1, 2]


def test_a_lock_is_asked_for_as_a_networks_disk_gives_it(tmp_path, monkeypatch):
    """NFS makes a lock of a range of bytes of it: to hold one alone takes a file that is open for writing."""
    record = tmp_path / ".lock"
    record.touch()
    real = fcntl.flock

    def nfs(handle, kind):
        mode = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
        if (kind & fcntl.LOCK_EX and mode == os.O_RDONLY) or (kind & fcntl.LOCK_SH and mode == os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(handle, kind)

    monkeypatch.setattr(fcntl, "flock", nfs)
    assert not is_held(record)
    with hold(record):
        assert is_held(record)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_disk_without_locks_is_one_line(tmp_path, monkeypatch, code):
    record = tmp_path / ".lock"
    record.touch()

    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    told = f"run.folder {tmp_path}: its disk has no locks \\({os.strerror(code).lower()}\\); mount it with them"
    with pytest.raises(UserError, match=told):
        is_held(record)
    with pytest.raises(UserError, match=told), hold(record):
        pass


def test_a_line_that_was_cut_off_goes_and_one_that_does_not_fit_is_told(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_text('{"event": "save", "step": 1}\n{"ev')
    with MetricsFile(path) as file:
        file.write("save", {"step": 2})
        assert [event["step"] for event in read_metrics(path)] == [1, 2]
        with open("/dev/full", "ab", buffering=0) as full:
            file._file, whole = full, file._file
            with pytest.raises(
                UserError, match=rf"{path}: could not be written: no space left on device; .* {tmp_path}"
            ):
                file.write("save", {"step": 3})
            file._file = whole
