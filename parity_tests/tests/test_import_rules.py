"""Who may import whom. Shared code would be wrong in the same way on both sides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "command", "arguments", "missing", "extra"),
    [
        ("torchtrain.cli", "torchtrain", ["train", "configs/demo.yaml"], "torch", "torch"),
        ("torchtrain.cli", "torchtrain", ["plan", "configs/demo.yaml"], "transformers", "torch"),
        ("jaxref.cli", "jaxref", ["mask"], "numpy", "jax"),
        ("parity_tests.cli", "parity", ["zoo"], "torch", "jax,torch"),
    ],
)
def test_a_command_whose_packages_are_missing_says_what_to_install(
    tmp_path, module, command, arguments, missing, extra
):
    """In a folder of its own: after `make train` the checkout holds runs/demo, which `train` refuses first."""
    code = f"import sys; sys.modules[{missing!r}] = None; from {module} import main; main()"
    there = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    run = subprocess.run([sys.executable, "-c", code, *arguments], **there, capture_output=True, text=True)
    said = f"{command}: the package {missing} is not installed: pip install 'anchorline[{extra}]'\n"
    assert (run.returncode, run.stderr) == (2, said)
