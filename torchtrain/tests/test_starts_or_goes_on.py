"""`torchtrain train --resume`: the one command of a job that is started again by itself."""

import json
import os
import signal
import subprocess
import sys

import pytest

from torchtrain.run.lock import is_held
from torchtrain.tests.forks import free_port
from torchtrain.tests.run_fixtures import WAITING
from torchtrain.tests.runs import TIME_LIMIT, assert_same, tree_of


def test_it_begins_goes_on_and_ends(place, straight):
    name, again = "again", ("--resume", WAITING)
    run = place.folder / name
    assert place.train(name, *again, at="tokenizer") == -signal.SIGKILL
    assert not run.exists()
    for phase, nth, told in (("evaluation", 1, f"begin     a new run in {run}"), ("gradient", 5, "begin     anew in")):
        assert place.train(name, *again, at=phase, nth=nth) == -signal.SIGKILL
        assert told in place.log(name)
    assert place.train(name, *again) == 0, place.log(name)
    assert f"resume    from step 4 of {run}" in place.log(name)
    assert_same(run, straight)
    before = tree_of(run)
    assert place.train(name, *again) == 0
    assert place.last_line(name) == f"{run}: is finished; its model is in {run}/model"
    assert {path: x for path, x in tree_of(run).items() if "timing" not in path} == {
        path: x for path, x in before.items() if "timing" not in path
    }
    assert place.train(name, *again, "train.learning_rate=0.5") == 2
    assert "train.learning_rate" in place.last_line(name)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--resume", "--replace"), "--resume and --replace exclude each other"),
        (("--resume",), "holds files and is not recognised as a run"),
    ],
)
def test_what_it_refuses(place, options, told):
    other = place.folder / "other"
    other.mkdir(exist_ok=True)
    (other / "thesis.tex").write_text("mine")
    assert place.train("other", *options) == 2
    assert told in place.last_line("other")
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


# Kills one rank in each of torchrun's first attempts.
KILLED = """
import json, os, signal, sys
from torchtrain import cli
from torchtrain.tests.forks import arm
phase = json.loads(sys.argv.pop(1)).get(os.environ["TORCHELASTIC_RESTART_COUNT"] + "/" + os.environ["RANK"])
if phase:
    arm(*phase, signal.SIGKILL, None)
cli.main()
"""


# By attempt and rank: the held-out rows, a step (steps 2 and 4 are saved), the files of a save.
KILLS = {
    "held-out rows, step 2, step 5": {"0/0": ("evaluation", 1), "1/1": ("gradient", 2), "2/0": ("gradient", 5)},
    "step 2, a save, step 5": {"0/0": ("gradient", 2), "1/1": ("state", 1), "2/1": ("gradient", 5)},
    "held-out rows, a second save, step 5": {"0/1": ("evaluation", 1), "1/0": ("state", 2), "2/1": ("gradient", 3)},
}


@pytest.fixture(scope="module")
def on_two(place):
    """A run on two processes that nothing interrupts: its settings and its folder."""
    two = ("distributed.zero_stage=0", "distributed.sequence_parallel=2", WAITING)
    assert place.train("restarted-not", *two, processes=2) == [0, 0], place.log("restarted-not")
    return two, place.folder / "restarted-not"


@pytest.mark.sweep
@pytest.mark.parametrize("kills", KILLS)
def test_torchrun_restarts_it_to_the_same_bits(place, on_two, tmp_path, kills):
    (two, straight), run = on_two, place.folder / kills.replace(" ", "-")
    (tmp_path / "killed.py").write_text(KILLED)
    torchrun = [*(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=3")]
    torchrun += [f"--master_port={free_port()}", str(tmp_path / "killed.py"), json.dumps(KILLS[kills])]
    command = [*torchrun, "train", str(place.config), "--resume", f"run.folder={run}", *two]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    clean = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    ended = subprocess.run(command, env=clean | own, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert f"resume    from step 4 of {run}" in ended.stderr
    assert ended.stderr.count("begin     ") + ended.stderr.count("resume    from") == 4, "three were killed"
    assert_same(run, straight)
    assert not is_held(run / ".lock")
