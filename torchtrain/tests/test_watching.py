"""What the person who watches is told, and what of a run is kept."""

import importlib.util
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.config import SaveConfig, load_config
from torchtrain.run import recipe, report
from torchtrain.run.recipe import train
from torchtrain.run.status import status_lines
from torchtrain.tests.run_fixtures import (
    QUIET,
)
from torchtrain.tests.runs import content
from torchtrain.training.events import read_metrics

# --- who watches ------------------------------------------------------------------------------------------------------


def test_status_tells_and_touches_nothing(place, straight, interrupted):
    folder = place.folder / interrupted
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    next((folder / "checkpoints" / "step-00000004").glob("rng-*")).unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}, content(folder / "exports")
    lines = list(status_lines(folder))
    assert before == ({path: path.stat().st_mtime_ns for path in folder.rglob("*")}, content(folder / "exports"))
    names = [line.partition(" ")[0] for line in lines]
    assert names == ["run", "steps", "last", "time", "held", "checkpoint", "model", "model", "resume"]
    assert lines[0] == f"run        {folder}: interrupted"
    assert lines[1] == "steps      4 of 6"
    assert lines[3].endswith("once it is resumed")
    assert lines[5] == "checkpoint step 4, damaged"
    assert lines[-1] == f"resume     torchtrain resume {folder}"
    finished = list(status_lines(straight))
    assert finished[0].endswith("finished")
    assert finished[-1] == f"model      {straight / 'model'}"


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "\x1b]0;title\x07", "x\r\ny", "\u202eabc"])
def test_a_name_writes_no_escape_codes(stopped, tmp_path, name, capsys):
    """A run's folder, a model that it exported, a bad step, and a file of a source."""
    run = Path(shutil.copytree(stopped, tmp_path / name))
    (run / "bad_steps").mkdir()
    (run / "bad_steps" / f"step-{name}.json").write_text('{"step": 3}')
    (run / "checkpoints" / "step-00000004" / name).touch()
    for verb in ("status", "verify", "resume"):
        arguments = [verb, str(run)] + ["train.learning_rate=1"] * (verb == "resume")
        with pytest.raises(SystemExit):
            app(arguments)
    said = capsys.readouterr()
    shown = name.encode("unicode_escape").decode()
    assert said.out.count(shown) >= 4
    assert all(line.isprintable() and line for line in (said.out + said.err).splitlines())


@pytest.mark.parametrize("damaged", [False, True])
def test_status_reads_the_ends_of_files_of_any_length(stopped, tmp_path, damaged):
    """Between the first line and the last ones is a hole of 3 GiB, which would take a minute to read."""
    run, told = Path(shutil.copytree(stopped, tmp_path / "run")), []
    for hole in (0, 3 << 30):
        for name in ("metrics.jsonl", "timing.jsonl"):
            first, *others = (stopped / name).read_bytes().splitlines(keepends=True)
            others = others * 150 if not damaged else [*others * 150, b"{}\n", others[-1]]
            with (run / name).open("wb") as file:
                file.write(first)
                file.seek(hole, 1)
                file.writelines([b"\n"] * bool(hole) + others)
        told.append([line for line in status_lines(run) if not line.startswith("damaged")])
        faults = [line for line in status_lines(run) if line.startswith("damaged")]
        assert len(faults) == 2 * damaged
        assert all("line 2 from the end is damaged: the field event is missing" in line for line in faults)
    assert told[0] == told[1]


SERVICES = ("tensorboard", "wandb", "mlflow", "trackio")


class Service:
    """Stands for the four packages, with the signatures that accelerate's trackers call."""

    def __init__(self):
        self.told, self.calls, self.id, self.refuses = {name: [] for name in SERVICES}, [], None, False
        self.modules = {name: types.ModuleType(name) for name in SERVICES}
        board, wandb, mlflow, trackio = self.modules.values()
        board.SummaryWriter = self.begin_board
        wandb.init, trackio.init = partial(self.begin, "wandb"), partial(self.begin, "trackio")
        limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
        mlflow.utils = types.SimpleNamespace(validation=limits)
        mlflow.search_experiments = lambda filter_string: [types.SimpleNamespace(experiment_id="7")]
        mlflow.search_runs, mlflow.start_run, mlflow.log_metrics = self.search, self.start, self.log
        mlflow.log_params = lambda of: self.calls.append(("mlflow params", json.loads(of["train"])["steps"]))
        mlflow.end_run = lambda status="FINISHED": self.calls.append(("mlflow", status))

    def begin_board(self, log_dir, purge_step=None):
        self.calls.append(("tensorboard", Path(log_dir).name, purge_step))
        log = lambda key, value, global_step: self.told["tensorboard"].append((key, value, global_step))  # noqa: E731
        close = partial(self.calls.append, "closed")
        return types.SimpleNamespace(add_scalar=log, flush=lambda: None, close=close)

    def begin(self, service, *, project, resume, config, **given):
        self.calls.append((service, project, given, resume, config["train"]["steps"]))
        finish = lambda exit_code=0: self.calls.append((service, exit_code))  # noqa: E731
        return types.SimpleNamespace(log=partial(self.log, name=service), finish=finish)

    def search(self, experiment_names, filter_string, output_format):
        found = self.id and re.fullmatch("attributes.run_name LIKE '%(-.*)'", filter_string)[1] in self.id
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id="of-mlflow"))] if found else []

    def start(self, run_id, experiment_id, run_name, **_):
        self.calls.append(("mlflow", run_id, experiment_id))
        self.id = run_name

    def log(self, values, step, name="mlflow"):
        if self.refuses:
            raise ConnectionError("no route to the server")
        self.told[name] += [(key, value, step) for key, value in values.items()]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name, module in service.modules.items():
        monkeypatch.setitem(sys.modules, f"torch.utils.{name}" if name == "tensorboard" else name, module)
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: name in SERVICES or real(name, *of))
    return service


def test_services_are_told_what_the_metrics_hold_and_keep_run_and_step(run, service, monkeypatch):
    """Through accelerate's own trackers, which must make no group of torchrun's variables."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    train, folder = run
    train("log.report_to=[tensorboard, wandb, mlflow, trackio]", "log.project=a-project", "train.steps=3")
    assert not torch.distributed.is_initialized()
    told = service.told
    assert told["tensorboard"] == told["wandb"] == told["mlflow"] == told["trackio"]
    events = read_metrics(folder / "metrics.jsonl")
    losses = [(e["step"], e["loss"]) for e in events if e["event"] == "step"]
    assert [(step, value) for tag, value, step in told["wandb"] if tag == "step/loss"] == losses
    tags = {tag for tag, *_ in told["wandb"]}
    assert {"evaluation/loss", "step/domains/numbers/loss", "step/gradient_norm", "speed/tokens_per_second"} <= tags
    begun, ends = service.calls[:5], service.calls[5:]
    assert ends == [("trackio", 0), ("mlflow", "FINISHED"), ("wandb", 0), "closed"]
    board, (_, project, own, how, steps), mlflow, params, trackio = begun
    assert (board, project, how, steps) == (("tensorboard", "tensorboard", None), "a-project", "allow", 3)
    assert (mlflow, params) == (("mlflow", None, "7"), ("mlflow params", 3))
    assert trackio[2]["name"] == f"{folder.name}-{own['id']}", "which is how it knows a run"
    (folder / "outputs.json").unlink()  # as if it had been interrupted at the end
    shutil.rmtree(folder / "model")
    service.calls.clear()
    recipe.resume(load_config(folder / "config.yaml"), console=QUIET)
    again = [("tensorboard", "tensorboard", 4), begun[1], ("mlflow", "of-mlflow", "7"), trackio]
    assert service.calls[:4] == again


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_service_that_goes_away_is_one_line(run, service, name):
    train, _ = run
    service.refuses = True
    with pytest.raises(
        UserError, match=rf"log.report_to {name}, .*: no route to the server; correct that, then: .*resume"
    ):
        train(f"log.report_to=[{name}]")
    assert service.calls[-1] in ((name, 1), (name, "FAILED"), ("trackio", 0)), "not as finished, where it can be told"


# --- what is kept -----------------------------------------------------------------------------------------------------


@given(every=st.integers(0, 12), last=st.integers(1, 6), apart=st.none() | st.integers(1, 9), steps=st.integers(1, 40))
def test_which_models_are_kept(every, last, apart, steps):
    save = SaveConfig(every=every, last=last if every or apart else 1, last_every=apart)
    before = [step for step in range(1, steps) if every and step % every == 0]
    assert list(save.before_last(steps)) == before
    kept = before if apart is None else [step for step in range(1, steps) if (steps - step) % apart == 0]
    assert list(save.exports(steps)) == kept[max(0, len(kept) - save.last + 1) :]


def test_models_are_kept_of_steps_that_do_not_save(place, straight):
    """Killed after one of them, the run goes back to its checkpoint and makes it again."""
    assert place.train("apart", "save.every=4", "save.last_every=1", at="gradient", nth=6) == -signal.SIGKILL
    assert place.resume("apart") == 0
    exports = place.folder / "apart" / "exports"
    assert sorted(path.name for path in exports.iterdir()) == ["step-00000004", "step-00000005"]
    for name in ("metrics.jsonl", "model/model.safetensors", "exports/step-00000004/model.safetensors"):
        assert (place.folder / "apart" / name).read_bytes() == (straight / name).read_bytes(), name


def test_a_run_without_checkpoints_begins_anew(place, straight):
    overrides = ("save.every=0", "save.last=1")
    assert place.train("none", *overrides, at="gradient", nth=5) == -signal.SIGKILL
    assert place.resume("none") == 0
    assert "it has no checkpoint" in place.log("none")
    assert (place.folder / "none" / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert not (place.folder / "none" / "checkpoints").exists()


# --- who waits --------------------------------------------------------------------------------------------------------


# One operation of many minutes, in which Python handles no signal. A shell may have switched Ctrl-C off for a test.
LONG = """
import hashlib, sys
from torchtrain.run import termination
termination._RELAYED = float(sys.argv[1])
with termination.Termination() as taken, taken.defer():
    taken.answer = lambda name: print(name, flush=True)
    taken.leave = lambda: print("ending", flush=True)
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
"""


@pytest.mark.parametrize(
    ("first", "second", "name", "code"),
    [
        (signal.SIGINT, signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGTERM, signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGINT, signal.SIGTERM, "Ctrl-C", 143),
    ],
)
def test_a_signal_is_answered_inside_a_long_operation_and_a_second_one_ends_it(first, second, name, code):
    with subprocess.Popen([sys.executable, "-c", LONG, "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line, number in (("ready", first), (name, second)):
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(number)
        assert process.communicate()[0] == "ending\n"
        assert process.returncode == code


def test_a_signal_that_is_handed_on_twice_counts_once():
    """torchrun and its processes each get a scheduler's SIGTERM, and torchrun hands its own on."""
    with subprocess.Popen([sys.executable, "-c", LONG, "60"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("ready", "SIGTERM"):
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_step_shows_how_far_it_is(monkeypatch, terminal):
    monkeypatch.setattr(report, "_SECONDS_WITHOUT_A_LINE", 0.01)
    shown = io.StringIO()
    with report.Display(Console(file=shown, force_terminal=terminal, width=200)) as display:
        advance = display.task("training", 2)
        advance("loss 2.5")
        display.note_part("micro-batch 3 of 8")
        said = r"micro-batch 3 of 8" if terminal else r"training 2/2 · micro-batch 3 of 8 · \d+ s so far"
        while not re.search(said, shown.getvalue()):
            time.sleep(0.01)
        advance("loss 2.4")
        assert "loss 2.4" in shown.getvalue() or terminal


def test_the_time_of_the_run_is_estimated_before_the_first_step(tree, write_config):
    shown = io.StringIO()
    train(load_config(write_config(tree), ["train.steps=3"]), console=Console(file=shown, width=200))
    said = shown.getvalue()
    number = (
        r"estimate  \d:\d\d:\d\d from here, by the speed of .*: 3 steps of \d+ s, and \d+ s for held-out documents "
    )
    rough, better = (
        re.search(number + "before and after", said.replace("documents,", "documents")),
        re.search(number + "again", said),
    )
    assert rough.start() < said.index("held out 1/") < better.start() < said.index("training 1/3")


@pytest.mark.parametrize(
    ("domains", "trained", "curves"),
    [
        ("a", "a", ["training, a", "held out, a"]),
        ("ab", "ab", [f"{when}, {name}" for name in ("all", "a", "b") for when in ("training", "held out")]),
        ("ab", "b", ["training, all", "held out, all", "held out, a", "training, b", "held out, b"]),
        ("ab", "", ["held out, all", "held out, a", "held out, b"]),  # no step was taken
    ],
)
def test_a_curve_is_drawn_once_where_there_are_numbers(domains, trained, curves):
    def event(name, domains):
        losses = {"loss": 2.0, "tokens_seen": 1, "domains": {name: {"loss": 2.0} for name in domains}}
        return {"event": name, **losses}

    steps = [event("step", trained)] * bool(trained)
    figure = report.draw([event("evaluation", domains), *steps, event("evaluation", domains)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == curves
