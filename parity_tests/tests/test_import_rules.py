"""Who may import whom. Shared code would be wrong in the same way on both sides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "anchorline": {
        "numpy",
        "matplotlib",
        "torch",
        "transformers",
        "jax",
        "flax",
        "jaxref",
        "ropestudy",
        "torchtrain",
        "parity_tests",
    },
    "jaxref": {"torch", "transformers", "ropestudy", "torchtrain", "parity_tests"},
    "ropestudy": {"torch", "transformers", "torchtrain", "parity_tests"},
    "torchtrain": {"jax", "flax", "optax", "orbax", "jaxref", "ropestudy", "parity_tests"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_package_works_where_the_other_side_is_not_installed(package):
    """Import every module in a process in which the forbidden packages cannot be imported."""
    modules = [
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for f in (ROOT / package).rglob("*.py")
        if "tests" not in f.relative_to(ROOT).parts and f != ROOT / "anchorline/tolerance.py"
    ]
    block = "\n".join(f"sys.modules[{name!r}] = None" for name in sorted(FORBIDDEN[package]))
    code = f"import importlib, sys\n{block}\nfor name in {modules!r}: importlib.import_module(name)"
    # optax and chex look torch up if they find it; a None in sys.modules is what "not installed" looks like to them.
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_trainer_imports_without_datasets():
    """The machine with the GPU may hold a finished token store and no `datasets`."""
    code = "import sys; sys.modules['datasets'] = None; import torchtrain.cli, torchtrain.run.recipe"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("module", "command", "arguments", "missing", "extra"),
    [
        ("torchtrain.cli", "torchtrain", ["train", "configs/demo.yaml"], "torch", "torch"),
        ("torchtrain.cli", "torchtrain", ["plan", "configs/demo.yaml"], "transformers", "torch"),
        ("jaxref.cli", "jaxref", ["mask"], "numpy", "jax"),
        ("parity_tests.cli", "parity", ["run", "configs/parity/ci.yaml"], "jax", "jax,torch"),
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
