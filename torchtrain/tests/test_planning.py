"""`torchtrain plan`: what is counted is what is held, and the verdict, the bounds and the remedies follow from it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from torchtrain.cli import app
from torchtrain.config import ModelConfig, TrainConfig, load_config
from torchtrain.distributed.zero import BUCKET, GATHERED
from torchtrain.planning import budget
from torchtrain.planning.flops import FlopCounter
from torchtrain.planning.memory import (
    PeakBytes,
    Shapes,
    activation_bytes,
    enable_checkpointing,
    logits_bytes,
    shape_of_model,
)
from torchtrain.tests.tiny import POSITIONS, tiny_config, tiny_model
from torchtrain.training.optimizer import Optimizer

CONFIGS = Path(__file__).parents[2] / "configs"
# Llama-2-7B's config.json.
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_7B |= {"num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory) -> Path:
    """A folder with the config of Llama-2-7B and no weights."""
    folder = tmp_path_factory.mktemp("7b")
    LlamaConfig(**LLAMA_7B).save_pretrained(folder)
    return folder


@pytest.fixture
def call():
    return lambda *arguments: CliRunner().invoke(app, ["plan", *map(str, arguments)])


# --- what is counted --------------------------------------------------------------------------------------------------


def test_peak_bytes_counts_storages_while_they_live():
    weight = torch.nn.Linear(8, 8, bias=False)
    with PeakBytes(weight) as count:
        a = torch.zeros(100)
        assert (count.now, count.peak) == (400, 400)
        b = a.double()
        view = a[10:].view(9, 10)
        weight.weight.t()  # a view of what was there before
        assert (count.now, count.peak) == (1200, 1200)
        del b
        assert (count.now, count.peak) == (400, 1200)
        del a
        assert count.now == 400, "the view keeps it"
        del view
        assert (count.now, count.peak) == (0, 1200)


def settings(checkpointing: bool, dtype: str = "bfloat16") -> ModelConfig:
    return ModelConfig(source="x", dtype=dtype, activation_checkpointing=checkpointing)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_with_checkpointing_a_layer_more_keeps_its_input_and_no_more(family, rows):
    peaks = []
    for layers in (3, 4, 5):
        model = shape_of_model(tiny_config(family, num_hidden_layers=layers), settings(True))
        peaks.append(activation_bytes(model, rows, 64))
    width, bfloat16 = model.config.hidden_size, 2
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] == rows * 64 * width * bfloat16


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shapes_alone_hold_what_numbers_hold(checkpointing):
    """The same pass with the same stand-in for attention, on the meta device and on the CPU."""
    shapes = shape_of_model(tiny_config("llama"), settings(checkpointing, "float32"))
    real = tiny_model("llama", attn_implementation=shapes.config._attn_implementation)
    if checkpointing:
        enable_checkpointing(real)
    for parameter in real.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    real.train()
    ids = torch.zeros(1, 40, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": torch.arange(40)[None], "attention_mask": torch.ones_like(ids)}
    with PeakBytes(real) as count:
        hidden = real.base_model(**inputs, use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
    assert activation_bytes(shapes, 1, 40) == count.peak


def test_more_tokens_rows_and_chunks_hold_more():
    plain, checkpointed = (shape_of_model(tiny_config(), settings(on)) for on in (False, True))
    assert activation_bytes(checkpointed, 1, 64) < activation_bytes(plain, 1, 64)
    assert activation_bytes(plain, 1, 64) < activation_bytes(plain, 2, 64) < activation_bytes(plain, 2, 128)
    assert logits_bytes(plain, 512, 64) < logits_bytes(plain, 512, 128)


def test_float32_masters_and_moments_are_what_the_optimizer_holds(tree, write_config):
    for dtype in ("bfloat16", "float32"):
        config = load_config(write_config(tree), [f"model.dtype={dtype}"])
        held = budget.memory(config, Shapes(tiny_config()), processes=1)
        model = tiny_model(dtype=getattr(torch, dtype))
        optimizer = Optimizer(model, TrainConfig())
        for master in optimizer.masters:
            master.grad = torch.zeros_like(master)
        gradients = sum(master.grad.nbytes for master in optimizer.masters)
        optimizer.step(1e-3)
        states = [x for state in optimizer.adamw.state.values() for x in state.values() if x.ndim]
        own_masters = [m for m, p in zip(optimizer.masters, optimizer.parameters, strict=True) if m is not p]
        assert held.optimizer == sum(x.nbytes for x in [*states, *own_masters])
        assert held.gradients == gradients
        assert held.weights == sum(p.nbytes for p in model.parameters())


def test_each_stage_spreads_one_thing_more(tree, write_config):
    own = Shapes(tiny_config(hidden_size=64, num_hidden_layers=4))

    def memory(*overrides: str) -> budget.Memory:
        path = write_config(tree)
        common = ["model.dtype=bfloat16", "train.sequences_per_step=8"]
        return budget.memory(load_config(path, [*common, *overrides]), own, processes=4)

    stages = [memory(f"distributed.zero_stage={stage}") for stage in range(4)]
    count = sum(p.numel() for p in own.model(settings(False)).parameters())
    assert [stage.optimizer for stage in stages] == [12 * count, 3 * count, 3 * count, 3 * count]
    bucket = 8 * BUCKET
    assert [stage.gradients for stage in stages] == [4 * count, 4 * count + bucket, count + bucket, count + bucket]
    gathered = min(count, GATHERED) * 2
    assert [stage.weights for stage in stages] == [2 * count] * 3 + [-(-2 * count // 4) + gathered]
    offloaded = memory("distributed.zero_stage=3", "distributed.offload=all")
    assert (offloaded.optimizer, offloaded.weights) == (0, gathered)
    assert offloaded.host == 4 * (3 * count + count + -(-2 * count // 4))
    halved = memory("distributed.sequence_parallel=2", "model.activation_checkpointing=true")
    assert halved.activations < memory("model.activation_checkpointing=true").activations


def test_work_counts_live_pairs(tree, write_config):
    config = load_config(write_config(tree), ["pack.variant=intra", "train.steps=5"])
    T = config.pack.sequence_length
    rows = 5 * config.train.sequences_per_step
    counter = FlopCounter.of(shape_of_model(tiny_config(), config.model))
    documents = budget.work(config, Shapes(tiny_config()), document_tokens=32)
    assert documents.exact
    assert documents.tokens == rows * T
    assert documents.flops == rows * counter.flops(T, T, T // 32 * (32 * 33 // 2))
    bound = budget.work(config, Shapes(tiny_config()), document_tokens=None)
    assert not bound.exact
    assert bound.flops == rows * counter.flops(T, T, T * (T + 1) // 2) > documents.flops


# --- the command ------------------------------------------------------------------------------------------------------


def test_7b_at_128k_fits_on_eight_gpus_of_80_gib_in_the_papers_setting(call, seven_billion):
    paper = CONFIGS / "paper" / "llama2-7b-128k-anchor.yaml"
    source = f"model.source={seven_billion}"
    result = call(paper, source, "-n", 8, "--document-tokens", 1060, "--gpu", "A100", "--mfu", 0.4)
    assert result.exit_code == 0, result.output
    assert "\nfits " in result.stdout
    assert "weights   6,738,415,616" in result.stdout
    assert "tokens    2,097,152,000 in 2,000 steps" in result.stdout
    assert "at most" not in result.stdout
    assert "host memory, all processes" in result.stdout

    plain = ["distributed.sequence_parallel=1", "distributed.zero_stage=0", "distributed.offload=none"]
    result = call(paper, source, *plain, "-n", 8)
    assert result.exit_code == 1
    assert "FLOPs     at most" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("change")]
    assert line.endswith("fits")
    overrides = line.removeprefix("change").partition(":")[0].split()
    fitting = call(paper, source, *plain, *overrides, "-n", 8)
    assert fitting.exit_code == 0, "what it says would help does"


def test_what_cannot_fit_says_so(call, tree, write_config):
    result = call(write_config(tree), "-n", 2, "--memory", 1e-6)
    assert result.exit_code == 1
    assert "is still too much: take more or larger GPUs" in result.stdout


def test_time_from_a_measured_run(call, tree, write_config, model_folder, tmp_path):
    run = tmp_path / "measured"
    run.mkdir()
    steps = [{"event": "step", "flops_per_second": 10 / s} for s in (100, 1, 2, 4)]
    (run / "timing.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run / "run.json").write_text(json.dumps({"processes": 2}))
    config = load_config(write_config(tree))
    work = budget.work(config, Shapes(tiny_config()), None)
    # The median of 10, 5 and 2.5 FLOP/s of two processes; here there are four.
    assert budget.seconds_like(work, run, 4) == work.flops / (5 / 2 * 4)
    result = call(write_config(tree), "--measured", run)
    assert result.exit_code == 0
    assert "time      at most" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mfu", "0.4"], "--gpu with --mfu: give one of the three"),
        (["--tokens-per-second", "5", "--gpu", "A100", "--mfu", "0.4"], "give one of the three"),
        (["--gpu", "Abacus", "--mfu", "0.4"], "--gpu 'Abacus': no peak is known"),
        (["--measured", "/no/such/run"], "--measured /no/such/run: holds no run"),
        (["-n", "3"], "train.sequences_per_step 2: no multiple of 3"),
        (
            ["-n", "3", "distributed.sequence_parallel=3"],
            "distributed.sequence_parallel 3: does not divide the model's 4",
        ),
        (["model.source=/no/such/folder"], "no folder with a config.json"),
        (["rope.theta=keep"], f"the model holds {POSITIONS} positions"),
    ],
)
def test_mistakes(call, tree, write_config, arguments, message):
    result = call(write_config(tree), *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "line", ["null", "5", "[1]", "{}", '{"event": "step"}', '{"event": "step", "flops_per_second": "x"}']
)
def test_a_damaged_record_of_speed_is_one_line(call, tree, write_config, tmp_path, line):
    (tmp_path / "timing.jsonl").write_text(f"{line}\n" * 3)
    (tmp_path / "run.json").write_text("{}")
    result = call(write_config(tree), "--measured", tmp_path)
    assert result.exit_code == 2
    (told,) = result.stderr.splitlines()
    assert str(tmp_path) in told


def test_a_config_that_no_model_can_be_built_of_is_one_line(call, tree, write_config, model_folder, tmp_path):
    source = shutil.copytree(model_folder(), tmp_path / "m")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"pad_token_id": 2**31}))
    result = call(write_config(tree), f"model.source={source}")
    assert result.exit_code == 2
    assert "the model cannot be built: Padding_idx must be within" in result.stderr
