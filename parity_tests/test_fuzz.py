"""A short, seeded part of `benchmarks/fuzz.sh`: no damaged input gives a traceback or hangs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = "config,override,option,place,model,environment"


def test_damaged_inputs_give_one_line():
    command = [sys.executable, "benchmarks/fuzz.py", "--quick", "--seed", "0", "--count", "40", "--kinds", KINDS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert "'inputs': 40" in ended.stdout
