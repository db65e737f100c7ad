"""The recorders write what a model computes, in its order, and change nothing."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


ORDER = ["layers.0.up", "layers.0.o_proj.input", "layers.0.o_proj", "layers.0", "layers.0.1.state"]


def test_outputs_are_written_in_the_order_of_the_computation(model, tmp_path):
    x = torch.randn(2, 3, 8)
    path = tmp_path / "a.safetensors"
    with record(model, path, x=x):
        y = model(x)
        assert not path.exists(), "a file that is not complete has the name of one that is"
        y.sum().backward()
    dump = open_dump(path)
    names = list(dump.arrays)
    assert names[:6] == ["inputs.x", *ORDER]
    assert "norm #2" in names  # the second call of a module
    assert names[-1] == "gradients.norm.bias"
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
        import sys
        sys.modules.update(dict.fromkeys(("parity_tests", "anchorline", "jaxref", "numpy.typing", "safetensors")))
        import torch
        from record import record
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with record(model, "a.safetensors"):
            model(torch.ones(1, 2))"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert list(open_dump(tmp_path / "a.safetensors").arrays) == ["0"]


def linen_model() -> Any:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x + linen.Dense(8, name="down")(linen.Dense(4, name="up")(x)), {"state": x}

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for layer in range(2):
                x, _ = Block(name=f"layers_{layer}")(x)
            return x

    return Model().bind(Model().init(jax.random.key(0), jnp.ones((1, 8))))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)

    def project(self, x):
        return self.down(self.up(x))

    def __call__(self, x):
        return x + self.project(x), {"state": x}


class NnxModel(nnx.Module):
    def __init__(self, rngs=None):
        self.layers = nnx.List([NnxBlock(rngs or nnx.Rngs(0)) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x


FLAX = {"layers#0", "layers#0.1.state", "layers#0.up", "layers#0.down", "layers#1", "layers#1.up"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("make", "dot"), [(linen_model, "_"), (NnxModel, ".")])
def test_flax_is_recorded_under_the_names_of_its_modules(tmp_path, make, dot, dtype):
    model, x = make(), jnp.ones((1, 2, 8), dtype)
    y = record_flax(model, tmp_path / "a", x)
    found = {name: ranks[0].load() for name, ranks in open_dump(tmp_path / "a").arrays.items()}
    assert {name.replace("#", dot) for name in FLAX} <= set(found)
    assert np.array_equal(found[f"layers{dot}1"], y)
    assert np.array_equal(found[f"layers{dot}1.1.state"], found[f"layers{dot}0"])
    assert np.array_equal(model(x), y)
    assert ("layers.0.project" in found) == (make is NnxModel)  # a method that is not __call__
    record_flax(model, tmp_path / "b", x, names="*.up")
    assert set(open_dump(tmp_path / "b").arrays) == {f"layers{dot}0.up", f"layers{dot}1.up"}


MADE = """import jax, torch
from flax import linen, nnx
def torch_model(): return torch.nn.Sequential(torch.nn.Linear(2, 3)), {"input": torch.ones(1, 2)}
def nnx_model(): return nnx.Linear(2, 3, rngs=nnx.Rngs(0)), {"inputs": jax.numpy.ones((1, 2))}
def other_input(): return nnx_model()[0], {"x": jax.numpy.ones((1, 2))}
def wrong_shape(): return torch_model()[0], {"input": torch.ones(1, 3)}
def unbound(): return linen.Dense(3), {"inputs": jax.numpy.ones((1, 2))}
def linen_model():
    module, inputs = unbound()
    return module.bind(module.init(jax.random.key(0), **inputs)), inputs
def number(): return 3, {}
def alone(): return 3
"""


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("torch_model", [], ["inputs.input", "0"]),
        ("nnx_model", [], ["output"]),
        ("linen_model", [], ["output"]),
        ("nnx_model", ["--backward"], "a Flax model has no backward pass"),
        ("unbound", [], "the model is of Dense; return a torch.nn.Module"),
        ("number", [], "the model is of int; return a torch.nn.Module"),
        ("other_input", [], "running it raises TypeError: "),
        ("wrong_shape", [], "running it raises RuntimeError: mat1 and mat2"),
        ("alone", [], "returns int; return (model, {name: input})"),
        ("made", [], "has no 'made'"),
        ("torch", [], "is not callable"),
    ],
)
def test_the_verb_records_what_a_function_returns(tmp_path, monkeypatch, name, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MADE)
    done = CliRunner().invoke(cli.app, ["record", f"mine.py:{name}", "--out", "a.safetensors", *options])
    if isinstance(says, str):
        assert (done.exit_code, says in done.stderr) == (2, True), done.output
        assert not (tmp_path / "a.safetensors").exists()
    else:
        assert (done.exit_code, f"{len(says)} arrays" in done.stdout) == (0, True), done.output
        assert list(open_dump(tmp_path / "a.safetensors").arrays) == says
