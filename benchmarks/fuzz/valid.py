"""The valid files that every input starts from."""

import json
import os
from pathlib import Path

import yaml

from benchmarks.fuzz.inputs import Input
from benchmarks.fuzz.runner import run

SECONDS = 1200.0  # for a command that makes some of them
GATE = """
title: t
seeds: [0]
matrix: [{model: llama, tokens: 48, dtype: float32, stages: [forward]}]
"""
STUDY = """
title: t
model: {source: model}
text: {source: text.jsonl}
lengths: {contestants: [{condition: flash_bf16}], lengths: [8], sequences: 1, columns: [0]}
"""
TRAIN = """
run: {folder: run, seed: 3}
model: {source: model, dtype: float32, attention: sdpa}
rope: {type: keep, theta: 50000.0}
data:
  sources: [{files: text.jsonl, domain_field: domain, max_documents: 40}]
  cache: cache
  held_out_share: 0.2
  min_tokens: 1
  bad_record_share: 0.1
pack: {sequence_length: 32, variant: anchor, anchor: auto, chunks: 2}
train: {steps: 1, sequences_per_step: 1, micro_batch: 1, learning_rate: 0.01, loss_chunk: 16, betas: [0.9, 0.95]}
distributed: {sequence_parallel: 1, zero_stage: 0, offload: none}
held_out: {sequences: 1}
save: {every: 1, keep: 2}
"""


def make_files(folder: Path, kinds: set[str]) -> None:
    """Make a model, text and configurations; a run with checkpoints and tokens, an Orbax folder where a kind needs
    it."""
    from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

    tiny_model(num_hidden_layers=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    lines = [{"text": f"{n} " + "abcdefgh " * (n % 5 + 1), "domain": "ab"[n % 2], "meta": {"id": n}} for n in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("config.yaml", TRAIN), ("gate.yaml", GATE), ("study.yaml", STUDY)):
        (folder / name).write_text(yaml.safe_dump(yaml.safe_load(text), sort_keys=False))
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    if "records" in kinds:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), folder / "text.parquet")
    if "convert" in kinds:
        _make(folder, "jaxref", "convert", "model", "orbax")
    if kinds & {"store", "run", "checkpoint"}:
        _make(folder, "torchtrain", "train", "config.yaml", "train.steps=3", "save.last=2")


def _make(folder: Path, command: str, *arguments: str) -> None:
    ended = run(Input(command, list(arguments)), folder, SECONDS)
    assert ended.good, ended.said
