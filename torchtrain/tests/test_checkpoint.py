"""Checkpoints without a run: fragments of any layout, damage of every kind, faults of the disk, hostile files."""

import errno
import fcntl
import itertools
import os
import pickle
import random
import shutil
import stat
import tempfile
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorline import files
from anchorline.errors import UserError
from anchorline.files import FileEntry, entry_of, replace_file, write_file
from torchtrain.checkpoint import fragments, rng, store
from torchtrain.checkpoint.fragments import KINDS, Fragment
from torchtrain.checkpoint.identity import check_config, check_identity, describe_changes, differences
from torchtrain.checkpoint.manifest import MANIFEST, DamageError, Manifest, ProcessLayout, RunProgress, versions
from torchtrain.checkpoint.state import state_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import TrainConfig, load_config
from torchtrain.distributed.world import ALONE, World
from torchtrain.run.lock import hold, is_held
from torchtrain.tests.runs import unprivileged
from torchtrain.tests.tiny import tiny_model
from torchtrain.training.events import MetricsFile, read_metrics
from torchtrain.training.strategy import Replicated

TRAIN = TrainConfig()
LAYOUT = ProcessLayout(
    processes=1,
    sequence_parallel=1,
    zero_stage=0,
    offload="none",
    micro_batch=1,
    loss_chunk=7,
    device="cpu",
    attention="sdpa",
)
IDENTITY = {"tokenizer": "t", "model": {"rope": 1.0}, "data": {"sources": [{"files": "a"}]}}


# --- fragments --------------------------------------------------------------------------------------------------------

SHAPES = {"a": (3, 5), "b": (1,), "c": (4, 2, 2)}


def whole(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {name: {kind: torch.randn(prod(s), generator=generator) for kind in KINDS} for name, s in SHAPES.items()}


def cut(tensors, places: list[int]) -> list[list[Fragment]]:
    """Cut all parameters, end to end, at places; return what lies between two of them as one rank's."""
    everything = [Fragment(name, 0, kinds) for name, kinds in tensors.items()]
    total = sum(f.stop for f in everything)
    edges = [0, *sorted(p % (total + 1) for p in places), total]
    ranks = []
    for first, last in itertools.pairwise(edges):
        own, before = [], 0
        for f in everything:
            start, stop = max(first - before, 0), min(last - before, f.stop)
            if start < stop:
                own.append(f.cut(start, stop))
            before += f.stop
        ranks.append(own)
    return ranks


PLACES = st.lists(st.integers(0, 100), max_size=4)


@settings(max_examples=25)
@given(writers=PLACES, readers=PLACES, room=st.sampled_from([12, 40, 1 << 20]))
def test_what_any_layout_wrote_any_other_reads(writers, readers, room):
    was, now = whole(0), whole(1)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fragments, "FILE_BYTES", room)
        folder = Path(name)
        written = [list(fragments.write(folder, own, rank)) for rank, own in enumerate(cut(was, writers))]
        paths = [folder / file for names in written for file in names]
        for own in cut(now, readers):
            fragments.read(paths, own)
        for path in paths:
            assert sum(x.nbytes for x in safetensors.torch.load_file(path).values()) <= max(room, 12)
    for parameter, kinds in was.items():
        for kind, x in kinds.items():
            assert torch.equal(now[parameter][kind], x)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_shares_are_equal_and_together_whole(parts):
    everything = [Fragment(name, 0, kinds) for name, kinds in whole(0).items()]
    shares = [fragments.share(everything, part, parts) for part in range(parts)]
    sizes = [sum(f.stop - f.start for f in own) for own in shares]
    assert max(sizes) - min(sizes) <= 1
    fragments.check_whole({n: list(s) for n, s in SHAPES.items()}, [fragments.elements(own) for own in shares])
    end = {name: 0 for name in SHAPES}
    for own in shares:
        for f in own:
            assert f.start == end[f.parameter]
            end[f.parameter] = f.stop


def test_what_is_not_there_is_refused(tmp_path):
    first, second = cut(whole(0), [9])
    fragments.write(tmp_path, first, 0)
    with pytest.raises(DamageError, match="6 elements of master of a are in none of its files"):
        fragments.read(tmp_path.iterdir(), second)
    with pytest.raises(AssertionError):
        fragments.check_whole({n: list(s) for n, s in SHAPES.items()}, [fragments.elements(first)])


def test_another_dtype_or_tensor_is_refused(tmp_path):
    wanted = [Fragment(n, 0, kinds) for n, kinds in whole(0).items()]
    path = tmp_path / "state.safetensors"
    for tensors, message in (
        ({"master:0:a": torch.zeros(15).bfloat16()}, "master of a is torch.bfloat16 and not torch.float32"),
        ({"gradient:0:a": torch.zeros(15)}, "unknown tensor"),
        ({"master:first:a": torch.zeros(15)}, "invalid literal"),
        ({"a": torch.zeros(15)}, "not enough values"),
        ({"master:0:a": torch.zeros(3, 5)}, "too many values"),
    ):
        path.write_bytes(safetensors.torch.save(tensors))
        with pytest.raises(DamageError, match=f"{path}: .*{message}"):
            fragments.read([path], wanted)


# --- a checkpoint of a strategy ---------------------------------------------------------------------------------------


def make_strategy(dtype: torch.dtype = torch.bfloat16, updates: int = 2) -> Replicated:
    """A strategy that has made updates with random gradients."""
    strategy = Replicated(tiny_model("llama", dtype=dtype), TRAIN)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        for master in strategy.optimizer.masters:
            master.grad = torch.randn(master.shape, generator=generator)
        strategy.step(1e-2)
    return strategy


def contents(strategy: Replicated) -> dict[str, torch.Tensor]:
    state = state_of(strategy)
    found = {f"{kind}:{f.parameter}": x.clone() for f in state.fragments() for kind, x in f.tensors.items()}
    found |= {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    return found | {"updates": torch.tensor(state.updates)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints")


def save(checkpoints: Checkpoints, step: int, strategy: Replicated, keep: int = 9, config: dict | None = None) -> None:
    state = state_of(strategy)
    checkpoints.folder.parent.mkdir(exist_ok=True)
    progress = RunProgress(
        step=step,
        updates=state.updates,
        tokens_seen=7 * step,
        skipped_steps=0,
        recent_losses=[0.1, 1 / 3],
        before=[(1.1, 3)],
        metrics=FileEntry(bytes=0, sha256=""),
    )

    def manifest(entries):
        own = {"progress": progress, "layout": LAYOUT, "config": config or {}, "identity": IDENTITY}
        return Manifest(**own, versions=versions(), parameters=state.parameters, files=entries)

    checkpoints.save(state, manifest, step, keep, ALONE)


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
    rng.write(tmp_path, 0)
    first = draw()
    assert draw() != first
    rng.read(tmp_path / rng.rng_file(0))
    assert draw() == first


# --- retention, leftovers, order --------------------------------------------------------------------------------------


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


def test_the_one_just_saved_is_kept_whatever_else_is_there(checkpoints):
    """A run that was taken up at an earlier step, by whatever way."""
    strategy = make_strategy(updates=0)
    for step in (2, 4):
        save(checkpoints, step, strategy)
    save(checkpoints, 1, strategy, keep=2)
    assert 1 in checkpoints.steps()


def test_later_ones_are_forgotten_the_last_first(checkpoints, monkeypatch):
    strategy = make_strategy(updates=0)
    for step in (2, 4, 6, 8):
        save(checkpoints, step, strategy)
    real, calls = store._remove, []
    monkeypatch.setattr(store, "_remove", lambda path: calls.append(checkpoints.steps()) or real(path))
    checkpoints.forget_after(4)
    assert calls == [[2, 4, 6], [2, 4]]
    assert checkpoints.steps() == [2, 4]
    checkpoints.forget_after(0)
    assert checkpoints.steps() == []


def test_an_older_one_that_cannot_be_removed_is_not_called_unsaved(checkpoints, monkeypatch):
    strategy = make_strategy(updates=0)
    save(checkpoints, 1, strategy)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("torchtrain.checkpoint.store._discard", refuse)
    with pytest.raises(
        UserError, match=r"step-00000002: is saved, but an older .*permission denied \(.*step-00000001\)"
    ):
        save(checkpoints, 2, strategy, keep=1)
    assert checkpoints.open(2) is not None


def test_a_step_that_is_saved_again_takes_the_place(checkpoints):
    save(checkpoints, 1, make_strategy(updates=1))
    (checkpoints.path(1) / MANIFEST).write_text("damaged")
    strategy = make_strategy()
    save(checkpoints, 1, strategy)
    again = make_strategy(updates=0)
    manifest = checkpoints.open()
    assert manifest is not None
    checkpoints.load(state_of(again), manifest, ALONE)
    assert same(contents(again), contents(strategy))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {"bit flipped": flip, "cut off": cut_off, "missing": Path.unlink, "empty": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["state-00000-000.safetensors", "rng-00000.safetensors", MANIFEST])
def test_a_damaged_file_is_named_and_the_last_good_checkpoint_offered(checkpoints, name, damage):
    strategy = make_strategy(updates=1)
    for step in (1, 2, 3):
        save(checkpoints, step, strategy)
    for step in (2, 3):
        DAMAGE[damage](checkpoints.path(step) / name)
    with pytest.raises(DamageError) as caught:
        checkpoints.open()
    message = str(caught.value)
    assert message.startswith(f"{checkpoints.path(3) / name}: ")
    assert message.endswith(
        f"the last good checkpoint is that of step 1: torchtrain resume {checkpoints.folder.parent} --step 1"
    )
    assert checkpoints.open(1) is not None
    DAMAGE[damage](checkpoints.path(1) / name)
    with pytest.raises(DamageError, match=r"there is no good one: .* --step 0 begins anew"):
        checkpoints.open()


class OneOf(World):
    """One rank of two; of the other nothing is known."""

    def from_first(self, value):
        return value

    @contextmanager
    def together(self):
        yield


def test_the_ranks_share_the_work_of_finding_the_last_good_one(checkpoints, monkeypatch):
    strategy = make_strategy(updates=0)
    for step in (1, 2):
        save(checkpoints, step, strategy)
    manifest = checkpoints.path(2) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])
    read = []
    monkeypatch.setattr(files, "entry_of", lambda path: read.append(path.name) or entry_of(path))
    by_rank = []
    for rank in range(2):
        read.clear()
        with pytest.raises(DamageError, match="last good checkpoint is that of step 1"):
            checkpoints.open(world=OneOf(rank, 2))
        by_rank.append(list(read))
    assert all(by_rank)
    assert sorted(by_rank[0] + by_rank[1]) == sorted(Manifest.read(checkpoints.path(1)).files)


def test_checkpoints_that_are_not_there(checkpoints):
    assert checkpoints.open() is None
    with pytest.raises(UserError, match="has no checkpoint of step 4; there is none at all"):
        checkpoints.open(4)
    save(checkpoints, 2, make_strategy(updates=0))
    with pytest.raises(UserError, match="has no checkpoint of step 4; there are those of 2"):
        checkpoints.open(4)
    checkpoints.path(2).rename(checkpoints.path(4))
    with pytest.raises(DamageError, match="its manifest is that of step 2"):
        checkpoints.open(4)


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
    # Beside our files, under every name that somebody's loader would take.
    for name in ("optimizer.pt", "mp_rank_00_model_states.pt", "rng.pkl", "pytorch_model.bin", "zero.safetensors"):
        (folder / name).write_bytes(hostile)
        with pytest.raises(DamageError, match=f"{name}: was not written by this run"):
            checkpoints.open()
        (folder / name).unlink()
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


# --- faults of the disk -----------------------------------------------------------------------------------------------


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
        assert "the last good one is that of step 1; mend that, then: torchtrain resume" in str(caught.value)
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    save(checkpoints, 2, strategy)
    assert checkpoints.steps() == [1, 2]


def test_a_read_only_folder():
    strategy = make_strategy(updates=1)
    with tempfile.TemporaryDirectory() as name:
        checkpoints = Checkpoints(Path(name) / "run" / "checkpoints")
        save(checkpoints, 1, strategy)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with unprivileged(), pytest.raises(UserError) as caught:
            save(checkpoints, 2, strategy)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert "permission denied (" in str(caught.value)
    assert "step-00000002.partial); the last good one is that of step 1" in str(caught.value)


def test_a_lock_is_asked_for_as_a_networks_disk_gives_it(tmp_path, monkeypatch):
    """NFS makes a lock of a range of bytes of it: to hold one alone takes a file that is open for writing."""
    record = tmp_path / "run.json"
    record.write_text("{}")
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
    assert record.read_text() == "{}"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_disk_without_locks_is_one_line(tmp_path, monkeypatch, code):
    record = tmp_path / "run.json"
    record.write_text("{}")

    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    told = f"run.folder {tmp_path}: its disk gives no locks \\({os.strerror(code).lower()}\\); mount it with them"
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


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert entry_of(path) == FileEntry(
        bytes=3, sha256="11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437"
    )
    assert entry_of(path, 2).bytes == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileExistsError):
        write_file(path, b"")


# --- what a run is made of --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(checkpoints, tree, write_config):
    """A manifest of a config, and a function from overrides to a config."""

    def config(*overrides: str):
        return load_config(write_config(tree), overrides)

    save(checkpoints, 1, make_strategy(updates=0), config=config().model_dump(mode="json"))
    return checkpoints.open(), config


def test_the_same_run_may_go_on_elsewhere_and_otherwise_spread(saved):
    manifest, config = saved
    check_config(manifest.config, config())
    check_identity(manifest.identity, IDENTITY)
    check_identity(manifest.identity, {})
    free = ["run.folder=b", "data.cache=c", "distributed.zero_stage=3", "train.micro_batch=2", "train.loss_chunk=7"]
    check_config(manifest.config, config(*free, "model.activation_checkpointing=true"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=0.01", "train.learning_rate: 0.02 in the run, 0.01 now"),
        ("run.seed=4", "run.seed: 3 in the run, 4 now"),
        ("data.sources.0.max_documents=3", "data.sources.0.max_documents: None in the run, 3 now"),
        ("model.attention=dense", "model.attention: 'auto' in the run, 'dense' now"),
    ],
)
def test_another_config_is_refused(saved, override, message):
    manifest, config = saved
    with pytest.raises(UserError, match=message):
        check_config(manifest.config, config(override))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("tokenizer", "u", "the tokenizer of model.source is another .*tokenizer: 't' in the run, 'u' now"),
        ("model", {"rope": 2.0}, "model.rope: 1.0 in the run, 2.0 now"),
        ("data", {"sources": [{"files": "b"}]}, "data.sources.0.files: 'a' in the run, 'b' now"),
        ("data", {"sources": []}, "data.sources: "),
    ],
)
def test_other_material_is_refused(saved, part, value, message):
    manifest, _ = saved
    with pytest.raises(UserError, match=message):
        check_identity(manifest.identity, IDENTITY | {part: value})


def test_what_moves_last_digits_is_told(saved):
    manifest, _ = saved
    assert describe_changes(manifest, LAYOUT) == ""
    assert {"torch", "transformers", "numpy", "safetensors", "deepspeed", "python"} < manifest.versions.keys()
    older = manifest.model_copy(update={"versions": versions() | {"torch": "1.0"}})
    here = LAYOUT.model_copy(update={"processes": 2, "device": "a GPU", "attention": "flash"})
    told = "processes 1 then, 2 now, device cpu then, a GPU now, attention sdpa then, flash now, "
    assert describe_changes(older, here) == f"{told}torch 1.0 then, {torch.__version__} now"
    assert list(differences({"a": 1}, {"b": 1})) == [("a", 1, "nothing"), ("b", "nothing", 1)]
