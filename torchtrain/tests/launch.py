"""Real processes for tests: torchrun on this machine, on a port that is free."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(processes: int, *arguments: str, python: bool = True) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` (or a program of any kind) as so many processes and return what became of them."""
    program = [] if python else ["--no-python"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), *program]
        + list(arguments),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
