"""Two "nodes": two torchrun agents on this machine, which meet at a rendezvous as those of a cluster do."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from torchtrain.config import load_config
from torchtrain.run.recipe import train
from torchtrain.tests.forks import ROOT
from torchtrain.training.events import read_metrics


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_nodes_share_a_row_and_leave_one_run(tree, write_config, tmp_path):
    """Sequence parallelism across nodes, ZeRO 3 over all of it; one process on one node is what it is held against."""
    path = write_config(tree)
    spread = ("distributed.sequence_parallel=2", "distributed.zero_stage=3", f"run.folder={tmp_path / 'nodes'}")
    short = ("train.steps=2", "held_out.sequences=1")
    endpoint = f"127.0.0.1:{_free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
            + ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "test"]
            + ["-m", "torchtrain", "train", str(path), *short, *spread],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=280) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    # Rank 0 speaks, on whichever node it is.
    assert sum(output.count("Held-out loss") for output, _ in outputs) == 1

    train(load_config(path, [*short, f"run.folder={tmp_path / 'one'}"]), console=Console(quiet=True))
    one, nodes = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "nodes"))
    assert [(event["event"], event["step"]) for event in nodes] == [(event["event"], event["step"]) for event in one]
    for a, b in zip(one, nodes, strict=True):
        for exact in ("tokens_seen", "labelled_tokens", "live_pairs", "flops", "learning_rate"):
            assert a.get(exact) == b.get(exact), exact
    # Until the first update each token's loss is bitwise that of one process; n of them are summed in another order.
    for a, b in zip(one[:2], nodes[:2], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=a["labelled_tokens"] * torch.finfo(torch.float64).eps)
    weights = load_file(tmp_path / "nodes" / "model" / "model.safetensors")
    assert all(torch.isfinite(weight).all() for weight in weights.values())
