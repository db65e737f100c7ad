"""`benchmarks.experiment`: its documents and rows, a whole tiny experiment, and its page."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import Executor, Future
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.experiment import running
from benchmarks.experiment.__main__ import app
from benchmarks.experiment.facts import make_rows, vocabulary, write_documents
from benchmarks.experiment.recall import Measurement
from benchmarks.experiment.running import check_gate, read_results
from benchmarks.experiment.spec import FactsConfig, Run, StageConfig, load_experiment

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "experiments" / "relativity.yaml"
FACTS = FactsConfig(keys=40, values=8, filler=8)
RUN = {
    "model": {"attention": "sdpa"},
    "train": {"steps": 2, "sequences_per_step": 2, "micro_batch": 2, "learning_rate": 1e-3},
    "data": {"held_out_share": 0.1},
    "held_out": {"sequences": 1},
}
TINY = {
    "title": "tiny",
    "model": {"layers": 1, "width": 16, "heads": 2, "inner": 16},
    "facts": FACTS.model_dump(),
    "pretrain": [
        {
            "documents": [20, 40],
            "corpus_tokens": 2000,
            "run": RUN | {"pack": {"sequence_length": tokens, "last": "drop"}, "save": {"every": 0}},
        }
        for tokens in (32, 64)
    ],
    "extend": {
        "documents": [20, 80],
        "full_share": 0.1,
        "corpus_tokens": 4000,
        "run": RUN
        | {"rope": {"type": "ntk"}, "pack": {"sequence_length": 128, "last": "drop"}, "save": {"every": 1, "last": 2}},
    },
    "bases": 1,
    "cells": {"exact": ["intra", "anchor"], "bf16_after": ["intra"]},
    "seeds": 1,
    "gate": {"distances": [24], "recall": 0.0},
    "measure": {"distances": [16, 64], "rows": 2, "queries": 2},
}


def test_a_query_has_one_fact_at_its_distance():
    rows = make_rows(FACTS, 128, [16, 64], 3, 2)
    again = make_rows(FACTS, 128, [16, 64], 3, 2)
    assert np.array_equal(rows.input_ids, again.input_ids)
    for ids, queries, distances in zip(rows.input_ids, rows.queries, rows.distances, strict=True):
        assert sorted(distances) == [16, 16, 64, 64]
        assert ids[0] == 0
        for query, distance in zip(queries, distances, strict=True):
            assert np.flatnonzero(ids == ids[query]).tolist() == [query]
            assert np.flatnonzero(ids == ids[query + 1]).tolist() == [query - distance, query + 1]


def test_documents_are_drawn_alike_and_only_a_fact_gives_an_answer(tmp_path):
    stage = StageConfig.model_validate(TINY["extend"])
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, number in zip(files, (0, 0, 1), strict=True):
        write_documents(FACTS, stage, number, file)
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    lengths = set()
    for line in files[0].read_text().splitlines():
        words = json.loads(line)["text"].split()
        assert set(words) <= set(vocabulary(FACTS))
        lengths.add(len(words))
        facts: dict[str, str] = {}
        for word, after in pairwise(words):
            if word[0] == "k":
                assert after == facts.get(word, "<unk>")
            elif word[0] == "v":
                assert facts.setdefault(word.split(".")[0].replace("v", "k"), word) == word
    assert min(lengths) >= 20
    assert max(lengths) == 127  # a row but for its BOS
    assert max(lengths - {127}) <= 80


def test_runs_differ_in_arithmetic_mask_and_seed_alone(tmp_path):
    experiment = load_experiment(CONFIG)
    runs = list(load_experiment(CONFIG, ["seeds=1"]).runs())
    assert len(runs) == len(set(runs))
    configs = [experiment.extend.config(one, *[tmp_path] * 4).model_dump() for one in runs]
    for one, config in zip(runs, configs, strict=True):
        rounding = {name: config["model"].pop(name) for name in ("round_qk", "round_qk_bits")}
        assert (rounding["round_qk"] == "none") is (one.arithmetic == "exact")
        assert config["pack"].pop("variant") == one.variant
        assert config == configs[0]


class Here(Executor):
    """Runs everything in this process, at once."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


def test_an_experiment_is_run_kept_and_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "ProcessPoolExecutor", lambda *_: Here())
    config, kept = tmp_path / "tiny.yaml", tmp_path / "kept.json"
    config.write_text(json.dumps(TINY))
    options = [str(config), "--out", str(tmp_path / "out"), "--results", str(kept)]
    first = CliRunner().invoke(app, options)
    assert first.exit_code == 0, first.output
    assert "3 of 3 runs are measured." in first.stdout
    measured = json.loads(kept.read_text())["measured"]
    assert set(measured) == {"exact-intra-0", "exact-anchor-0", "bf16_after-intra-0"}
    assert np.array(measured["exact-intra-0"]["recall"]).shape == (2, 2)  # checkpoints, distances
    assert np.array(measured["exact-intra-0"]["nats"]).min() > 0
    again = CliRunner().invoke(app, options)
    assert again.exit_code == 0
    assert "about" not in again.stdout  # nothing is left to run
    other = CliRunner().invoke(app, [*options, "measure.rows=3"])
    assert other.exit_code == 2
    assert "is of an experiment with another measure" in other.stderr


def test_a_seed_is_measured_on_the_bases_of_one_folder(tmp_path):
    """Each folder pretrains its own bases. So a new folder keeps only the seeds that are complete."""
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(TINY))
    experiment = load_experiment(config, ["seeds=2"])
    one = Measurement(recall=[[0.5]], nats=[[1.0]], losses=[1.0], seconds=1.0)
    results = read_results(experiment, tmp_path / "kept.json")
    results.measured = {run.name: one for run in experiment.runs() if run != Run("exact", "anchor", 1)}
    results.save()
    results = read_results(experiment, tmp_path / "kept.json")
    results.forget_unfinished_seeds(experiment)
    assert {run.seed for run in results.of(experiment)} == {0}
    assert len(results.measured) == 3


def test_a_base_that_does_not_recall_ends_it():
    with pytest.raises(SystemExit, match="pretrain longer, or more layers"):
        check_gate(load_experiment(CONFIG), {"bases": [{"recall": [0.9, 1.0]}, {"recall": [0.8]}]})


def test_the_page_is_what_its_measurements_give(tmp_path):
    page, kept = ROOT / "docs" / "training-experiment.md", ROOT / "benchmarks" / "results" / "training-experiment.json"
    copy = Path(shutil.copy(page, tmp_path))
    options = ["--results", str(shutil.copy(kept, tmp_path)), "--document", str(copy)]
    made = CliRunner().invoke(app, [str(CONFIG), "--out", str(tmp_path / "out"), *options])
    assert made.exit_code == 0, made.output
    assert copy.read_text() == page.read_text()
    drawn = Path("figures") / "training-experiment.svg"
    assert (tmp_path / drawn).read_bytes() == (page.parent / drawn).read_bytes()


def test_a_script_with_numpy_and_scipy_alone_recomputes_the_same():
    kept = [ROOT / "benchmarks" / "results" / f"training-experiment{part}.json" for part in ("", "-control", "-cost")]
    command = [sys.executable, str(ROOT / "benchmarks" / "sceptic.py"), *map(str, kept)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    page = (ROOT / "docs" / "training-experiment.md").read_text()
    assert len(lines) == 9
    for line in lines:
        assert line.split(": ", 1)[1] in page, line
