"""`benchmarks.experiment`: its documents and rows, a whole tiny experiment, its page, and what recomputes it."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import Executor, Future
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from anchorline import settings
from anchorline.errors import UserError
from benchmarks.experiment import running
from benchmarks.experiment.__main__ import app
from benchmarks.experiment.documents import draw_keys, make_rows, with_bos, write_documents
from benchmarks.experiment.recall import Answers, Measurement, load, noise_of, scores_of, sink_of
from benchmarks.experiment.running import Results, write_beginning
from benchmarks.experiment.spec import FactsConfig, Run, TrainingExperiment, load_experiment
from benchmarks.experiment.words import vocabulary
from torchtrain.data.dataset import PackedRows, split_documents
from torchtrain.data.store import Documents

NOISE = {f"bits2_{place}{what}": 0.1 for what in ("", " probabilities") for place in ("before", "after")}
ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "experiments").glob("*.yaml"))
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "training-experiment.md"
RUN = {
    "model": {"attention": "sdpa"},
    "train": {"steps": 2, "sequences_per_step": 2, "micro_batch": 2, "learning_rate": 1e-3},
    "data": {"held_out_share": 0.1},
    "held_out": {"sequences": 1},
}
OFFSETS = {"kind": "offsets", "filler": 8, "distances": [2, 16], "spread": 2, "question_share": 0.3}
TINY = {
    "title": "tiny",
    "model": {"layers": 1, "width": 16, "heads": 2, "head_size": 8, "inner": 16},
    "task": {"kind": "facts", "keys": 80, "keys_each": 8, "values": 2, "filler": 8},
    "pretrain": [
        {
            "documents": [20, 40],
            "corpus_tokens": 2000,
            "run": RUN | {"pack": {"sequence_length": 64, "last": "drop"}, "save": {"every": 0}},
        }
    ],
    "extend": {
        "documents": [20, 80],
        "full_share": 0.1,
        "corpus_tokens": 4000,
        "run": RUN | {"pack": {"sequence_length": 128, "strategy": "best_fit"}, "save": {"every": 1, "last": 2}},
    },
    "cells": {"exact": ["intra", "intra+bos"], "bits7_after": ["anchor+tag"]},
    "seeds": 2,
    "gate": {"distances": [16], "nats": 100.0},
    "measure": {"distances": [16, 64], "rows": 2, "queries": 2},
    "noise": [2],
    "contrasts": [{"question": "BOS?", "plus": ["exact/intra+bos"], "minus": ["exact/intra"]}],
}


def experiment_of(**changed) -> TrainingExperiment:
    return settings.validate(TrainingExperiment, TINY | changed, "tiny")


def test_a_question_about_a_key_has_one_fact_at_its_distance():
    rows, again = (make_rows(experiment_of(), 128, [16, 64], 3) for _ in range(2))
    assert np.array_equal(rows.input_ids, again.input_ids)
    assert rows.distance.tolist() == [16] * 6 + [64] * 6
    for row, place, distance, (answer,) in zip(rows.row, rows.place, rows.distance, rows.answers, strict=True):
        ids = rows.input_ids[row]
        assert ids[0] == 0
        assert np.flatnonzero(ids == ids[place]).tolist() == [place]
        assert np.flatnonzero(ids == answer).tolist() == [place + 1 - distance, place + 1]
    other = rows.without_bos()
    assert (other.input_ids[:, 0] != 0).all()
    assert np.array_equal(other.input_ids[:, 1:], rows.input_ids[:, 1:])


def test_a_question_about_a_distance_is_answered_by_what_stood_there():
    experiment = experiment_of(task=OFFSETS)
    rows, words = make_rows(experiment, 128, [2, 16], 3), vocabulary(experiment.task)
    for row, place, distance, answers in zip(rows.row, rows.place, rows.distance, rows.answers, strict=True):
        ids = rows.input_ids[row]
        assert words[ids[place]] == f"back{distance}"
        near, far = ids[place + 1 - distance], ids[place - distance]
        assert sorted(answers) == sorted([near, far])
        assert ids[place + 1] in answers
        assert all(words[of].startswith("f") for of in answers)
    assert min(rows.place) >= 128 // 2
    for distance in (2, 16):
        assert len(set(rows.row[rows.distance == distance])) == 3


def test_documents_are_drawn_alike_with_bos_or_without_and_only_a_fact_gives_an_answer(tmp_path):
    experiment = experiment_of()
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, key in zip(files, ([0], [0], [1]), strict=True):
        write_documents(experiment.task, experiment.extend, key, file, None)
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    lengths, first = set(), with_bos(files[0]).read_text().splitlines()
    for line, other in zip(files[0].read_text().splitlines(), first, strict=True):
        words, opened = json.loads(line)["text"].split(), json.loads(other)["text"].split()
        assert (opened[0], opened[1:]) == ("<s>", words[1:])
        assert words[0].startswith("f")
        assert set(words) <= set(vocabulary(experiment.task))
        lengths.add(len(words))
        known: dict[str, str] = {}
        for word, after in pairwise(words):
            if word[0] == "k":
                assert after == known.get(word, "<unk>")
            elif word[0] == "v":
                assert known.setdefault(word.split(".")[0].replace("v", "k"), word) == word
    assert min(lengths) >= 20
    assert max(lengths) == 126  # a row but for its BOS and a tag
    assert max(lengths - {126}) <= 80


@pytest.mark.parametrize("variant", ["full", "anchor", "intra+tag", "anchor+tag+interleave"])
@pytest.mark.parametrize("seed", [0, 3])
def test_documents_of_a_row_share_no_key(tmp_path, variant, seed):
    """In the rows that the trainer's own packer makes, with tags, which shift the packing, and without."""
    experiment, file = experiment_of(), tmp_path / "documents.jsonl"
    assert isinstance(experiment.task, FactsConfig)
    config = experiment.extend.config(Run("exact", variant, seed), tmp_path, tmp_path, file, tmp_path)
    write_documents(experiment.task, experiment.extend, [1, seed], file, config)
    number = {word: of for of, word in enumerate(vocabulary(experiment.task))}
    lines = [json.loads(line)["text"].split() for line in file.read_text().splitlines()]
    texts = [np.array([number[word] for word in line], np.uint16) for line in lines]
    corpus = Documents.of(texts, [0] * len(texts), ["source"])
    train = split_documents(corpus, config.data.held_out_share, seed).train
    tags = {0: [number["source"]]} if config.pack.tag else {}
    rows, shared = PackedRows(corpus, train, config.pack, seed, [0], tags, 1), 0
    for row in range(len(rows)):
        keys = [
            {word[1:].partition(".")[0] for word in lines[train[span.document_index]] if word[0] in "kv"}
            for span in rows.plan(0).spans(row)
        ]
        shared += len(keys) > 1
        assert sum(map(len, keys)) == len(set().union(*keys))
    assert shared > 5


def ring(*documents: int) -> list[set[int]]:
    """The neighbours of each document, where each has the one before it and the one behind it."""
    before = dict(zip(documents, (documents[-1], *documents), strict=False))
    behind = {one: other for other, one in before.items()}
    return [{before[one], behind[one]} for one in sorted(documents)]


def test_keys_are_drawn_again_where_a_draw_leaves_a_document_none():
    task, neighbours = FactsConfig(kind="facts", keys=2, keys_each=1, values=2, filler=8), ring(0, 2, 4, 1, 3, 5)
    for seed in range(8):  # half of the first draws give documents 0 and 1 keys that do not fit
        keys = draw_keys(task, np.random.default_rng(seed), 6, neighbours)
        assert all(keys[one] != keys[other] for one in range(6) for other in neighbours[one])
    with pytest.raises(UserError, match="keys 2: the documents"):
        draw_keys(task, np.random.default_rng(0), 3, ring(0, 1, 2))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_runs_differ_in_arithmetic_mask_and_seed_alone(path, tmp_path):
    experiment = load_experiment(path)
    runs = experiment.runs_of(0)
    assert len(runs) == len(set(runs))
    configs = [experiment.extend.config(one, *[tmp_path] * 4, experiment.weights_of(one)).model_dump() for one in runs]
    for one, config in zip(runs, configs, strict=True):
        own = one.variant.split("+")
        assert config["pack"].pop("variant") == "+".join(
            x for x in own if x not in ("bos", *(experiment.weights or ()))
        )
        weights = {name: of.model_dump() for name, of in (experiment.weights or {}).items()}
        assert config["train"].pop("loss_weight") == weights.get(own[-1])
        assert config == configs[0]
    cells = {f"{run.arithmetic}/{run.variant}" for run in runs}
    assert cells == {cell for contrast in experiment.contrasts for cell in contrast.plus + contrast.minus}


def test_a_sink_is_seen_and_rounding_moves_scores(tmp_path):
    experiment = experiment_of()
    rows = make_rows(experiment, 128, [16, 64], 2)
    write_beginning(experiment, 0, tmp_path / "base")
    model = load(tmp_path / "base", "exact")
    assert sink_of(model, rows) < 0.05
    (layer,) = scores_of(model, rows)
    assert layer["q"].shape == (2, 2, 128, 8)
    with torch.no_grad():  # one number that all words have asks for one that BOS alone has, where RoPE rotates least
        model.model.embed_tokens.weight[:, :2] = torch.tensor([1.0, 0.0])
        model.model.embed_tokens.weight[0, 1] = 1.0
        model.model.layers[0].self_attn.q_proj.weight[3, 0] = model.model.layers[0].self_attn.k_proj.weight[3, 1] = 3.0
    assert sink_of(model, rows) > 0.8
    noise = noise_of(model, rows, [7, 2])
    assert 10 < noise["bits2_after"] / noise["bits7_after"] < 100  # 32 times coarser
    with torch.no_grad():
        assert 0 < noise["bits2_before probabilities"] < 1


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
    first = CliRunner().invoke(app, [*options, "seeds=1"])
    assert first.exit_code == 0, first.output
    assert "3 of 3 runs are measured" in first.stdout
    content = json.loads(kept.read_text())
    assert set(content["measured"]) == {"exact-intra-0", "exact-intra+bos-0", "bits7_after-anchor+tag-0"}
    one = content["measured"]["exact-intra-0"]
    for opening in ("bos", "no_bos", "exact"):
        assert np.array(one[opening]["nats"]).shape == (2, 2)  # distances, rows
    assert one["bos"] == one["exact"]
    assert one["bos"] != one["no_bos"]
    assert one["contexts"].keys() >= {"2", "4", "8", "16", "32"}
    assert content["bases"]["0"]["passed"] is True
    again = CliRunner().invoke(app, [*options, "seeds=1"])
    assert again.exit_code == 0
    assert "left of seeds" not in again.stdout
    assert json.loads(kept.read_text()) == content
    other = CliRunner().invoke(app, [*options, "measure.rows=3"])
    assert other.exit_code == 2
    assert "is of an experiment with another measure" in other.stderr


def one_measurement(value: float) -> Measurement:
    answers = Answers(nats=[[value, value + 1], [value, value + 0.5]], recall=[0.5, 0.5])
    return Measurement(bos=answers, no_bos=answers, exact=answers, sink=0.5, losses=[1.0], seconds=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cells": {"exact": ["intra", "intra+weighted"]}}, "cells: end with +weighted, and weights has no weighted"),
        ({"contrasts": [TINY["contrasts"][0] | {"distance": 17}]}, "'BOS?' is at 17, which is not measured"),
    ],
)
def test_an_experiment_that_cannot_run_is_one_line(changes, told):
    with pytest.raises(UserError) as error:
        experiment_of(**changes)
    assert told in str(error.value)


def test_a_seed_whose_base_does_not_learn_is_left_out_and_counted(tmp_path):
    results, experiment = Results(tmp_path / "kept.json", {}), experiment_of()
    results.bases = {"0": {"passed": False}, "1": {"passed": True}}
    assert results.left(experiment, 0) == []
    assert len(results.left(experiment, 1)) == 3
    results.measured = {run.name: one_measurement(1.0) for run in experiment.runs_of(1)[:2]}
    assert len(results.left(experiment, 1)) == 1
    results.forget(experiment, 1)  # its base is gone: begun again, all runs from one base
    assert (results.measured, set(results.bases)) == ({}, {"0"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_page_is_what_its_measurements_give(path, tmp_path):
    kept, copy = tmp_path / "kept.json", Path(shutil.copy(PAGE, tmp_path))
    if (stored := RESULTS / f"experiment-{path.stem}.json").is_file():
        shutil.copy(stored, kept)
    options = ["--out", str(tmp_path / "out"), "--results", str(kept), "--document", str(copy), "--workers", "0"]
    made = CliRunner().invoke(app, [str(path), *options])
    assert made.exit_code == 0, made.output
    assert copy.read_text() == PAGE.read_text()


def recomputed(*files: Path) -> list[list[str]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "sceptic.py"), *map(str, files)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [[line.rpartition(": ")[0], *line.rpartition(": ")[2].split(" | ")] for line in lines]


def test_a_script_with_numpy_alone_recomputes_the_page():
    page = PAGE.read_text()
    kept = [[RESULTS / f"experiment-{path.stem}.json"] for path in CONFIGS]
    for files in [*kept, sorted((RESULTS / "weights-code").glob("*.jsonl"))]:
        for line in recomputed(*files):
            assert f"| {' | '.join(line)} |" in page, line
    parts = ("", "-control", "-cost")
    lines = {line[0]: line[1] for line in recomputed(*(RESULTS / f"training-experiment{part}.json" for part in parts))}
    assert len(lines) == 18
    places = ("1 bit before RoPE - exact", "1 bit after RoPE - exact", "1 bit, after - before", "same function, 1 bit")
    for name in (*places, "anchor - intra, exact", "anchor - intra, exact, at 900", "anchor - intra, exact, at 512"):
        mean = f"{abs(float(lines[name].split()[0])):.4f}".lstrip("0")
        assert mean in page, name
