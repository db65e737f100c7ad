"""Training on a system that lacks what only Linux has, such as macOS."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

LINUX_ONLY = ("O_TMPFILE", "posix_fadvise", "POSIX_FADV_RANDOM", "sched_getaffinity", "sched_setaffinity")

TRAIN_ELSEWHERE = f"""
import os, pathlib, signal, sys
for name in {LINUX_ONLY!r}:
    delattr(os, name)
del signal.SIGHUP
read_text = pathlib.Path.read_text
def read(path, *rest, **more):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(str(path))
    return read_text(path, *rest, **more)
pathlib.Path.read_text = read
sys.argv[0] = "torchtrain"
from torchtrain.cli import main
main()
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE") or not hasattr(signal, "SIGHUP"), reason="not Linux")
def test_train_and_resume_need_nothing_that_only_linux_has(place, tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", TRAIN_ELSEWHERE, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    folder = f"run.folder={tmp_path / 'run'}"
    told = call("train", str(place.config), folder, "train.steps=2", "model.activation_checkpointing=auto")
    assert told.returncode == 0, told.stderr
    (tmp_path / "run" / "outputs.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    told = call("resume", str(tmp_path / "run"))
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_system_without_file_locks_is_told_what_to_do(tmp_path):
    """Windows has no `fcntl`: importing works, and a run is refused in one line."""
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from pathlib import Path\n"
        "from torchtrain.run.lock import hold\n"
        f"with hold(Path({str(tmp_path / '.lock')!r})): pass\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "run.folder" in told.stderr.splitlines()[-1]
    assert "WSL" in told.stderr.splitlines()[-1]
