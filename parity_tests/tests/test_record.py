"""The recorders write what a model computes, in its order, and change nothing."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import parity_tests
from parity_tests import cli
from parity_tests.comparing.dumps import open_dump
from parity_tests.record import record
from parity_tests.record_flax import record as record_flax


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.o_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, state=None):
        return x + self.o_proj(self.up(x).relu()), {"state": x}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.norm(self.norm(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_outputs_are_written_in_the_order_of_the_computation(model, tmp_path):
    x = torch.randn(2, 3, 8)
    path = tmp_path / "a.safetensors"
    with record(model, path, x=x):
        y = model(x)
        assert not path.exists(), "a file that is not complete has the name of one that is"
        y.sum().backward()
    dump = open_dump(path)
    names = list(dump.arrays)
    assert names[:6] == ["inputs.x", *(f"layers.0{x}" for x in (".up", ".o_proj.input", ".o_proj", "", ".1.state"))]
    assert "norm #2" in names  # the second call of a module
    assert names[-1].startswith("gradients.layers.0."), "as a backward pass comes to them"
    found = load_file(path)
    assert torch.equal(found["norm #2"], y)
    assert torch.equal(found["gradients.norm.weight"], model.norm.weight.grad)
    assert torch.equal(model(x), y)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_written_as_they_are(model, tmp_path, dtype):
    model = model.to(dtype)
    with record(model, tmp_path / "a"):
        y = model(torch.randn(2, 3, 8, dtype=dtype))
    assert torch.equal(load_file(tmp_path / "a")["norm #2"], y)
    assert np.array_equal(open_dump(tmp_path / "a").arrays["norm #2"][0].load().astype(float), y.double().detach())


def test_names_choose_and_an_error_leaves_no_file(model, tmp_path):
    with record(model, tmp_path / "a", names=("layers.*.up", "norm")):
        model(torch.randn(2, 3, 8))
    with safe_open(tmp_path / "a", "pt") as file:
        assert sorted(file.keys()) == ["layers.0.up", "layers.1.up", "norm", "norm #2"]
    with pytest.raises(RuntimeError), record(model, tmp_path / "b"):
        model(torch.randn(2, 3, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_file_works_alone(tmp_path):
    shutil.copy(Path(parity_tests.__file__).parent / "record.py", tmp_path / "record.py")
    code = """if True:
        import sys; sys.modules.update(dict.fromkeys(("parity_tests", "anchorline", "jaxref", "safetensors")))
        import torch; from record import record
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with record(model, "a.safetensors"):
            model(torch.ones(1, 2))"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert list(open_dump(tmp_path / "a.safetensors").arrays) == ["0"]


X = jnp.ones((1, 2, 8))
LINEN = linen.Sequential([linen.Dense(4), linen.Dense(8)])
MADE = SimpleNamespace(
    torch=lambda: (nn.Sequential(nn.Linear(2, 3)), {"input": torch.ones(1, 2)}),
    nnx=lambda: (nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))), {"inputs": X}),
    linen=lambda: (LINEN.bind(LINEN.init(jax.random.key(0), X)), {"inputs": X}),
    unbound=lambda: (LINEN, {"inputs": X}),
    other_name=lambda: (MADE.nnx()[0], {"x": X}),
    other_shape=lambda: (MADE.torch()[0], {"input": torch.ones(1, 3)}),
    alone=lambda: 3,
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("make", "last"), [(MADE.linen, "layers_1"), (MADE.nnx, "layers.1")])
def test_flax_is_recorded_under_the_names_of_its_modules(tmp_path, make, last, dtype):
    model, x = make()[0], X.astype(dtype)
    y = record_flax(model, tmp_path / "a", x)
    found = {name: ranks[0].load() for name, ranks in open_dump(tmp_path / "a").arrays.items()}
    assert set(found) == {last.replace("1", "0"), last, "output"}
    assert all(np.array_equal(same, y) for same in (found["output"], found[last], model(x)))
    record_flax(model, tmp_path / "b", x, names="*1")
    assert list(open_dump(tmp_path / "b").arrays) == [last]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch", ["inputs.input", "0"]),
        ("nnx", ["layers.0", "layers.1", "output"]),
        ("linen", ["layers_0", "layers_1", "output"]),
        ("nnx --backward", "a Flax model has no backward pass"),
        ("unbound", "the model is of Sequential; return a torch.nn.Module"),
        ("other_name", "running it raises TypeError: "),
        ("other_shape", "running it raises RuntimeError: mat1 and mat2"),
        ("alone", "returns int; return (model, {name: input})"),
    ],
)
def test_the_verb_records_what_a_function_returns(tmp_path, name, says):
    path = tmp_path / "a.safetensors"
    target = f"parity_tests.tests.test_record:MADE.{name}".split()
    done = CliRunner().invoke(cli.app, ["record", *target, "--out", str(path)])
    if isinstance(says, str):
        assert (done.exit_code, says in done.stderr, path.exists()) == (2, True, False), done.output
    else:
        assert (done.exit_code, f"{len(says)} arrays" in done.stdout) == (0, True), done.output
        assert sorted(open_dump(path).arrays) == sorted(says)
