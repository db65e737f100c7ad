"""Whole runs where there is a GPU: what its user starts, on as many of them as there are, held against each other,
against the plan, and against a run in float32.

Each is a process of its own, started as a user does. Tiny models, but for the one whose memory is measured.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from anchorline.tolerance import judge
from torchtrain.config import load_config
from torchtrain.planning.budget import count_memory
from torchtrain.planning.memory import Shapes
from torchtrain.tests.forks import ROOT
from torchtrain.tests.runs import STEPS, assert_same, make_place
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer, write_corpus

pytestmark = pytest.mark.gpu

GPUS = max(torch.cuda.device_count(), 1)
SPREAD = {
    "zero1": ["distributed.zero_stage=1"],
    "zero1-offload": ["distributed.zero_stage=1", "distributed.offload=optimizer"],
    "zero2": ["distributed.zero_stage=2"],
    "zero3": ["distributed.zero_stage=3"],
    "zero3-offload": ["distributed.zero_stage=3", "distributed.offload=all"],
}

ADAPTERS_BESIDE = {"sdpa": ["model.attention=sdpa"], "float32": ["model.attention=sdpa", "model.dtype=float32"]}


def start(place, verb, name, *overrides, die=(), processes=1):
    """Run a verb to its end and return its exit code."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "29511"]
    command += ["-m", "torchtrain.tests.launch", *(["--die", *map(str, die)] if die else []), verb]
    folder = place.folder / name
    command += [str(place.config), f"run.folder={folder}"] if verb == "train" else [str(folder)]
    with (place.folder / f"{name}.log").open("a") as log:
        return subprocess.run([*command, *overrides], cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ)).returncode


def train(place, name, *overrides, processes=1):
    """Train, and return the run's folder."""
    assert start(place, "train", name, *overrides, processes=processes) == 0, place.log(name)
    return place.folder / name


def losses(folder: Path) -> np.ndarray:
    """Of each step, and its gradient's norm: float64 [2, steps]."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    return np.array([[step["loss"] for step in steps], [step["gradient_norm"] for step in steps]])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs of bfloat16 by `flash`, rows enough for every GPU; the same bits again where nothing is spread."""
    folder = tmp_path_factory.mktemp("gpu")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    changes = {
        "model": {"attention": "flash", "activation_checkpointing": True},
        "train": {"deterministic": True, "sequences_per_step": 2 * GPUS},
    }
    return make_place(folder, None, folder / "model", write_corpus(folder / "documents.jsonl"), **changes)


@pytest.fixture(scope="module")
def straight(place):
    return train(place, "straight")


@pytest.fixture(scope="module")
def exact(place):
    """The same steps in float32 by `sdpa`, which every run in bfloat16 errs from."""
    return losses(train(place, "float32", "model.dtype=float32", "model.attention=sdpa"))


def assert_errs_no_more(found, straight, exact):
    for kind, mine, truth, reference in zip(("losses", "norms"), found, exact, losses(straight), strict=True):
        verdict = judge(mine, truth, reference, "bfloat16")
        assert verdict.passed, f"{kind}: {verdict}"


@pytest.mark.parametrize(
    ("recomputed", "lora"),
    [(True, None), ("keep_attention", None), (True, {"rank": 16})],
    ids=["every weight", "attention kept", "adapters"],
)
def test_a_run_holds_the_memory_that_plan_says(tmp_path, record_property, recomputed, lora):
    """Of 0.3 G weights at 32K tokens. The allocator's fragments are not counted on either side."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "head_dim": 64}
    config = LlamaConfig(
        vocab_size=32_000,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": "abcdefgh" * 700 + str(i)}) + "\n" for i in range(40)))
    place = make_place(
        tmp_path,
        None,
        tmp_path / "model",
        documents,
        model={"attention": "flash", "activation_checkpointing": recomputed, "lora": lora},
        pack={"sequence_length": 32_768, "variant": "anchor"},
        train={"steps": 3, "sequences_per_step": 2, "learning_rate": 1e-4, "schedule": "constant"},
        data={"sources": [{"files": str(documents)}], "cache": str(tmp_path / "cache"), "held_out_share": 0.1},
        save={"every": 3, "keep": 1, "last": 1},
    )
    folder = train(place, "run")
    lines = (folder / "timing.jsonl").read_text().splitlines()
    measured = max(event.get("memory_gib", 0) for event in map(json.loads, lines))
    planned = count_memory(load_config(place.config), Shapes(config), 1).gpu / 2**30
    record_property("measured_gib", round(measured, 3))
    record_property("planned_gib", round(planned, 3))
    assert planned == pytest.approx(measured, rel=0.05)


def test_a_run_that_is_killed_resumes_with_the_same_bits(place, straight):
    assert start(place, "train", "killed", die=("gradient", 5)) == -signal.SIGKILL, place.log("killed")
    assert start(place, "resume", "killed") == 0, place.log("killed")
    assert_same(place.folder / "killed", straight)


def test_a_run_that_keeps_attention_has_the_same_bits(place, straight):
    kept = train(place, "kept", "model.activation_checkpointing=keep_attention")
    assert np.array_equal(losses(kept), losses(straight))


@pytest.mark.parametrize("engine", ["flash3", "flash4", "cudnn", "flex", "sdpa"])
def test_a_run_by_every_engine(place, straight, exact, engine):
    name = f"engine-{engine}"
    code = start(place, "train", name, f"model.attention={engine}", "train.deterministic=false")
    if code == 2:  # a user's mistake: the engine says what it lacks here
        pytest.skip(place.last_line(name))
    assert code == 0, place.log(name)
    assert_errs_no_more(losses(place.folder / name), straight, exact)


@pytest.mark.parametrize("spread", SPREAD)
def test_a_run_that_is_spread_over_all_gpus(place, straight, exact, spread):
    """With NCCL where there are two or more; Ulysses shares each row by two of them."""
    shared = 2 if GPUS % 2 == 0 else 1
    overrides = [*SPREAD[spread], f"distributed.sequence_parallel={shared}"]
    folder = train(place, spread, *overrides, processes=GPUS)
    assert losses(folder).shape == (2, STEPS)
    assert_errs_no_more(losses(folder), straight, exact)


@pytest.mark.parametrize("spread", [[], ["distributed.zero_stage=2"], ["distributed.zero_stage=3"]])
def test_a_run_of_adapters(place, spread):
    """By `flash` it errs no more than by `sdpa`, from float32."""
    name = "-".join(["adapters", *spread])
    lora = ["model.lora={rank: 4}", *spread]
    others = {kind: train(place, f"{name}-{kind}", *lora, *change) for kind, change in ADAPTERS_BESIDE.items()}
    found = losses(train(place, name, *lora))
    assert (place.folder / name / "model" / "adapter" / "adapter_config.json").is_file()
    assert_errs_no_more(found, others["sdpa"], losses(others["float32"]))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_run_of_replicas(place, straight, exact):
    assert_errs_no_more(losses(train(place, "replicas", processes=GPUS)), straight, exact)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_run_whose_rows_all_gpus_share(place):
    together = (f"distributed.sequence_parallel={GPUS}", "train.sequences_per_step=2")
    shared, alone = train(place, "shared", *together, processes=GPUS), train(place, "alone", together[1])
    exact = losses(train(place, "two", together[1], "model.dtype=float32", "model.attention=sdpa"))
    assert_errs_no_more(losses(shared), alone, exact)
