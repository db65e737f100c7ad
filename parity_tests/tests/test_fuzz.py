"""A short, seeded part of `python -m benchmarks.fuzz`, of every kind: no damaged input gives a traceback or hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fuzz_inputs import KINDS

ROOT = Path(__file__).parents[2]
EACH = 4  # inputs of a kind


@pytest.mark.sweep
def test_damaged_inputs_give_one_line():
    command = [sys.executable, "-m", "benchmarks.fuzz", "--quick", "--seed", "0", "--count", str(EACH * len(KINDS))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert f"{EACH * len(KINDS)} inputs, no fault" in ended.stdout
