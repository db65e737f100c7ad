"""The recorders write what a model computes, in its order, and change nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flax import linen
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import parity_tests
from parity_tests import cli
from parity_tests.comparing.dumps import open_dump
from parity_tests.record import record
from parity_tests.record_flax import record as record_linen


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


def test_flax_is_recorded_under_the_names_of_its_modules(tmp_path):
    import jax

    class Small(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="down")(linen.Dense(4, name="up")(x))

    x = np.ones((1, 2), np.float32)
    module = Small()
    variables = module.init(jax.random.key(0), x)
    y = record_linen(module, variables, tmp_path / "linen", x)
    found = {name: ranks[0].load() for name, ranks in open_dump(tmp_path / "linen").arrays.items()}
    assert {"up", "down"} <= set(found)
    assert np.array_equal(found["down"], y)


def test_the_verb_records_what_a_function_returns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\ndef make(): return torch.nn.Sequential(torch.nn.Linear(2, 3)), {'input': torch.ones(1, 2)}\n"
    )
    done = CliRunner().invoke(cli.app, ["record", "mine.py:make", "--out", "a.safetensors"])
    assert done.exit_code == 0, done.output
    assert "2 arrays" in done.stdout
    assert list(open_dump(tmp_path / "a.safetensors").arrays) == ["inputs.input", "0"]
    for target, says in (("mine.py:made", "has no 'made'"), ("mine.py:torch", "is not callable")):
        wrong = CliRunner().invoke(cli.app, ["record", target, "--out", "b"])
        assert (wrong.exit_code, says in wrong.stderr) == (2, True), wrong.output
