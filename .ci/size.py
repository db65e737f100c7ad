"""Print the size of the project, and fail if a count is above its ceiling. Three people must be able to maintain it.

A line of code has a token that is neither comment nor docstring, so deleting docstrings does not lower that count. All
lines have a ceiling, too. Lower a ceiling when the tree shrinks. Raising a ceiling needs a reason in the commit
message.
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity_tests.gate.spec import Gate
from torchtrain.config.load import Config
from torchtrain.config.preparation import Preparation
from torchtrain.config.reference import list_settings
from torchtrain.evaluation.suite import Suite

SCHEMAS = (Config, Preparation, Gate, Suite)

CEILINGS = {
    "lines of code": 31_365,
    "lines of tests' code": 22_725,
    "lines of source": 44_585,
    "lines of tests": 29_450,
    "words of docs": 26_610,
    "settings without description": 0,
}


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_code(path: Path) -> int:
    """Return how many lines of a Python file hold code: no blank line, no comment, no docstring."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for of in tokens if of.type not in _NO_CODE for n in range(of.start[0], of.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def measure() -> dict[str, int]:
    """Return the counts of the files that git tracks, by the names of CEILINGS."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name and Path(name).is_file()]
    python = [path for path in paths if path.suffix == ".py"]
    tests = [path for path in python if "tests" in path.parts or path.name == "conftest.py"]
    source = [path for path in python if path not in set(tests)]
    return {
        "lines of code": sum(map(count_code, source)),
        "lines of tests' code": sum(map(count_code, tests)),
        "lines of source": sum(len(path.read_text().splitlines()) for path in source),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests),
        "words of docs": sum(len(path.read_text().split()) for path in paths if path.suffix == ".md"),
        "settings without description": sum(
            not setting.meaning for schema in SCHEMAS for setting in list_settings([schema])
        ),
    }


counts = measure()
for name, ceiling in CEILINGS.items():
    print(f"{counts[name]:>7,} {name} (at most {ceiling:,})")
if over := [name for name, ceiling in CEILINGS.items() if counts[name] > ceiling]:
    sys.exit(f"size: too many {' and '.join(over)}: delete something, or raise the ceiling in .ci/size.py and say why")
