"""`model.fused: compile` in whole runs, and where it cannot be; see also `parity_tests/tests/test_compiled.py`."""

import functools
import subprocess
import sys

import pytest
import torch
from torch._dynamo import config as dynamo
from transformers import LlamaConfig, XLNetConfig
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain import products
from torchtrain.cli import app
from torchtrain.config import load_config
from torchtrain.distributed.world import World
from torchtrain.modeling import compilation
from torchtrain.run import choices
from torchtrain.tests.forks import ROOT
from torchtrain.tests.runs import content

COMPILE = "model.fused=compile"
ON_CUDA = World(device=torch.device("cuda"))
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
    monkeypatch.setattr("torchtrain.run.choices.check_compiler", lambda device: None)
    yield made
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = before
    torch.compiler.reset()


@pytest.mark.parametrize(("recomputed", "slow"), [("true", True), ("keep_attention", False)])
def test_a_run_and_one_that_goes_on_learn_what_they_would_without_where_graphs_compute_the_same(
    graphs, fresh, recomputed, slow, monkeypatch
):
    monkeypatch.setattr(products, "chooses_float32", lambda: slow)  # as with AVX2 alone
    train, folder = fresh
    same = ("train.micro_batch=2", "save.every=1")
    train(str(folder / "plain"), *same)
    train(str(folder / "fused"), *same, COMPILE, f"model.activation_checkpointing={recomputed}")
    assert len(graphs) == 2  # before attention and after it
    left = content(folder / "fused")
    kept = [f"{name}/model/model.safetensors" for name in ("fused", "plain")]
    mine, theirs = ((folder / file).read_bytes() for file in kept)
    assert mine == theirs

    again = ["resume", str(folder / "fused"), "--step", "1"]
    done = CliRunner().invoke(app, [*again, "model.fused=none"])
    assert done.exit_code == 2
    assert "model.fused: 'compile' in the run, 'none' now" in done.stderr
    done = CliRunner().invoke(app, again)
    assert done.exit_code == 0, done.output
    assert len(graphs) == 4
    assert content(folder / "fused") == left


def test_a_compiler_that_is_not_there_or_fails_is_told_in_one_line(tmp_path):
    """In a process of its own: torch remembers for good what the compiler could not do."""
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo g++ 12 && exit\necho 'no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    code = (
        "import sys, torch\n"
        "from torch._inductor import config\n"
        "from anchorline.errors import UserError\n"
        "from torchtrain.modeling.compilation import check_compiler\n"
        "for name in sys.argv[1:]:\n"
        "    with config.patch({'cpp.cxx': (name,), 'fx_graph_cache': False}):\n"
        "        try: check_compiler(torch.device('cpu'))\n"
        "        except UserError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, "no-such-compiler", str(broken)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    missing, failing = done.stdout.splitlines()
    for line in (missing, failing):
        assert line.startswith("model.fused compile: torch cannot compile for cpu here (")
        assert line.endswith("install a C++ compiler such as g++, or set model.fused to none")
    assert "no-such-compiler" in missing


def test_a_compiler_is_tried_before_anything_is_prepared(monkeypatch, fresh):
    def refuse(device):
        raise UserError("no compiler")

    monkeypatch.setattr("torchtrain.run.choices.check_compiler", refuse)
    train, folder = fresh
    with pytest.raises(UserError, match="no compiler"):
        train(str(folder / "run"), COMPILE, f"data.cache={folder / 'cache'}")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("model.layer_chunk=8", "model.layer_chunk, which splits a layer; set that to null"),
        ("model.activation_checkpointing=offload", "model.activation_checkpointing offload, .* to true"),
        ("model.lora={}", "model.lora, which adds modules to a layer; set that to null"),
    ],
)
def test_layers_that_are_not_whole_are_refused(tree, write_config, other, said):
    path = write_config(tree)
    config = load_config(path, [other])
    chosen, why = choices.choose_fused(config.model, config.not_compiled, "unused", LlamaConfig(), ON_CUDA)
    assert chosen == "none"
    assert why == f"not compiled: {said.partition(',')[0]}"
    with pytest.raises(UserError, match=f"model.fused compile: does not go with {said}, or model.fused to none"):
        load_config(path, [COMPILE, other])


@pytest.fixture
def choose(tree, write_config, monkeypatch):
    """Return a function from what compiling a small function raises, a model's config and a device to a choice."""
    path = write_config(tree)

    def chosen(error=None, own=None, world=ON_CUDA, *overrides):
        def check(device):
            if error:
                raise UserError(f"model.fused compile: {error}")

        monkeypatch.setattr(choices, "check_compiler", check)
        own = own or LlamaConfig(
            num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8, num_attention_heads=1
        )
        config = load_config(path, overrides)
        return choices.choose_fused(config.model, config.not_compiled, "unused", own, world)

    return chosen


def test_auto_compiles_on_a_gpu_where_nothing_refuses_it_and_says_what_does(choose):
    no_layers = XLNetConfig(n_layer=1, d_model=8, n_head=1, d_inner=8, vocab_size=8)
    assert choose() == ("compile", "")
    assert choose(world=World()) == ("none", "")
    assert choose("no Triton; install it") == ("none", "not compiled: no Triton; install it")
    assert choose(None, no_layers) == (
        "none",
        "not compiled: xlnet, which has no decoder layers that can be compiled one by one",
    )
    assert choose("no Triton", None, ON_CUDA, "model.fused=none") == ("none", "")
    with pytest.raises(UserError, match="no Triton"):
        choose("no Triton", None, World(), COMPILE)


class Two(World):
    """Two ranks, of which the other cannot compile."""

    def sum(self, values):
        return [*values]


def test_ranks_choose_alike(choose):
    assert choose(world=Two(size=2, device=ON_CUDA.device)) == ("none", "not compiled: another process cannot compile")
