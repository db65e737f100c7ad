"""Layouts and how rows are cut, in this process; whole runs and mistakes, as real processes on gloo."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anchorline.errors import UserError
from torchtrain.attention import make_plan
from torchtrain.config import DistributedConfig, load_config
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.distributed.shard import ROOM, assign_held_out, assign_rows, pad, split_documents, split_tokens
from torchtrain.distributed.ulysses import _pass_windows_and_sinks
from torchtrain.distributed.world import World
from torchtrain.run.recipe import train
from torchtrain.tests.forks import ROOT, forks, free_port
from torchtrain.tests.runs import TIME_LIMIT
from torchtrain.tests.tiny import POSITIONS, tiny_config
from torchtrain.training.events import read_metrics


@pytest.fixture
def load(tree, write_config):
    """Return a function from overrides to the config."""
    return lambda *overrides: load_config(write_config(tree), overrides)


# --- whole documents --------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@example(lengths=[4] * 20, anchors=0, ranks=4)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), anchors=st.integers(0, 3), ranks=st.integers(2, 5)
)
def test_documents_are_dealt_out_whole_and_once_and_evenly_or_not_at_all(lengths, anchors, ranks):
    ids = [0] * anchors + [number for number, n in enumerate(lengths, start=1) for _ in range(n)] + [-1, -1]
    token_BT = torch.arange(len(ids))[None]
    batch = {"input_ids": token_BT, "position_ids": token_BT, "shift_labels": token_BT, "domain_ids": token_BT}
    batch = pad(batch | {"document_ids": torch.tensor(ids)[None]}, ranks)
    share = batch["input_ids"].shape[1] / ranks
    parts = [split_documents(batch, World(rank, ranks, ranks)) for rank in range(ranks)]
    if None in parts:
        assert parts == [None] * ranks
        assert len(set(lengths)) > 1 or len(lengths) % ranks or anchors, "as many of one length for each rank"
        return
    seen = [
        dict(zip(*(part[name][0].tolist() for name in ("input_ids", "document_ids")), strict=True)) for part in parts
    ]
    for number, n in enumerate(lengths, start=1):
        assert sorted(list(found.values()).count(number) for found in seen) == [0] * (ranks - 1) + [n]
    assert all(list(found.values()).count(0) == anchors and len(found) <= (1 + ROOM) * share for found in seen)
    labels = [x for part in parts for x in part["shift_labels"].flatten().tolist() if x != -100]
    assert sorted(labels) == [token for token, document in enumerate(ids) if document >= 0]
    assert all(part["input_ids"].diff().gt(0).all() for part in parts), "in the row's order"


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "overrides", "message"),
    [
        (1, ["distributed.sequence_parallel=2"], "distributed.sequence_parallel 2: does not divide 1 process"),
        (4, ["distributed.sequence_parallel=3"], "distributed.sequence_parallel 3: does not divide 4 processes"),
        (4, [], "train.sequences_per_step 2: no multiple of 4 = train.micro_batch 1 x 4 rows at a time"),
        (2, ["train.micro_batch=2"], "train.sequences_per_step 2: no multiple of 4 = train.micro_batch 2 x 2 rows"),
        (
            6,
            ["distributed.sequence_parallel=2"],
            r"no multiple of 3 .*\(6 processes / distributed.sequence_parallel 2\)",
        ),
    ],
)
def test_impossible_layouts(load, processes, overrides, message):
    config = load(*overrides)
    with pytest.raises(UserError, match=message):
        check_layout(config.distributed, config.train, processes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shared", "message"),
    [
        (4, 2, 3, "does not divide the model's 4 attention heads"),
        (12, 4, 6, "the model's 4 key/value heads can neither be divided among nor repeated"),
        (12, 3, 2, "the model's 3 key/value heads can neither"),
        (4, 2, 4, None),
        (4, 2, 2, None),
        (12, 1, 6, None),
    ],
)
def test_heads_that_can_and_cannot_be_dealt_out(heads, kv_heads, shared, message):
    model = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads)
    distributed = DistributedConfig(sequence_parallel=shared)
    if message is None:
        check_heads(distributed, model)
    else:
        with pytest.raises(UserError, match=f"distributed.sequence_parallel {shared}: {message}"):
            check_heads(distributed, model)


WINDOWS = LlamaConfig(sliding_window=8, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)


@pytest.mark.parametrize(
    ("model", "share", "message"),
    [
        (tiny_config("deepseek_v3"), "heads", "deepseek_v3 has keys and values of different sizes"),
        (tiny_config("falcon_h1"), "heads", r"sequence_parallel 2: falcon_h1 has layers that carry a state .*hybrid"),
        (GPT2Config(), "heads", "gpt2 names no num_attention_heads and num_key_value_heads"),
        (WINDOWS, "documents", r"distributed\.share documents: llama has sliding windows"),
    ],
)
def test_models_whose_rows_are_not_shared(model, share, message):
    with pytest.raises(UserError, match=message):
        check_heads(DistributedConfig(sequence_parallel=2, share=share), model)
    check_heads(DistributedConfig(), model)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "shared", "micro_batch"), [(1, 1, 1), (2, 1, 3), (4, 2, 2), (6, 1, 2), (4, 4, 4)])
def test_a_steps_rows_are_dealt_out_once_and_in_turn(size, shared, micro_batch):
    given = [assign_rows(24, 12, micro_batch, World(rank, size, shared)) for rank in range(size)]
    for rank, ranges in enumerate(given):
        assert ranges == given[rank - rank % shared], "ranks that share rows get the same"
        assert {len(numbers) for numbers in ranges} == {micro_batch}
    turns = zip(*given[::shared], strict=True)
    assert [number for turn in turns for numbers in turn for number in numbers] == list(range(24, 36))


def test_held_out_rows_are_made_up_to_whole_turns_without_labels():
    rows = [{"shift_labels": np.array([i, -100]), "input_ids": np.array([i, i])} for i in range(5)]
    dealt = [assign_held_out(rows, 2, World(rank, 2)) for rank in range(2)]
    assert [len(batches) for batches in dealt] == [2, 2]
    labels = {first + i: row["shift_labels"][0] for of in dealt for first, batch in of for i, row in enumerate(batch)}
    assert [labels[i] for i in range(8)] == [0, 1, 2, 3, 4, -100, -100, -100]


@pytest.mark.parametrize("tokens", [8, 9, 10, 11])
def test_parts_of_padded_rows_make_the_rows_and_documents_stay_whole(tokens):
    batch = {"input_ids": torch.arange(2 * tokens).view(2, tokens), "document_ids": torch.ones(2, tokens).long()}
    batch |= {
        "shift_labels": batch["input_ids"] + 1,
        "domain_ids": batch["document_ids"],
        "position_ids": batch["input_ids"],
    }
    padded = pad(batch, 4)
    parts = [split_tokens(padded, World(rank, 4, 4)) for rank in range(4)]
    for name, x in batch.items():
        assert torch.equal(padded[name][:, :tokens], x)
        if name != "document_ids":
            assert torch.equal(torch.cat([part[name] for part in parts], dim=1), padded[name])
            assert all(part[name].is_contiguous() for part in parts)
    assert all(torch.equal(part["document_ids"], padded["document_ids"]) for part in parts)
    assert (padded["document_ids"][:, tokens:] == -1).all()
    assert (padded["shift_labels"][:, tokens:] == -100).all()
    assert (padded["domain_ids"][:, tokens:] == -1).all()


def test_a_rank_gets_the_sinks_of_its_own_heads_and_the_window_of_whole_rows(monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "dealt", lambda *_, **kwargs: given.update(kwargs))
    _pass_windows_and_sinks("dealt", lambda *_, **kwargs: given.update(kwargs, alone=True), ranks=2, rank=1)
    no_mask = {"config": tiny_config(), "q_length": 8, "mask_function": causal_mask_function}
    window = sliding_window_causal_mask_function(12)
    q, sinks = torch.empty(1, 4, 8, 2), torch.arange(4)
    rows, documents = (make_plan(torch.ones(1, tokens, dtype=torch.int64)) for tokens in (16, 8))
    for size, hidden in ((12, 12), (16, None)):  # of 16 tokens, of which a rank has 8
        make = ALL_MASK_ATTENTION_FUNCTIONS["dealt"]
        mask = make(**no_mask | {"mask_function": window, "local_size": size})
        ALL_ATTENTION_FUNCTIONS["dealt"](torch.nn.Module(), q, q, q, mask, plan=rows, s_aux=sinks)
        assert given["row_window"] == hidden
        assert given["s_aux"].tolist() == [2, 3]
    ALL_ATTENTION_FUNCTIONS["dealt"](torch.nn.Module(), q, q, q, None, plan=documents, s_aux=sinks)
    assert (given["alone"], given["s_aux"].tolist()) == (True, [0, 1, 2, 3]), "whole documents: all heads are here"


# --- real processes ---------------------------------------------------------------------------------------------------


def read_masters(run: Path, shapes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The master weights of the last checkpoint, put together of what each rank saved."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(max((run / "checkpoints").iterdir()).glob("state-*.safetensors")):
        for name, part in load_file(path).items():
            kind, start, parameter = name.split(":")
            if kind == "master":
                whole = found.setdefault(parameter, torch.full_like(shapes[parameter], torch.nan, dtype=torch.float32))
                whole.view(-1)[int(start) : int(start) + len(part)] = part
    return found


def lines_of(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("torchtrain:")]


def test_a_run_on_two_processes_leaves_what_a_run_on_one_does(tree, write_config, tmp_path, model_folder):
    """ZeRO 3 and sequence parallelism, bfloat16, layers recomputed but for attention, which has a window and sinks."""
    tree["model"]["source"] = str(model_folder("gpt_oss"))
    kept = "model.activation_checkpointing=keep_attention"
    common = ["model.dtype=bfloat16", kept, "held_out.sequences=1", "train.steps=4"]
    spread = ["distributed.sequence_parallel=2", "distributed.zero_stage=3", f"run.folder={tmp_path / 'two'}"]
    path, log = write_config(tree), tmp_path / "log"
    done = forks().run("train", str(path), *common, *spread, log=log, processes=2)
    said = log.read_text()
    assert done["codes"] == [0, 0], said
    for line in (
        "Held-out loss",
        "loading ",
        "processes 2: 1 rows at a time, each shared by 2, 2 times a step; optimizer state, gradients and weights",
        "training 4/4",
    ):
        assert said.count(line) == 1, line
    for noise in ("Warning", "WARNING", "Traceback"):
        assert noise not in said

    alone = train(load_config(path, [*common, f"run.folder={tmp_path / 'one'}"]), console=Console(quiet=True))
    assert alone is not None
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        for exact in ("event", "step", "tokens_seen", "labelled_tokens", "live_pairs", "flops", "learning_rate"):
            assert a.get(exact) == b.get(exact), exact
        assert a["domains"].keys() == b["domains"].keys()
    assert two[-1]["loss"] < two[0]["loss"] - 0.5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")
    exported = dict(model.named_parameters())
    masters = read_masters(tmp_path / "two", exported)
    assert [name for name, x in exported.items() if not torch.equal(x, masters[name].to(x.dtype))] == []
    assert model.config.max_position_embeddings == 2 * POSITIONS
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2


@pytest.mark.one_of(2)
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_masters_begin_at_the_files_own_precision(tree, write_config, tmp_path, zero_stage):
    """A float32 file is not rounded to the model's bfloat16 first. The steps here are too small to move a weight."""
    tiny = [
        "train.steps=1",
        "train.warmup_steps=0",
        "train.learning_rate=1e-30",
        "model.dtype=bfloat16",
        f"run.folder={tmp_path / 'run'}",
    ]
    config, log = str(write_config(tree)), tmp_path / "log"
    processes = 2 if zero_stage else 1
    done = forks().run("train", config, *tiny, f"distributed.zero_stage={zero_stage}", log=log, processes=processes)
    assert done["codes"] == [0] * processes, log.read_text()
    own = load_file(Path(tree["model"]["source"]) / "model.safetensors")
    assert "masters   begin at the numbers of the weights' files, before they are rounded to" in log.read_text()
    saved, exported = read_masters(tmp_path / "run", own), load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert saved.keys() == own.keys() == exported.keys()
    for name, weight in own.items():
        assert (saved[name] - weight).abs().max() < 1e-20, name  # of a weight that is 0
        assert not torch.equal(weight, weight.bfloat16().float()), name
        assert torch.equal(exported[name], saved[name].bfloat16()), name


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("distributed.sequence_parallel=3", "distributed.sequence_parallel 3: does not divide 2 processes"),
        ("train.step=3", "train.step: unknown key (did you mean train.steps?"),
    ],
)
def test_a_mistake_is_one_line_whichever_rank_finds_it(tree, write_config, tmp_path, mistake, told):
    """A layout that all ranks refuse together, and a config that none can read; torchrun stops who is left."""
    path = write_config(tree)
    codes = forks().run("train", str(path), mistake, log=tmp_path / "log", processes=2, agent=True)["codes"]
    assert codes[0] == 2
    (line,) = lines_of(tmp_path / "log")
    assert told in line
    assert "Traceback (most recent call last)" not in (tmp_path / "log").read_text()
    assert not Path(tree["run"]["folder"]).exists()


# --- two nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_two_nodes_leave_one_run(tree, write_config, tmp_path):
    path, short = write_config(tree), ("train.steps=2", "held_out.sequences=1", f"run.folder={tmp_path / 'nodes'}")
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
            + ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "test"]
            + ["-m", "torchtrain", "train", str(path), *short],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=TIME_LIMIT) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    # Rank 0 speaks, on whichever node it is.
    assert sum(output.count("Held-out loss") for output, _ in outputs) == 1
    events = [(event["event"], event["step"]) for event in read_metrics(tmp_path / "nodes" / "metrics.jsonl")]
    assert events == [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2)]
    assert (tmp_path / "nodes" / "model" / "model.safetensors").is_file()
