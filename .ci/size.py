"""Print how large the project is, and fail above a ceiling: a project that three people can carry stays small.

A ceiling is lowered when the tree shrinks. Raising one needs a reason in the commit message.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity_tests.gate.spec import Gate
from torchtrain.bench.config import BenchConfig
from torchtrain.config.load import Config
from torchtrain.config.preparation import Preparation
from torchtrain.config.reference import list_settings
from torchtrain.evaluation.suite import Suite

SCHEMAS = (Config, Preparation, Gate, BenchConfig, Suite)

CEILINGS = {
    "lines of source": 42_280,
    "lines of tests": 26_585,
    "words of docs": 29_460,
    "source files in a folder": 13,
    "settings without description": 0,
}


def measure() -> dict[str, int]:
    """Return the counts of the files that git tracks, by the names of CEILINGS."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name and Path(name).is_file()]
    python = [path for path in paths if path.suffix == ".py"]
    tests = [path for path in python if "tests" in path.parts or path.name == "conftest.py"]
    source = [path for path in python if path not in set(tests)]
    folders = Counter(path.parent for path in source if path.name not in ("__init__.py", "__main__.py"))
    return {
        "lines of source": sum(len(path.read_text().splitlines()) for path in source),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests),
        "words of docs": sum(len(path.read_text().split()) for path in paths if path.suffix == ".md"),
        "source files in a folder": max(folders.values()),
        "settings without description": sum(
            not setting.meaning for schema in SCHEMAS for setting in list_settings([schema])
        ),
    }


counts = measure()
for name, ceiling in CEILINGS.items():
    print(f"{counts[name]:>7,} {name} (at most {ceiling:,})")
if over := [name for name, ceiling in CEILINGS.items() if counts[name] > ceiling]:
    sys.exit(f"size: too many {' and '.join(over)}: delete something, or raise the ceiling in .ci/size.py and say why")
