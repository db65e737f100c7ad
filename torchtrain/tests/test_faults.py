"""What can go wrong around a run, each fault injected: signals, locks, disks, damage, changed material, bad steps."""

import errno
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from rich.console import Console

from torchtrain import cli
from torchtrain.checkpoint import files
from torchtrain.checkpoint.lock import hold, is_held
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import SaveConfig, load_config
from torchtrain.errors import UserError
from torchtrain.tests.conftest import tiny_tokenizer
from torchtrain.tests.forks import forks
from torchtrain.tests.runs import STEPS, Place, assert_same, content, make_place, unprivileged
from torchtrain.training import loop, session
from torchtrain.training.guard import WINDOW
from torchtrain.training.metrics import read_metrics
from torchtrain.training.session import exported_steps
from torchtrain.training.status import status_lines

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def place(model_folder, corpus, tmp_path_factory) -> Place:
    """Its model and corpus are copies that a test may change, if it changes them back."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(model_folder(), folder / "source")
    shutil.copy2(corpus, folder / "documents.jsonl")
    return make_place(folder, forks(), folder / "source", folder / "documents.jsonl")


@pytest.fixture(scope="module")
def straight(place) -> Path:
    assert place.train("straight") == 0, place.log("straight")
    return place.folder / "straight"


@pytest.fixture
def interrupted(place, straight, request) -> str:
    """The name of a run that was killed in its fifth step, with checkpoints of steps 2 and 4."""
    assert place.train(request.node.name, at="gradient", nth=5) == -signal.SIGKILL
    return request.node.name


# --- SIGTERM --------------------------------------------------------------------------------------------------------------


def test_sigterm_in_a_step_saves_after_it(place, straight):
    assert place.train("term", at="gradient", nth=3, signal=signal.SIGTERM) == 143
    folder = place.folder / "term"
    assert place.last_line("term") == (
        f"torchtrain: stopped by SIGTERM after step 3, which is saved; to go on: torchtrain resume {folder}"
    )
    assert Checkpoints(folder / "checkpoints").steps() == [2, 3]
    assert place.resume("term") == 0
    assert_same(folder, straight)


@pytest.mark.parametrize(
    ("phase", "nth", "steps"), [("evaluation", 1, []), ("evaluation", 3, [4, 6]), ("export", 3, [4, 6])]
)
def test_sigterm_anywhere_else_ends_at_once(place, straight, phase, nth, steps):
    name = f"term-{phase}-{nth}"
    assert place.train(name, at=phase, nth=nth, signal=signal.SIGTERM) == 143
    assert "stopped by SIGTERM" in place.last_line(name)
    assert Checkpoints(place.folder / name / "checkpoints").steps() == steps
    assert place.resume(name) == 0
    assert_same(place.folder / name, straight)


def test_sigterm_at_the_end_loses_no_step(place, straight):
    """Of a number of steps that `save.every` does not divide; and of a run that saves nothing on its own."""
    assert place.train("term-odd", "train.steps=5", at="export", nth=3, signal=signal.SIGTERM) == 143
    assert Checkpoints(place.folder / "term-odd" / "checkpoints").steps() == [4, 5]
    never = ("save.every=0", "save.last=1")
    assert place.train("term-none", *never, at="evaluation", nth=3, signal=signal.SIGTERM) == 143
    assert "after step 6, which is saved" in place.last_line("term-none")
    assert place.resume("term-none") == 0
    assert (place.folder / "term-none" / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_sigterm_before_there_is_a_run(place):
    assert place.train("term-early", at="folder", signal=signal.SIGTERM) == 143
    assert place.last_line("term-early") == "torchtrain: stopped by SIGTERM; there is no run yet: start it again"
    assert not (place.folder / "term-early").exists()


def test_sigterm_while_saving_lets_the_save_end(place, straight):
    assert place.train("term-save", at="manifest", nth=2, signal=signal.SIGTERM) == 143
    assert "after step 4, which is saved" in place.last_line("term-save")
    assert place.resume("term-save") == 0
    assert_same(place.folder / "term-save", straight)


# --- who may work where ---------------------------------------------------------------------------------------------------


def test_two_processes_in_one_folder(place, interrupted):
    folder = place.folder / interrupted
    assert not is_held(folder / "run.json")
    with hold(folder / "run.json"):
        assert is_held(folder / "run.json")
        message = (
            f"torchtrain: run.folder {folder}: another process is at work in it; stop that, or choose another folder"
        )
        for run in (place.resume, lambda name: place.train(name, "--replace")):
            assert run(interrupted) == 2
            assert place.last_line(interrupted) == message
        assert "data  " not in place.log(interrupted).split(message)[1], "it is refused before anything is tokenised"
        assert next(status_lines(folder)).endswith("at work")
    assert not is_held(folder / "run.json")


def test_folders_that_hold_no_run(place, tmp_path):
    (tmp_path / "config.yaml").write_text(place.config.read_text(), encoding="utf-8")
    log = tmp_path.parent / f"{tmp_path.name}.log"
    for folder in (tmp_path, tmp_path / "nothing"):
        for verb in ("resume", "status"):
            assert place.forks.run(verb, str(folder), log=log)["codes"] == [2]
            assert log.read_text().splitlines()[-1].startswith("torchtrain: ")
    assert "holds no run of ours; give the folder of one" in log.read_text()


def test_a_strangers_file_in_the_folder(place, straight, interrupted):
    folder = place.folder / interrupted
    (folder / "slurm-17.out").write_text("what a scheduler writes")
    assert next(status_lines(folder)).endswith("interrupted")
    assert place.resume(interrupted) == 0
    assert place.train(interrupted, "--replace") == 2
    assert "holds slurm-17.out, which is not recognised as a run's" in place.last_line(interrupted)
    (folder / "slurm-17.out").unlink()
    assert_same(folder, straight)


def test_a_run_is_replaced_whole(place, straight):
    """Killed in between, it leaves no half of the old one under its name."""
    folder = place.folder / "replaced"
    shutil.copytree(straight, folder)
    assert place.train("replaced", "--replace", at="removal") == -signal.SIGKILL
    assert not folder.exists()
    assert_same(folder.with_name("replaced.deleted"), straight)
    assert place.train("replaced") == 0
    assert_same(folder, straight)


@pytest.mark.parametrize(("rank", "told"), [("0", "torchtrain: interrupted\n"), ("1", "")])
def test_ctrl_c_which_reaches_all_is_told_by_one(monkeypatch, capsys, rank, told):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(typer.Exit) as caught, cli._one_line_errors():
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == told


# --- disks and damage -----------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_and_the_way_round_it(place, straight, interrupted):
    folder = place.folder / interrupted
    shard = next((folder / "checkpoints" / "step-00000004").glob("state-*"))
    content_of_it = bytearray(shard.read_bytes())
    content_of_it[1000] ^= 4
    shard.write_bytes(content_of_it)
    assert place.resume(interrupted) == 2
    assert place.last_line(interrupted) == (
        f"torchtrain: {shard}: its content has changed (its SHA-256 is not the manifest's); the last good checkpoint is that of "
        f"step 2: torchtrain resume {folder} --step 2"
    )
    assert place.resume(interrupted, "--step", "7") == 2
    assert place.last_line(interrupted).endswith("has no checkpoint of step 7; there are those of 2, 4")
    assert place.resume(interrupted, "--step", "2") == 0
    assert_same(folder, straight)


def test_beginning_anew_in_the_same_folder(place, straight, interrupted):
    assert place.resume(interrupted, "--step", "0") == 0
    assert_same(place.folder / interrupted, straight)


def test_a_run_that_was_taken_up_earlier_has_no_other_future(place, straight, interrupted):
    """Its later checkpoints would be those of another run: they would push the new ones out, and a resume would take them up."""
    folder = place.folder / interrupted
    assert place.resume(interrupted, "--step", "0", at="gradient", nth=1, signal=signal.SIGTERM) == 143
    assert "after step 1, which is saved" in place.last_line(interrupted)
    assert Checkpoints(folder / "checkpoints").steps() == [1]
    assert not (folder / "exports").exists() or not list((folder / "exports").iterdir())
    assert place.resume(interrupted) == 0
    assert_same(folder, straight)


def test_a_finished_run_that_is_taken_up_again_otherwise(run, place, monkeypatch):
    """With a step left out, everything that comes of the later steps is made anew."""
    train, folder = run
    train("save.last=3")
    models = [folder / "exports" / "step-00000004" / "model.safetensors", folder / "model" / "model.safetensors"]
    was = [path.read_bytes() for path in models]
    early = (folder / "exports" / "step-00000002").stat().st_mtime_ns
    shutil.rmtree(folder / "checkpoints" / "step-00000006")  # of six steps with keep 2, steps 4 and 6 stand
    real, seen = loop.accumulate, []

    def accumulate(engine, *rest):
        seen.append((next(status_lines(folder)), (folder / "model").exists(), folder.joinpath("loss.png").exists()))
        return real(engine, *rest)

    monkeypatch.setattr(loop, "accumulate", accumulate)
    poison(monkeypatch, {1}, "nan")
    loop.resume(load_config(folder / "config.yaml", ["train.skip_bad_steps=1"]), step=4, console=QUIET)
    assert seen == [(f"run        {folder}: at work", False, False)] * 2
    assert models[0].read_bytes() == was[0], "of step 4 itself"
    assert models[1].read_bytes() != was[1]
    assert (folder / "exports" / "step-00000002").stat().st_mtime_ns == early
    assert next(status_lines(folder)).endswith("finished")


def fails(code: int):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code), "a file")

    return fail


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("torchtrain.training.export.commit", "model: the model could not be written: no space left on device (a file); step 6 is"),
        ("torchtrain.training.loop.plot", "no space left on device (a file)"),
        ("torchtrain.checkpoint.store.commit", "the checkpoint could not be written: no space left on device (a file); the last"),
    ],
)  # fmt: skip
def test_a_disk_that_is_full_somewhere_else(run, monkeypatch, target, told):
    train, folder = run
    if "store" in target:  # the last save
        real, calls = files.commit, []
        monkeypatch.setattr(target, lambda *a: real(*a) if calls.append(1) or len(calls) < 3 else fails(errno.ENOSPC)())
    else:
        monkeypatch.setattr(target, fails(errno.ENOSPC))
    with pytest.raises(UserError) as caught:
        train()
    assert told in str(caught.value)
    assert not list(folder.glob("model*"))[1:], "nothing half-written is left"
    monkeypatch.undo()
    assert loop.resume(load_config(folder / "config.yaml"), console=QUIET) is not None
    assert next(status_lines(folder)).endswith("finished")


def test_weights_that_do_not_fit_on_the_disk(run, monkeypatch):
    """safetensors writes them itself, and says so in an exception of its own."""
    train, folder = run
    limits, real = resource.getrlimit(resource.RLIMIT_FSIZE), session.export

    def export(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            real(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(session, "export", export)
    with pytest.raises(UserError, match=rf"{folder}/model: the model could not be written: .*; step 6 is saved; mend"):
        train()
    assert not list(folder.glob("model*"))


def test_a_read_only_run():
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "run.json"
        record.write_text("{}")
        record.chmod(0o444)
        Path(name).chmod(0o555)
        with unprivileged(), pytest.raises(UserError, match=f"run.folder {name}: cannot be written: permission denied"):
            hold(record).__enter__()


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_is_good(place, straight, monkeypatch):
    real = os.open

    def full(path, flags, mode=0o777, *, dir_fd=None):
        there = "step-00000004.partial/state" in str(path) and flags & os.O_WRONLY
        return real("/dev/full", os.O_WRONLY) if there else real(path, flags, mode, dir_fd=dir_fd)

    folder = place.folder / "full"
    config = load_config(place.config, [f"run.folder={folder}"])
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(UserError) as caught:
        loop.train(config, console=QUIET)
    monkeypatch.undo()
    assert "step-00000004: the checkpoint could not be written: no space left on device; the last good" in str(
        caught.value
    )
    assert str(caught.value).endswith(f"step 2; mend that, then: torchtrain resume {folder}")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert place.resume("full") == 0
    assert_same(folder, straight)


def test_metrics_that_were_changed(place, interrupted):
    path = place.folder / interrupted / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1', '"step": 7'), encoding="utf-8")
    assert place.resume(interrupted) == 2
    assert f"{path}: has been changed: it does not begin with the" in place.last_line(interrupted)


# --- changed material -----------------------------------------------------------------------------------------------------


def test_a_changed_config(place, straight, interrupted):
    path = place.folder / interrupted / "config.yaml"
    was = path.read_text()
    path.write_text(was.replace("learning_rate: 0.02", "learning_rate: 0.03"), encoding="utf-8")
    assert place.resume(interrupted) == 2
    assert place.last_line(interrupted).startswith(
        "torchtrain: train.learning_rate: 0.02 in the run, 0.03 now; undo that"
    )
    path.write_text(was, encoding="utf-8")
    assert place.resume(interrupted, "train.steps=9") == 2
    assert "train.steps: 6 in the run, 9 now" in place.last_line(interrupted)
    assert place.resume(interrupted, "save.keep=1", "train.micro_batch=2") == 0
    assert Checkpoints(place.folder / interrupted / "checkpoints").steps() == [6]
    mine, theirs = (read_metrics(run / "metrics.jsonl") for run in (place.folder / interrupted, straight))
    assert [e["labelled_tokens"] for e in mine] == [e["labelled_tokens"] for e in theirs], "the rows are the same"


def test_a_changed_data_set_tokenizer_or_model(place, interrupted):
    metrics = (place.folder / interrupted / "metrics.jsonl").read_bytes()
    documents, tokenizer, config = (
        place.folder / "documents.jsonl",
        place.folder / "source" / "tokenizer.json",
        place.folder / "source" / "config.json",
    )
    for path, change, message in (
        (
            documents,
            lambda text: text + text.splitlines()[0] + "\n",
            "data.sources hold something else; put back the data",
        ),
        (
            tokenizer,
            lambda text: text.replace('"use_regex": true', '"use_regex": false'),
            "the tokenizer of model.source is another",
        ),
        (
            config,
            lambda text: text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
            "model.rms_norm_eps: 1e-06 in the run",
        ),
    ):
        was, times = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        assert change(was) != was
        path.write_text(change(was), encoding="utf-8")
        code = place.resume(interrupted)
        path.write_text(was, encoding="utf-8")
        os.utime(path, ns=times)
        assert code == 2
        assert message in place.last_line(interrupted)
    assert (place.folder / interrupted / "metrics.jsonl").read_bytes() == metrics, "nothing was touched"


def test_data_that_only_looks_changed(place, straight, interrupted):
    """Copied again, its files have another time: the tokens decide."""
    documents = place.folder / "documents.jsonl"
    was, times = documents.read_text(), (documents.stat().st_atime_ns, documents.stat().st_mtime_ns)
    documents.write_text(was.replace("abcdefgh", "abcdefhg"), encoding="utf-8")  # as long as it was
    assert place.resume(interrupted) == 2
    assert "were tokenised to something else" in place.last_line(interrupted)
    assert "tokens.sha256" in place.last_line(interrupted)
    documents.write_text(was, encoding="utf-8")
    os.utime(documents, ns=(times[0], times[1] + 10**9))
    code = place.resume(interrupted)
    os.utime(documents, ns=times)
    assert code == 0
    assert_same(place.folder / interrupted, straight)


def test_a_corpus_that_was_tokenised_to_something_else(place, straight, interrupted):
    """Its files look the same by name, size and time, and the store was removed with its cache."""
    documents = place.folder / "documents.jsonl"
    was, times = documents.read_text(), (documents.stat().st_atime_ns, documents.stat().st_mtime_ns)
    shutil.rmtree(place.folder / "cache")
    documents.write_text(was.replace('"domain": "letters"', '"domain": "symbols"'), encoding="utf-8")
    os.utime(documents, ns=times)
    code = place.resume(interrupted)
    documents.write_text(was, encoding="utf-8")
    os.utime(documents, ns=times)
    shutil.rmtree(place.folder / "cache")
    assert code == 2
    assert "were tokenised to something else" in place.last_line(interrupted)
    assert "tokens.domains" in place.last_line(interrupted)
    assert place.resume(interrupted) == 0
    assert_same(place.folder / interrupted, straight)


# --- bad steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(place, tmp_path):
    """Return a function that trains in this process with overrides, and the run's folder."""
    folder = tmp_path / "run"

    def train(*overrides: str):
        config = load_config(place.config, [f"run.folder={folder}", "save.last=1", *overrides])
        return loop.train(config, console=QUIET)

    return train, folder


def poison(monkeypatch, steps: set[int], what: str) -> list[dict[str, torch.Tensor]]:
    """Make loss or gradient of steps (from 1) not finite; return a list that gets the masters of every step as it begins."""
    real, seen = loop.accumulate, []

    def accumulate(engine, batches, domains, chunk):
        losses, pairs = real(engine, batches, domains, chunk)
        seen.append({str(i): x.detach().clone() for i, x in enumerate(engine.optimizer.masters)})
        if len(seen) in steps:
            if what == "loss":
                losses.overall.total = float("inf")
            elif what == "spike":
                losses.overall.total *= 3
            else:
                engine.optimizer.masters[1].grad[0] = float(what)
        return losses, pairs

    monkeypatch.setattr(loop, "accumulate", accumulate)
    return seen


@pytest.mark.parametrize(
    ("what", "fault"), [("loss", "the loss is inf"), ("nan", "norm is nan"), ("inf", "norm is inf")]
)
def test_a_bad_step_stops_before_it_updates_and_its_rows_are_noted(run, place, monkeypatch, what, fault):
    train, folder = run
    engines = []
    real = loop.make_engine
    monkeypatch.setattr(loop, "make_engine", lambda *a: engines.append(real(*a)) or engines[-1])
    seen = poison(monkeypatch, {3}, what)
    with pytest.raises(
        UserError, match=rf"step 3: .*{fault}; nothing was updated; its rows are in {folder}/bad_steps"
    ) as caught:
        train()
    assert "lower train.learning_rate (0.02)" in str(caught.value)
    assert all(torch.equal(x, seen[2][str(i)]) for i, x in enumerate(engines[0].optimizer.masters))
    assert not all(torch.equal(x, seen[1][str(i)]) for i, x in enumerate(engines[0].optimizer.masters))
    noted = json.loads((folder / "bad_steps" / "step-00000003.json").read_text())
    assert fault in noted["fault"]
    assert [row["row"] for row in noted["rows"]] == [4, 5]
    assert all(span["domain"] in ("numbers", "letters") for row in noted["rows"] for span in row["spans"])
    assert any("bad step   3: its rows are in" in line for line in status_lines(folder))
    # Nothing of the step is in the run: it goes on from the checkpoint, and the step is good now.
    monkeypatch.undo()
    loop.resume(load_config(folder / "config.yaml"), console=QUIET)
    assert [e["step"] for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "step"] == list(
        range(1, STEPS + 1)
    )


def test_bad_steps_are_left_out_only_if_asked_and_as_many(run, monkeypatch):
    train, folder = run
    seen = poison(monkeypatch, {2, 3, 5}, "nan")
    with pytest.raises(
        UserError, match=r"step 5: .* \(2 steps were left out before it\).* train.skip_bad_steps above 2"
    ):
        train("train.skip_bad_steps=2")
    assert all(torch.equal(x, seen[1][name]) for name, x in seen[3].items()), "steps 2 and 3 left the weights alone"
    assert not all(torch.equal(x, seen[3][name]) for name, x in seen[4].items())
    steps = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "step"]
    assert ["left_out" in e for e in steps] == [False, True, True, False]
    assert [e["gradient_norm"] is None for e in steps] == [False, True, True, False]
    checkpoint = Checkpoints(folder / "checkpoints").open(4)
    assert checkpoint is not None
    assert (checkpoint.progress.skipped_steps, checkpoint.progress.updates) == (2, 2)


def test_a_left_out_step_is_told(run, monkeypatch):
    train, folder = run
    poison(monkeypatch, {STEPS}, "nan")
    train("train.skip_bad_steps=1")
    assert any(line.startswith("last step") and "gradient none" in line for line in status_lines(folder))


def test_a_bad_step_that_cannot_be_noted(run, monkeypatch):
    train, _ = run
    poison(monkeypatch, {2}, "nan")
    monkeypatch.setattr("torchtrain.training.guard.replace_file", fails(errno.ENOSPC))
    with pytest.raises(UserError, match=r"no space left on device \(a file\)"):
        train("train.skip_bad_steps=1")


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


# --- who watches ----------------------------------------------------------------------------------------------------------


def test_status_tells_and_touches_nothing(place, straight, interrupted):
    folder = place.folder / interrupted
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    next((folder / "checkpoints" / "step-00000004").glob("rng-*")).unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}, content(folder / "exports")
    lines = list(status_lines(folder))
    assert before == ({path: path.stat().st_mtime_ns for path in folder.rglob("*")}, content(folder / "exports"))
    names = [line.partition(" ")[0] for line in lines]
    assert names == ["run", "steps", "last", "time", "held", "checkpoint", "model", "model", "to"]
    assert lines[0] == f"run        {folder}: interrupted"
    assert lines[1] == "steps      4 of 6"
    assert lines[3].endswith("once it is resumed")
    assert lines[5] == "checkpoint step 4, damaged"
    assert lines[-1] == f"to go on   torchtrain resume {folder}"
    finished = list(status_lines(straight))
    assert finished[0].endswith("finished")
    assert finished[-1] == f"model      {straight / 'model'}"


@pytest.mark.parametrize("key", ["log.tensorboard=true", "log.wandb=a-project"])
def test_writers_that_are_asked_for_and_not_installed(run, monkeypatch, key):
    name = key.partition(".")[2].partition("=")[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    train, folder = run
    with pytest.raises(UserError, match=f"log.{name}: the package {name} is not installed: pip install {name}"):
        train(key)
    assert not folder.exists()


def test_writers_are_told_what_the_metrics_hold(run, monkeypatch):
    """Against stand-ins with the two packages' own signatures."""
    told: dict[str, list] = {"tensorboard": [], "wandb": [], "calls": []}

    class SummaryWriter:
        def __init__(self, log_dir, purge_step=None):
            told["calls"].append(("tensorboard", Path(log_dir).name, purge_step))

        def add_scalar(self, tag, scalar_value, global_step):
            told["tensorboard"].append((tag, scalar_value, global_step))

        def flush(self):
            pass

        def close(self):
            told["calls"].append("closed")

    class Sent:
        def log(self, data, step):
            told["wandb"] += [(tag, value, step) for tag, value in data.items()]

        def finish(self, exit_code):
            told["calls"].append(("finished", exit_code))

    def init(project, id, name, dir, resume, config):
        told["calls"].append(("wandb", project, id, resume, config["train"]["steps"]))
        return Sent()

    board, wandb = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
    board.SummaryWriter, wandb.init = SummaryWriter, init
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    train, folder = run
    train("log.tensorboard=true", "log.wandb=a-project", "train.steps=3")
    assert told["tensorboard"] == told["wandb"]
    events = read_metrics(folder / "metrics.jsonl")
    losses = [(e["step"], e["loss"]) for e in events if e["event"] == "step"]
    assert [(step, value) for tag, value, step in told["wandb"] if tag == "step/loss"] == losses
    tags = {tag for tag, *_ in told["wandb"]}
    assert {"evaluation/loss", "step/domains/numbers/loss", "step/gradient_norm", "speed/tokens_per_second"} <= tags
    (_, where, purge), (_, project, identity, how, steps), *ends = told["calls"]
    assert (where, purge, project, how, steps) == ("tensorboard", None, "a-project", "allow", 3)
    assert ends == ["closed", ("finished", 0)]
    (folder / "loss.png").unlink()  # as if it had been interrupted at the end
    told["calls"].clear()
    loop.resume(load_config(folder / "config.yaml"), console=QUIET)
    assert told["calls"][:2] == [("tensorboard", "tensorboard", 4), ("wandb", "a-project", identity, "allow", 3)]


def test_a_writer_that_does_not_begin(run, monkeypatch):
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **_: (_ for _ in ()).throw(RuntimeError("api_key not configured"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    train, _ = run
    with pytest.raises(
        UserError, match=r"log.wandb 'a-project': api_key not configured; mend that, or take the key out"
    ):
        train("log.wandb=a-project")


# --- what is kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "last", "steps", "expected"),
    [
        (10, 5, 2000, [1960, 1970, 1980, 1990]),
        (10, 1, 2000, []),
        (0, 1, 2000, []),
        (7, 3, 20, [7, 14]),
        (7, 9, 20, [7, 14]),
        (100, 2, 50, []),
    ],
)
def test_which_models_are_kept(every, last, steps, expected):
    """The paper's five last ones: four in exports/, and the trained one."""
    assert exported_steps(SaveConfig(every=every, last=last), steps) == expected


def test_models_are_kept_of_steps_that_save(place):
    with pytest.raises(UserError, match="save: last 2 needs every above 0"):
        load_config(place.config, ["save.every=0", "save.last=2"])
    with pytest.raises(UserError, match=r"run.folder: missing|log: "):
        load_config(place.config, ["log=1"])


def test_a_run_without_checkpoints_begins_anew(place, straight):
    overrides = ("save.every=0", "save.last=1")
    assert place.train("none", *overrides, at="gradient", nth=5) == -signal.SIGKILL
    assert place.resume("none") == 0
    assert "it has no checkpoint" in place.log("none")
    assert (place.folder / "none" / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert not (place.folder / "none" / "checkpoints").exists()


def test_the_config_written_is_the_one_that_resumes(straight):
    """`run.folder` is given by the command: a run that was moved goes on where it is."""
    tree = yaml.safe_load((straight / "config.yaml").read_text())
    assert tree["save"] == {"every": 2, "keep": 2, "last": 3}
    assert json.loads((straight / "run.json").read_text())["config"] == load_config(
        straight / "config.yaml"
    ).model_dump(mode="json")
    assert (
        tiny_tokenizer().bos_token_id == json.loads((straight / "run.json").read_text())["identity"]["tokenizer"]["bos"]
    )


# --- many processes -------------------------------------------------------------------------------------------------------

# Seconds, where only what happens matters.
QUICK = {
    "torchtrain.cli._SECONDS_BEFORE_LEAVING": 1.0,
    "torchtrain.cli._SECONDS_BEFORE_SPEAKING": 0.3,
    "torchtrain.distributed.heartbeat.PERIOD": 0.3,
    "torchtrain.distributed.heartbeat.GRACE": 1.0,
}
TWO = ("distributed.zero_stage=2", "distributed.sequence_parallel=2")


@pytest.fixture(scope="module")
def straight_on_two(place) -> Path:
    assert place.train("straight-on-two", *TWO, processes=2) == [0, 0], place.log("straight-on-two")
    return place.folder / "straight-on-two"


def test_a_dead_process_stops_the_other_and_the_run_goes_on(place, straight_on_two):
    codes = place.train("dead", *TWO, processes=2, at="gradient", nth=5, rank=1, set=QUICK, agent=True)
    assert codes == [1, -signal.SIGKILL], "though torchrun sends it SIGTERM"
    assert place.last_line("dead") == "torchtrain: rank 0: stopped, because another process of the run is gone"
    assert place.resume("dead", processes=2) == [0, 0], place.log("dead")
    assert_same(place.folder / "dead", straight_on_two)


def test_a_process_that_fails_alone_speaks_alone(place):
    """Its traceback is what matters; the other, which waits for it in a collective, leaves in silence."""
    fault: dict[str, Any] = {"at": "gradient", "nth": 2, "rank": 1, "error": "CUDA out of memory"}
    assert place.train("fails", *TWO, processes=2, set=QUICK, **fault) == [1, 1]
    assert place.last_line("fails") == "RuntimeError: CUDA out of memory"
    assert "torchtrain: " not in place.log("fails")


def test_a_full_disk_of_one_process_is_one_line(place):
    fault: dict[str, Any] = {"at": "state", "nth": 1, "rank": 1, "error": errno.ENOSPC}
    assert place.train("full-one", *TWO, processes=2, set=QUICK, agent=True, **fault)[1] == 2
    told = [line for line in place.log("full-one").splitlines() if line.startswith("torchtrain: ")]
    (line,) = told
    assert line.startswith(
        f"torchtrain: rank 1: {place.folder}/full-one/checkpoints/step-00000002: the checkpoint could not"
    )
    assert "rank 1: no space left on device (a file); there is no earlier one" in line


def test_nodes_that_do_not_share_the_folder(place):
    """Each process has its own, and sees no run of rank 0's in it."""
    constants = QUICK | {"torchtrain.training.folder._ATTEMPTS": 1}
    codes = place.train("apart", f"run.folder={place.folder}/apart-{{rank}}", processes=2, set=constants)
    assert codes == [2, 2]
    (line,) = [line for line in place.log("apart").splitlines() if line.startswith("torchtrain: ")]
    assert line.startswith(f"torchtrain: rank 1: run.folder {place.folder}/apart-1: the run is not to be seen on ")
    assert line.endswith("run.folder must be on a disk that all nodes share")


def test_a_process_that_hangs_stops_the_other(place):
    """It lives and does nothing: no connection breaks, and a collective alone would wait for half an hour."""
    constants = QUICK | {"torchtrain.distributed.heartbeat.PATIENCE": 2.0}
    stop: dict[str, Any] = {"at": "gradient", "nth": 5, "rank": 1, "signal": signal.SIGSTOP}
    codes = place.train("hangs", *TWO, processes=2, set=constants, **stop)
    assert codes == [1, -signal.SIGKILL]
    assert place.last_line("hangs") == "torchtrain: rank 0: stopped, because rank 1 has given no sign of life for 2 s"


def test_a_process_killed_while_both_save(place, straight_on_two):
    codes = place.train("two-state", *TWO, processes=2, at="state", nth=2, rank=1, set=QUICK)
    assert codes == [1, -signal.SIGKILL]
    assert Checkpoints(place.folder / "two-state" / "checkpoints").steps() == [2]
    assert place.resume("two-state", processes=2) == [0, 0]
    assert_same(place.folder / "two-state", straight_on_two)


def test_sigterm_to_one_of_two_processes_saves_on_both(place):
    codes = place.train("two-term", *TWO, processes=2, at="gradient", nth=3, rank=1, signal=signal.SIGTERM)
    assert codes == [143, 143]
    told = [line for line in place.log("two-term").splitlines() if line.startswith("torchtrain:")]
    assert len(told) == 1
    assert "stopped by SIGTERM after step 3, which is saved" in told[0]
    assert Checkpoints(place.folder / "two-term" / "checkpoints").open(3) is not None


ALONE = ("distributed.zero_stage=0", "distributed.sequence_parallel=1")


def test_a_missing_file_of_a_rank_and_another_number_of_processes(place, straight_on_two):
    """From two processes to one and back to two, otherwise spread: the rows stay the same."""
    assert place.train("moved", *TWO, processes=2, at="gradient", nth=3) == [-signal.SIGKILL] * 2
    lost = place.folder / "moved" / "checkpoints" / "step-00000002" / "state-00001-000.safetensors"
    kept = lost.read_bytes()
    lost.unlink()
    for processes, expected in ((2, [2, 2]), (1, 2)):
        spread = ALONE if processes == 1 else ()
        assert place.resume("moved", *spread, processes=processes, set=QUICK) == expected
        told = [line for line in place.log("moved").splitlines() if line.startswith("torchtrain:")][-1]
        assert f"{lost}: is missing; there is no good one: torchtrain resume" in told
    lost.write_bytes(kept)
    assert place.resume("moved", *ALONE, at="gradient", nth=3) == -signal.SIGKILL
    assert Checkpoints(place.folder / "moved" / "checkpoints").steps() == [2, 4]
    told = "warning   the last digits may differ from those of an uninterrupted run: processes 2 then, 1 now, sequence_parallel"
    assert told in place.log("moved")
    spread = ("distributed.zero_stage=3", "distributed.sequence_parallel=1")
    assert place.resume("moved", *spread, processes=2) == [0, 0]
    mine, theirs = (read_metrics(run / "metrics.jsonl") for run in (place.folder / "moved", straight_on_two))
    for name in ("event", "step", "tokens_seen", "labelled_tokens", "live_pairs", "flops", "learning_rate"):
        assert [e.get(name) for e in mine] == [e.get(name) for e in theirs], name
    assert [e["loss"] for e in mine[:3]] == [e["loss"] for e in theirs[:3]]
