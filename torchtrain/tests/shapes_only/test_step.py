"""The trainer's own step on shapes: what it holds, against `plan`."""

from pathlib import Path

import pytest

from torchtrain.config import load_config
from torchtrain.planning import budget
from torchtrain.planning.memory import Shapes
from torchtrain.tests.shapes_only import step
from torchtrain.tests.tiny import tiny_config

ROOT = Path(__file__).parents[3]
PAPER, DOCS = {path.stem: path for path in sorted((ROOT / "configs" / "paper").glob("*-*.yaml"))}, ROOT / "docs"


@pytest.fixture
def tiny(tree, write_config, monkeypatch):
    """Return a function from overrides to a config of a tiny model that flash can run."""
    monkeypatch.setattr(step, "model_config", lambda config: tiny_config())
    return lambda *overrides: load_config(write_config(tree), ["model.dtype=bfloat16", *overrides])


# --- at full size -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_plan_of_the_papers_configs_is_what_a_step_on_eight_ranks_holds():
    """By DeepSpeed's own engine and Ulysses; and docs/running.md says both. Its table is printed by
    `python -m torchtrain.tests.shapes_only`, which measures every config.
    """
    name, depths = "llama3-8b-128k-full", (2, 3)  # depths that stand for all layers
    config = step.with_two_micro_batches(load_config(PAPER[name]), 8)
    held, planned = (size / budget.GIB for size in step.at_full_depth(config, 8, depths))
    assert planned == pytest.approx(held, rel=0.02)
    (row,) = [line for line in (DOCS / "running.md").read_text().splitlines() if line.startswith(f"| `{name}`")]
    assert [float(cell) for cell in row.split("|")[2:4]] == [
        pytest.approx(planned, abs=0.06),
        pytest.approx(held, abs=0.06),
    ]


def test_llama3_70b_on_32_ranks_loads_and_steps_as_planned():
    """By the loader that cuts weights up as they are read; a few of its layers, which are all alike."""
    overrides = ["model.source=meta-llama/Meta-Llama-3-70B", "train.sequences_per_step=4"]
    overrides += ["distributed.zero_stage=3", "distributed.offload=none"]
    config, layers = load_config(PAPER["llama3-8b-128k-anchor"], overrides), 2
    found, own = step.measure(config, 32, layers), budget.model_config(config)
    own.num_hidden_layers = layers
    planned = budget.count_memory(config, Shapes(own), 32)
    assert planned.step == pytest.approx(found.peak, rel=0.05)
    assert planned.load == pytest.approx(found.load, rel=0.05)


# Of 3 stages, 2 dtypes and 3 kinds of offload those that differ most; and the last with all that saves memory.
STAGES = [
    (1, "none", "bfloat16", "true", "null", "null"),
    (2, "none", "float32", "true", "null", "null"),
    (2, "optimizer", "bfloat16", "keep_attention", "null", "null"),
    (3, "all", "bfloat16", "offload", "1024", "null"),
    (2, "none", "float32", "true", "null", "{rank: 16}"),
    (3, "none", "bfloat16", "true", "null", "{also_train: [norm]}"),
]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("stage", "offload", "dtype", "recomputed", "chunk", "lora"), STAGES)
def test_plan_of_each_stage_is_what_deepspeed_holds(tiny, monkeypatch, stage, offload, dtype, recomputed, chunk, lora):
    """A model with a head that is larger than a bucket, on eight ranks that have rows of their own.

    The fifth rank's part begins with layers and ends in the head. ZeRO 2 in float32 keeps the whole head there. ZeRO 3
    spreads every weight alike, so the first rank stands for all.
    """
    rank = 0 if stage == 3 else 4
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 64_000, "head_dim": 128}
    own = tiny_config(**sizes, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)
    monkeypatch.setattr(step, "model_config", lambda config: own)
    config = tiny(
        f"model.dtype={dtype}",
        f"model.activation_checkpointing={recomputed}",
        f"model.layer_chunk={chunk}",
        f"model.lora={lora}",
        "pack.sequence_length=4096",
        "train.loss_chunk=1024",
        "train.sequences_per_step=16",
        f"distributed.zero_stage={stage}",
        f"distributed.offload={offload}",
    )
    planned, held = budget.count_memory(config, Shapes(own), 8).gpu, step.measure(config, 8, rank=rank).peak
    assert planned == pytest.approx(held, rel=0.05)
