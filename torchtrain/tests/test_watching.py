"""What the person who watches is told, and what of a run is kept."""

import io
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
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


def test_tests_started_in_the_background_of_a_shell_receive_ctrl_c():
    """Such a shell hands SIGINT on as ignored, to `make test &` and to all that it starts."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = "import conftest, subprocess, sys; conftest.pytest_configure(object()); "
    code += f"subprocess.run([sys.executable, '-c', {child!r}])"
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


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
    assert ends == [("finished", 0), "closed"]
    (folder / "outputs.json").unlink()  # as if it had been interrupted at the end
    shutil.rmtree(folder / "model")
    told["calls"].clear()
    recipe.resume(load_config(folder / "config.yaml"), console=QUIET)
    assert told["calls"][:2] == [("tensorboard", "tensorboard", 4), ("wandb", "a-project", identity, "allow", 3)]


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
