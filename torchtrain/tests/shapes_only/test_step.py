"""The trainer's own step on shapes: where the host waits for the device, and what it holds, against `plan`."""

import inspect
from collections import Counter
from pathlib import Path

import pytest
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle

from torchtrain.config import load_config
from torchtrain.distributed import zero
from torchtrain.distributed.shard import split_tokens
from torchtrain.planning import budget
from torchtrain.planning.memory import Shapes
from torchtrain.tests.shapes_only import step
from torchtrain.tests.shapes_only.device import ShapesOnly
from torchtrain.tests.tiny import tiny_config
from torchtrain.training import strategy as strategies
from torchtrain.training.losses import Losses
from torchtrain.training.step import accumulate, make_micro_batches

ROOT = Path(__file__).parents[3]
PAPER, DOCS = {path.stem: path for path in sorted((ROOT / "configs" / "paper").glob("*-*.yaml"))}, ROOT / "docs"


@pytest.fixture
def tiny(tree, write_config, monkeypatch):
    """Return a function from overrides to a config of a tiny model that flash can run."""
    monkeypatch.setattr(step, "model_config", lambda config: tiny_config())
    return lambda *overrides: load_config(write_config(tree), ["model.dtype=bfloat16", *overrides])


# What a step of one rank says that it waits for: its losses, and its gradient's norm with them.
SAID = {("copy to the host", "training/losses.py", "read"): 1}


def waits(found: step.Measured) -> dict[tuple[str, str, str], int]:
    return {(what, place.file, place.function): count for (what, place), count in found.waits.items()}


@pytest.mark.parametrize(
    "overrides",
    [
        ["pack.variant=anchor", "train.sequences_per_step=3"],
        ["pack.variant=intra_reset", "train.micro_batch=2"],
        ["pack.variant=full+interleave", "model.activation_checkpointing=true"],
        ["model.activation_checkpointing=keep_attention"],
        ["model.activation_checkpointing=offload", "model.layer_chunk=50"],
        ["model.dtype=float32", "rope.type=yarn", "rope.theta=keep", "train.clip_norm=null"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_a_step_waits_for_the_device_where_it_says_so_and_nowhere_else(tiny, overrides):
    assert waits(step.measure(tiny(*overrides), 1)) == SAID


MISTAKES = {
    "an item": lambda losses_n: losses_n * losses_n.sum().item(),
    "a boolean index": lambda losses_n: losses_n[losses_n > 0],
    "a copy to the host": lambda losses_n: losses_n.cpu().to(losses_n.device),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_misplaced_wait_is_seen_once_a_micro_batch(tiny, monkeypatch, name):
    real = strategies.chunked_cross_entropy

    def waiting(*args, **how):
        total, each = real(*args, **how)
        MISTAKES[name](each.flatten())
        return total, each

    monkeypatch.setattr(strategies, "chunked_cross_entropy", waiting)
    found = waits(step.measure(tiny("train.sequences_per_step=3"), 1))
    assert {count for place, count in found.items() if place not in SAID} == {3}


def test_a_tensor_that_stayed_on_the_host_is_refused(tiny, monkeypatch):
    def left_behind(self, part):
        labels = real(self, part)
        monkeypatch.setattr(type(labels), "to", lambda self, *_, **__: self)
        return labels

    real = Losses.labels_of
    monkeypatch.setattr(Losses, "labels_of", left_behind)
    with pytest.raises(RuntimeError, match="same device"):
        step.measure(tiny(), 1)


def test_rows_are_full_and_cut_among_the_ranks_that_share_them(tiny):
    config = tiny("distributed.sequence_parallel=2", "pack.sequence_length=4096", "train.sequences_per_step=4")
    with step.rank_of(config, 4, rank=3) as world:
        rows = step.batches(config, world)
        assert len(rows) == 2
        assert (rows[0]["document_ids"] >= 0).all()
        assert split_tokens(rows[0], world)["input_ids"].shape == (1, 2048)


def test_ranks_with_whole_documents_exchange_nothing_and_wait_for_nothing_more(tiny):
    shared = ["distributed.sequence_parallel=2", "pack.sequence_length=8192"]
    of = {share: step.measure(tiny(*shared, f"distributed.share={share}"), 2) for share in ("heads", "documents")}
    assert waits(of["documents"]) == waits(of["heads"])


@pytest.mark.parametrize("part", ["head", "mlp"])
def test_zero_3_gathers_the_head_once_a_micro_batch_however_many_chunks_the_loss_has(tiny, monkeypatch, part):
    """But for the first of all, whose order of modules DeepSpeed does not know yet: there once each way. And an MLP in
    chunks once each way, by the pass and not by the chunk.
    """
    own = tiny_config(hidden_size=128, vocab_size=4096, intermediate_size=2048, tie_word_embeddings=False)
    monkeypatch.setattr(step, "model_config", lambda config: own)
    monkeypatch.setattr(zero, "GATHERED", own.hidden_size * own.vocab_size // 2)  # the head alone is over the limit
    config = tiny(
        "distributed.zero_stage=3", "train.sequences_per_step=16", "train.loss_chunk=16", "model.layer_chunk=16"
    )
    gathered: Counter[int] = Counter()
    for handle, name in ((AllGatherHandle, "param"), (AllGatherCoalescedHandle, "params")):

        def note(self, *args, real=handle.__init__, name=name, **kwargs):
            found = inspect.signature(real).bind(self, *args, **kwargs).arguments[name]
            gathered.update(id(x) for x in (found if isinstance(found, list) else [found]))
            real(self, *args, **kwargs)

        monkeypatch.setattr(handle, "__init__", note)
    with step.rank_of(config, 8) as world, ShapesOnly() as watch:
        strategy = step.make(config, world, watch)
        rows = make_micro_batches(step.batches(config, world), step.DOMAINS, world)
        mlp = strategy.model.model.layers[0].mlp
        asked = id((strategy.model.get_output_embeddings() if part == "head" else mlp.up_proj).weight)
        counts = []
        for _ in range(2):
            gathered.clear()
            accumulate(strategy, rows, step.DOMAINS, config.train.loss_chunk)
            counts.append(gathered[asked])
            strategy.step(config.train.learning_rate)
        strategy.deepspeed.destroy()
    assert len(rows) == 2
    assert counts == ([3, 2] if part == "head" else [4, 4])


# --- at full size -----------------------------------------------------------------------------------------------------


# Each model and each layout of the paper's configs, and depths of it that stand for all layers.
AT_FULL_SIZE = {
    "llama2-7b-32k-rope_default_1e9": (2, 3),
    "llama2-7b-64k-anchor": step.FEW,
    "llama2-7b-128k-anchor": (2, 3),
    "llama3-8b-128k-full": (2, 3),
    "qwen1.5-1.8b-128k-anchor": (2, 3),
}


@pytest.mark.parametrize("name", AT_FULL_SIZE)
def test_plan_of_the_papers_configs_is_what_a_step_on_eight_ranks_holds(name):
    """By DeepSpeed's own engine and Ulysses; and docs/running.md says both. Its table is printed by
    `python -m torchtrain.tests.shapes_only`, which measures every config.
    """
    config = step.with_two_micro_batches(load_config(PAPER[name]), 8)
    held, planned = (size / budget.GIB for size in step.at_full_depth(config, 8, AT_FULL_SIZE[name]))
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
    (1, "none", "bfloat16", "true", "null", "{rank: 64}"),
    (2, "none", "float32", "true", "null", "{rank: 16}"),
    (2, "optimizer", "bfloat16", "true", "null", "{also_train: [embed_tokens]}"),
    (3, "none", "bfloat16", "true", "null", "{also_train: [norm]}"),
    (3, "all", "bfloat16", "offload", "1024", "{rank: 64}"),
]


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
