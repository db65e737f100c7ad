"""`torchtrain plan`: what is counted is what is held, and the verdict, the bounds and the remedies follow from it."""

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from gguf import GGUFReader
from hypothesis import assume, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.config import load_config
from torchtrain.distributed.layout import check_layout
from torchtrain.modeling.smollm2 import gguf_file
from torchtrain.modeling.source import PUBLISHED, published_models, resolve_source
from torchtrain.planning import budget
from torchtrain.planning.memory import Shapes
from torchtrain.planning.work import Documents, count_work, read_documents, weighted_length
from torchtrain.tests.data_fixtures import memory_store
from torchtrain.tests.shapes_only import step
from torchtrain.tests.tiny import POSITIONS, tiny_config, tiny_settings

CONFIGS = Path(__file__).parents[2] / "configs"
# A hundred million weights: more than a bucket, so that what ZeRO spreads is worth its buckets.
LARGE = Shapes(tiny_config(hidden_size=512, intermediate_size=2048, vocab_size=150_000, head_dim=128))


@pytest.fixture
def call():
    return lambda *arguments: CliRunner().invoke(app, ["plan", *map(str, arguments)])


# --- what is counted --------------------------------------------------------------------------------------------------


@pytest.fixture
def config_of(tree, write_config):
    """Return a function from overrides to a config of a tiny model in bfloat16."""
    return lambda *overrides: load_config(write_config(tree), ["model.dtype=bfloat16", *overrides])


CHECKPOINTING = "model.activation_checkpointing=true"


@pytest.mark.parametrize(
    ("dtype", "rotation", "micro_batches", "checkpointing", "chunk", "lora"),
    [
        ("bfloat16", "model", 1, False, "null", "null"),
        ("bfloat16", "float32", 1, True, "null", "null"),
        ("float32", "model", 2, "offload", 100, "null"),
        ("bfloat16", "model", 1, False, "null", "{rank: 8}"),
        ("float32", "model", 2, True, "null", "{target_modules: [q_proj, v_proj], also_train: [norm]}"),
        ("bfloat16", "model", 2, "offload", 100, "{rank: 8, also_train: [embed_tokens]}"),
    ],
)
def test_plan_is_what_the_step_holds(
    config_of, monkeypatch, dtype, rotation, micro_batches, checkpointing, chunk, lora
):
    """A tiny model on one rank: the trainer's own step on the device of shapes, with the attention of flash."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64, "vocab_size": 1024}
    own = tiny_config(**sizes)
    monkeypatch.setattr(step, "model_config", lambda config: own)
    config = config_of(
        f"model.dtype={dtype}",
        f"model.rotation={rotation}",
        f"model.activation_checkpointing={str(checkpointing).lower()}",
        f"model.layer_chunk={chunk}",
        f"model.lora={lora}",
        f"train.sequences_per_step={micro_batches}",
        "pack.sequence_length=512",
        "train.loss_chunk=128",
    )
    planned, held = budget.count_memory(config, Shapes(own), 1).gpu, step.measure(config, 1).peak
    assert abs(planned / held - 1) < 0.01


def test_documents_that_are_packed_end_to_end_have_the_live_pairs_that_are_counted():
    """Against the packer, for documents shorter and longer than a row."""
    random = np.random.default_rng(0)
    for mean in (60, 300, 2000):
        lengths = np.maximum(1, random.lognormal(0, 1.2, 4000) * mean).astype(np.int64)
        T = 1024
        ends = np.cumsum(lengths)
        cuts = np.unique(np.concatenate([ends, np.arange(T, ends[-1], T)]))
        pieces = np.diff(cuts, prepend=0)
        pairs = (pieces * (pieces + 1) // 2).sum() / (ends[-1] / T)
        assert Documents(weighted_length(lengths, T), "").live_pairs(T, anchor=0) == pytest.approx(pairs, rel=0.01)


def test_the_papers_data_leaves_as_many_pairs_as_its_statistics_say():
    config = load_config(CONFIGS / "paper" / "llama2-7b-64k-intra.yaml")
    model = Shapes(budget.model_config(config)).model(config.model)
    work = count_work(config, model, read_documents(config.data.prepared, config.pack.sequence_length))
    assert work.live_share == pytest.approx(0.054, rel=0.01)
    full = count_work(config, model, Documents(None, ""))
    assert (full.live_share, work.flops < 0.7 * full.flops) == (1.0, True)


def test_lengths_come_from_the_prepared_store(tmp_path, monkeypatch):
    (tmp_path / "store.json").touch()
    monkeypatch.setattr("torchtrain.data.store.TokenStore.open", lambda _: memory_store([100, 20]))
    found = read_documents(str(tmp_path), 128)
    assert found.weighted == weighted_length(np.array([100, 20]), 128)
    assert str(tmp_path) in found.source
    assert read_documents(None, 128).weighted is None


# --- the command ------------------------------------------------------------------------------------------------------


def test_7b_at_128k_fits_on_eight_gpus_of_80_gib_in_the_papers_setting(call):
    paper = CONFIGS / "paper" / "llama2-7b-128k-anchor.yaml"
    result = call(paper, "-n", 8, "--gpu", "A100", "--mfu", 0.4)
    assert result.exit_code == 0, result.output
    assert "\nfits " in result.stdout
    assert "weights   6,738,415,616" in result.stdout
    assert "the shapes of meta-llama/Llama-2-7b-hf come with torchtrain" in result.stdout
    assert "tokens    2,097,152,000 in 2,000 steps" in result.stdout
    assert "attention 3.6% of a row's pairs are live (the paper's statistics of slimpajama-128k" in result.stdout
    assert "reserve: CUDA context, NCCL" in result.stdout
    assert "host memory, all processes, while training" in result.stdout
    gib = 6_738_415_616 / 2**30  # a byte for each weight
    said = f"{12 * gib:.1f} GiB each, after step 100, 200 ... 2,000"
    assert f"saves     20 checkpoints of {said}" in result.stdout
    assert f"models    5 of {2 * gib:.1f} GiB each" in result.stdout
    written, most = (20 * 12 + 5 * 2) * gib, (3 * 12 + 5 * 2) * gib
    assert f"disk      {written:,.1f} GiB written in all, up to {most:.1f} GiB there at a time" in result.stdout


@settings_of_hypothesis(max_examples=10)
@given(
    processes=st.sampled_from([1, 2, 4, 6, 8]),
    stage=st.integers(0, 3),
    checkpointing=st.sampled_from([False, "keep_attention", True]),
    micro_batch=st.sampled_from([1, 2, 4]),
    shared=st.sampled_from([1, 2]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    share=st.floats(0.01, 1),
)
def test_what_is_proposed_is_a_config(
    tmp_path_factory, processes, stage, checkpointing, micro_batch, shared, dtype, share
):
    """Whatever is asked for, the overrides are taken by `load_config`, and give the memory that was promised."""
    given_ = {
        "model.dtype": dtype,
        "model.activation_checkpointing": str(checkpointing).lower(),
        "train.micro_batch": micro_batch,
        "train.sequences_per_step": 24,
        "distributed.zero_stage": stage,
        "distributed.sequence_parallel": shared,
    }
    path = tmp_path_factory.getbasetemp() / "proposed.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(path.parent, path.parent, path)))
    overrides = [f"{name}={value}" for name, value in given_.items()]
    config = load_config(path, overrides)
    try:
        check_layout(config.distributed, config.train, processes)
    except UserError:
        assume(False)
    before = budget.count_memory(config, LARGE, processes).gpu
    changes, after = budget.propose(config, LARGE, processes, int(before * share) + budget.RESERVE)
    changed = load_config(path, [*overrides, *changes])
    check_layout(changed.distributed, changed.train, processes)
    assert budget.count_memory(changed, LARGE, processes) == after
    # What fits may become faster with the same memory.
    assert after.gpu < before or not changes or (share == 1 and after.gpu == before)


def test_adapters_alone_are_what_is_trained(call):
    """Of Llama-2-7B in the paper's setting: rank r takes r x (inputs + outputs) of each of 7 x 32 linear layers."""
    paper = CONFIGS / "paper" / "llama2-7b-128k-anchor.yaml"
    told = call(paper, "-n", 8, "model.lora={rank: 16}").stdout
    trained = 16 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert f"weights   {6_738_415_616 + trained:,}, {trained:,} of them trained" in told
    assert f"saves     20 checkpoints of {12 * trained / 2**30:.1f} GiB each" in told


@pytest.mark.sweep  # ten seconds of shapes
def test_chunks_and_inputs_on_the_host_are_proposed_where_nothing_else_fits(tmp_path):
    """A long row on one GPU, of a model whose weights are less than a bucket: what ZeRO spreads gives no room."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path, tmp_path, path)))
    given_ = [
        "model.dtype=bfloat16",
        "train.sequences_per_step=1",
        "pack.sequence_length=65536",
        "train.loss_chunk=8192",
    ]
    config = load_config(path, given_)
    chunk, offload = f"model.layer_chunk={budget.LAYER_CHUNK}", "model.activation_checkpointing=offload"
    shapes = Shapes(tiny_config(hidden_size=64, intermediate_size=2048, num_hidden_layers=24))

    def held(*overrides: str) -> int:
        return budget.count_memory(load_config(path, [*given_, CHECKPOINTING, *overrides]), shapes, 1).gpu

    everything, without = held(chunk, offload), min(held(), held(chunk), held(offload))
    assert everything < 0.8 * without
    limit = int(0.95 * without) + budget.RESERVE
    changes, memory = budget.propose(config, shapes, 1, limit)
    assert {chunk, offload} <= set(changes)
    assert memory.gpu == budget.count_memory(load_config(path, [*given_, *changes]), shapes, 1).gpu <= limit


def test_what_fits_is_told_the_fastest_that_does(call, tree, write_config):
    slow = ("-n", 2, "distributed.zero_stage=3", "distributed.offload=all", CHECKPOINTING)
    told = call(write_config(tree), *slow).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("fastest")]
    offered = "distributed.offload=none distributed.zero_stage=0 model.activation_checkpointing=false: "
    assert line.startswith(f"fastest   {offered}")
    assert "\nfastest   as it is\n" in call(write_config(tree)).stdout


PAPER = {load_config(path).model.source: path for path in sorted((CONFIGS / "paper").glob("*-*.yaml"))}


@pytest.mark.parametrize("path", PAPER.values(), ids=lambda path: path.stem)
def test_the_model_of_every_paper_config_needs_nobody(path, monkeypatch):
    """Its shape comes with the package, with as many weights as its makers' files hold."""
    monkeypatch.setattr("anchorline.hub.find_model", lambda *_, **__: pytest.fail("the hub was asked"))
    config = load_config(path)
    shapes = Shapes(budget.model_config(config))
    weights = sum(p.numel() for p in shapes.model(config.model).parameters())
    assert weights == published_models()[config.model.source]


def test_the_demo_is_planned_without_a_conversion(tmp_path, monkeypatch):
    """Its shape stands beside the paper's models', and is the one that the package's file tells."""
    monkeypatch.setattr("torchtrain.modeling.source.smollm2_folder", lambda *_: pytest.fail("smollm2 was converted"))
    config = load_config(CONFIGS / "demo.yaml", [f"data.cache={tmp_path}"])
    weights = sum(p.numel() for p in Shapes(budget.model_config(config)).model(config.model).parameters())
    shape = json.loads((PUBLISHED / "smollm2" / "config.json").read_text())
    file = GGUFReader(gguf_file())
    assert weights == published_models()["smollm2"] == sum(int(tensor.n_elements) for tensor in file.tensors)
    for told, name in {
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "context_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
    }.items():
        assert file.fields[f"llama.{told}"].contents() == shape[name], name


@pytest.mark.parametrize("source", ["smollm2", "Qwen/Qwen1.5-1.8B"])
def test_published_shapes_stand_for_no_tokenizer(source, tmp_path, monkeypatch):
    """They have none: whoever opens one asks the hub, or converts."""
    monkeypatch.setattr("torchtrain.modeling.source.smollm2_folder", lambda *_: "converted")
    monkeypatch.setattr("anchorline.hub.find_model", lambda *_, **__: tmp_path)
    assert resolve_source(source, tmp_path, needs="config") == str(PUBLISHED / source)
    assert resolve_source(source, tmp_path, needs="tokenizer") in ("converted", str(tmp_path))


def test_a_folder_goes_before_a_published_model_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen1.5-1.8B"
    assert resolve_source(name, tmp_path, needs="config") == str(PUBLISHED / name)
    tiny_config().save_pretrained(tmp_path / name)
    assert resolve_source(name, tmp_path, needs="config") == name


def test_published_shapes_are_packaged_and_all_are_listed():
    there = {str(path.parent.relative_to(PUBLISHED)) for path in PUBLISHED.rglob("config.json")}
    assert there == set(published_models())
    packaged = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = packaged["torchtrain.modeling"]
    files = [path.relative_to(PUBLISHED.parent) for path in PUBLISHED.rglob("*") if path.is_file()]
    assert all(any(file.match(pattern) for pattern in patterns) for file in files)


def test_hosts_that_hold_too_little_are_named_with_when(call, tree, write_config):
    fits = call(write_config(tree), "--host-memory", 1)
    assert (fits.exit_code, "hosts" in fits.stdout) == (0, False)
    small = (write_config(tree), "--host-memory", 1e-6)
    loads = call(*small, "save.asynchronous=false")
    assert loads.exit_code == 1
    assert "GiB while it loads, more than --host-memory" in loads.stdout
    assert "while it trains" in call(*small).stdout, "with the copy that a save beside the steps is written from"
    offloaded = ["distributed.zero_stage=2", "distributed.offload=optimizer", "save.asynchronous=false"]
    assert "while it trains" in call(*small, *offloaded).stdout


def test_what_cannot_fit_says_so(call, tree, write_config):
    result = call(write_config(tree), "-n", 2, "--memory", 1e-6, "--document-tokens", 4, "pack.variant=intra")
    assert result.exit_code == 1
    assert "of a row's pairs are live (--document-tokens)" in result.stdout
    assert "is still too much: take more or larger GPUs" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mfu", "0.4"], "--gpu, --mfu: give both, or neither"),
        (["--gpu", "A100"], "--gpu, --mfu: give both, or neither"),
        (["--gpu", "Abacus", "--mfu", "0.4"], "--gpu 'Abacus': no peak is known"),
        (["train={epochs: 2}"], "train.epochs 2: a plan packs no documents, so it takes steps"),
        (["-n", "3"], "train.sequences_per_step 2: no multiple of 3"),
        (["model.source=/no/such/folder"], "no folder with a config.json"),
        (["rope.theta=keep"], f"the model holds {POSITIONS} positions"),
    ],
)
def test_mistakes(call, tree, write_config, arguments, message):
    result = call(write_config(tree), *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


def test_a_config_that_no_model_can_be_built_of_is_one_line(call, tree, write_config, model_folder, tmp_path):
    source = shutil.copytree(model_folder(), tmp_path / "m")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"pad_token_id": 2**31}))
    result = call(write_config(tree), f"model.source={source}")
    assert result.exit_code == 2
    assert "the model cannot be built: Padding_idx must be within" in result.stderr


def test_a_plan_for_a_cpu_counts_nothing_for_cuda(call, tree, write_config):
    """A run that fits a small machine, and one that does not fit; what is proposed is counted alike."""
    config = write_config(tree)
    on_gpu, on_cpu = call(config, "--memory", 2), call(config, "--memory", 2, "--cpu")
    assert on_gpu.exit_code == 1
    assert "reserve: CUDA" in on_gpu.stdout
    assert on_cpu.exit_code == 0
    assert "Memory of each process (1 of 2 GiB)" in on_cpu.stdout
    assert "CUDA" not in on_cpu.stdout
    assert "host memory" not in on_cpu.stdout
    small = call(config, "--memory", 1e-4, "--cpu")
    assert small.exit_code == 1
    assert "too much" in small.stdout
    for option in (("--gpu", "A100"), ("--host-memory", 2)):
        assert "--cpu: there is no GPU" in call(config, "--cpu", *option).stderr


@pytest.mark.one_of(3)
@pytest.mark.parametrize("processes", [2, 1, 4])
def test_what_is_proposed_for_a_cpu_moves_nothing_to_the_host(tmp_path, processes):
    """The host is where it is already."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(tmp_path, tmp_path, path)))
    config = load_config(path, ["train.sequences_per_step=4"])
    shapes = Shapes(tiny_config(hidden_size=64, intermediate_size=2048, num_hidden_layers=24))
    before = budget.count_memory(config, shapes, processes).of_process(processes, True)
    changes, after = budget.propose(config, shapes, processes, int(0.6 * before), cpu=True)
    assert after.of_process(processes, True) <= before
    assert not any("offload" in change for change in changes)
