"""Who may import whom. Shared code would be wrong in the same way on both sides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ["anchorline", "jaxref", "ropestudy", "torchtrain", "parity_tests"]
# Package -> what it works without; packages of one list are imported one after the other, in one process.
FORBIDDEN = {
    "anchorline": {"numpy", "matplotlib", "torch", "transformers", "jax", "flax", *OURS[1:]},
    "jaxref": {"torch", "transformers", *OURS[2:]},
    "ropestudy": {"torch", "transformers", *OURS[3:]},
    "torchtrain": {"jax", "flax", "optax", "orbax", "jaxref", "ropestudy", "parity_tests"},
}
IMPORT = """
import importlib, sys
for missing, modules in {steps!r}:
    sys.modules.update(dict.fromkeys(missing))  # optax and chex look torch up; None is "not installed" to them
    for module in modules:
        importlib.import_module(module)
    for name in missing:
        del sys.modules[name]
"""


@pytest.mark.sweep  # import-linter reads the same of the sources
@pytest.mark.parametrize("packages", [("anchorline", "jaxref", "ropestudy"), ("torchtrain",)])
def test_a_package_works_where_the_other_side_is_not_installed(packages):
    """Import every module in a process in which the forbidden packages cannot be imported."""
    steps = []
    for package in packages:
        modules = [
            ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for f in (ROOT / package).rglob("*.py")
            if "tests" not in f.relative_to(ROOT).parts and f != ROOT / "anchorline/tolerance.py"
        ]
        steps.append((sorted(FORBIDDEN[package]), modules))
    if packages == ("torchtrain",):  # the machine with the GPU may hold a finished token store and no `datasets`
        steps.insert(0, (["datasets", *steps[0][0]], ["torchtrain.cli", "torchtrain.run.recipe"]))
    run = subprocess.run([sys.executable, "-c", IMPORT.format(steps=steps)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


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
