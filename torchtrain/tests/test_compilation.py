"""`model.fused: compile` in whole runs, and where it cannot be; what is compiled: `parity_tests/test_compiled.py`."""

import functools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.config import load_config
from torchtrain.distributed.layout import check_layout
from torchtrain.modeling import compilation
from torchtrain.modeling.compilation import check_compiler, compile_layers
from torchtrain.tests.runs import assert_same

COMPILE = "model.fused=compile"
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture
def graphs(monkeypatch):
    """Let graphs run as they are, without a C++ compiler, and return a list that gets them."""
    made, before = [], (dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit)

    def keep(graph, inputs):
        made.append(graph)
        return graph

    monkeypatch.setattr(
        compilation, "_compile", functools.cache(functools.partial(torch.compile, dynamic=False, backend=keep))
    )
    monkeypatch.setattr("torchtrain.run.setup.check_compiler", lambda device: None)
    yield made
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = before
    torch.compiler.reset()


@pytest.fixture
def compiler():
    """Return a function that puts another in the C++ compiler's place, and what one compiled before out of reach."""
    with ExitStack() as patches:
        yield lambda name: patches.enter_context(inductor.patch({"cpp.cxx": (name,), "fx_graph_cache": False}))


def test_a_run_learns_what_it_would_without_where_graphs_compute_the_same(graphs, fresh):
    train, folder = fresh
    for name, changes in (("plain", ()), ("fused", (COMPILE, "model.activation_checkpointing=true"))):
        train(str(folder / name), "train.micro_batch=2", "save.every=1", *changes)
    assert len(graphs) == 4
    kept = ("metrics.jsonl", "model/model.safetensors")
    mine, theirs = ([(folder / name / file).read_bytes() for file in kept] for name in ("fused", "plain"))
    assert mine == theirs


def test_a_run_that_is_stopped_goes_on_with_it(graphs, place, fresh):
    train, folder = fresh
    train(str(folder / "straight"), COMPILE, "save.every=1")
    train(str(folder / "again"), COMPILE, "save.every=1")
    done = CliRunner().invoke(app, ["resume", str(folder / "again"), "--step", "1", "model.fused=none"])
    assert done.exit_code == 2
    assert "model.fused: 'compile' in the run, 'none' now" in done.stderr
    done = CliRunner().invoke(app, ["resume", str(folder / "again"), "--step", "1"])
    assert done.exit_code == 0, done.output
    assert_same(folder / "again", folder / "straight")


def test_a_compiler_that_is_not_there_is_found_before_anything_is_prepared(compiler, fresh):
    compiler("no-such-compiler")
    train, folder = fresh
    with pytest.raises(UserError, match=r"model\.fused compile: torch cannot compile for cpu here \(.*no-such-comp"):
        train(str(folder / "run"), COMPILE, f"data.cache={folder / 'cache'}")
    assert list(folder.iterdir()) == []


def test_a_compiler_that_fails_is_told_in_one_line(compiler, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo g++ 12 && exit\necho 'no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    compiler(str(broken))
    with pytest.raises(UserError, match=r"^model\.fused compile: .* or set model\.fused to none$"):
        check_compiler(torch.device("cpu"))


def test_layers_whose_weights_are_gathered_are_refused(tree, write_config):
    with pytest.raises(UserError, match=r"model\.fused compile: does not go with distributed\.zero_stage 3.* to 2, or"):
        check_layout(load_config(write_config(tree), [COMPILE, "distributed.zero_stage=3"]), 2)


def test_a_model_without_layers_is_refused():
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="flat")
    with pytest.raises(
        UserError, match=r"model\.fused compile: flat has no decoder layers .* set model\.fused to none"
    ):
        compile_layers(model, recompute=False)


def test_the_plan_says_what_it_does_not_count(tree, write_config):
    said = [CliRunner().invoke(app, ["plan", str(write_config(tree)), *more]).stdout for more in ((), (COMPILE,))]
    assert [("counted as without model.fused compile" in text) for text in said] == [False, True]
