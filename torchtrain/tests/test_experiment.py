"""An experiment of many runs: what they differ in, their documents, what is measured, and how far it has come."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from anchorline import settings
from anchorline.errors import UserError
from anchorline.files import entry_of
from torchtrain.checkpoint.folder import step_of
from torchtrain.cli import app
from torchtrain.config import Source
from torchtrain.errors import TasksUnfinished, Terminated
from torchtrain.experiment import running
from torchtrain.experiment.corpus import cut, read_corpus, write_corpus
from torchtrain.experiment.measuring import make_rows, measure_model, read_rows
from torchtrain.experiment.records import read_records, write_records
from torchtrain.experiment.report import PLACE, write_report
from torchtrain.experiment.running import Folder, run_experiment
from torchtrain.experiment.spec import (
    ARITHMETICS,
    CorpusConfig,
    MeasureConfig,
    PairedRun,
    TrainingExperiment,
    load_experiment,
)
from torchtrain.run.folder import Outputs, RunFolder
from torchtrain.tests.measurements import measurement
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs" / "experiments"
MEASURE = {"tokens": 40, "documents": 2, "bands": [8, 16], "distances": [8, 24], "passage": 6}


@pytest.fixture
def made(model_folder, corpus, tmp_path) -> Path:
    """The file of a tiny experiment."""
    tree = {
        "title": "tiny",
        "run": {
            "model": {"source": str(model_folder()), "attention": "sdpa"},
            "pack": {"sequence_length": 48},
            "train": {"sequences_per_step": 2},
            "held_out": {"sequences": 1},
        },
        "corpus": {
            "sources": [{"files": str(corpus), "domain_field": "domain"}],
            "characters": [20, 60],
            "measured_share": 0.4,
        },
        "arithmetics": ["bfloat16"],
        "variants": ["anchor", "intra"],
        "seeds": [0],
        "stages": [1, 8],
        "measure": MEASURE,
        "cache": str(tmp_path / "cache"),
    }
    file = tmp_path / "experiment.yaml"
    file.write_text(settings.dump(tree))
    return file


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_runs_differ_in_arithmetic_variant_and_seed_alone(file, tmp_path):
    experiment = load_experiment(file)
    plain: dict[str, dict] = {}
    for cell in experiment.cells():
        tree = experiment.config(cell, tmp_path, tmp_path / "train.jsonl").model_dump(mode="json")
        assert tree["run"].pop("folder") == str(tmp_path / "runs" / cell.name)
        assert (tree["run"].pop("seed"), tree["pack"].pop("variant")) == (cell.seed, cell.variant)
        assert {name: tree["model"].pop(name) for name in ("dtype", "rotation")} == ARITHMETICS[cell.arithmetic]
        plain[cell.name] = tree
    assert len(plain) == len(experiment.arithmetics) * len(experiment.variants) * len(experiment.seeds)
    assert all(tree == next(iter(plain.values())) for tree in plain.values())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.model.dtype=float32", r"run\.model\.dtype: the experiment sets it"),
        ("run.pack.variant=full", r"run\.pack\.variant: the experiment sets it"),
        ("run.model=3", r"run\.model: expected a section, found int"),
        ("run.train.step=3", "step"),
        ("run.save.every=3", r"run\.save: the experiment sets it"),
        (
            "run.model.attention=auto",
            r"run\.model\.attention auto: float32 and bfloat16 would run in different engines",
        ),
        ("measure.tokens=49", r"measure\.tokens 49 is more than run\.pack\.sequence_length 48"),
        ("variants=[full]", "nothing can be compared"),
        ("measure.distances=[]", "distances"),
        ("measure.documents=1", "documents"),
        ("stages=[2,1]", "rising order"),
        ("stages=[2,3]", "multiple of the first"),
        ("seeds=[1,1]", "seeds: one stands twice"),
        ("variants=[inter]", "variants"),
        ("measure.bands=[8,40]", "all below tokens"),
        ("measure.distances=[4]", "at least passage"),
        ("measure.distances=[34]", "leave room"),
        ("corpus.characters=[9,8]", "the least, 9, is more than the most, 8"),
    ],
)
def test_what_does_not_fit_is_one_line(made, override, says):
    given = [override] if override.startswith("variants") else ["arithmetics=[bfloat16,float32]", override]
    with pytest.raises(UserError, match=says) as caught:
        load_experiment(made, given)
    assert "\n" not in str(caught.value)


def test_pieces_are_the_text_and_end_at_lines():
    text = "\n".join("word " * (n % 4) + "end" for n in range(400)) + "\n"
    pieces = list(cut(text, (50, 400), np.random.default_rng(0)))
    assert "".join(pieces) == text
    assert all(len(piece) <= 400 for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces)
    spread = sorted(map(len, pieces))
    assert spread[len(spread) // 10] < 110 < 250 < spread[-len(spread) // 10]


def test_a_line_that_is_too_long_is_cut_at_spaces_and_then_anywhere():
    words, solid = " ".join(["seven77"] * 100), "x" * 500
    assert all(piece.endswith(" ") for piece in list(cut(words, (20, 60), np.random.default_rng(0)))[:-1])
    assert "".join(cut(solid, (20, 60), np.random.default_rng(0))) == solid


def test_no_document_is_trained_on_and_measured(tmp_path):
    """Though some stand twice, in both sources."""
    texts = [f"{n} " * 40 for n in range(60)]
    for name, of in (("a", texts), ("b", texts[30:] + ["x " * 40])):
        lines = (json.dumps({"text": text, "source": name}) + "\n" for text in of)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [Source(files=str(tmp_path / f"{name}.jsonl"), domain_field="source") for name in "ab"]
    corpus = CorpusConfig(sources=sources, measured_share=0.5)
    write_corpus(corpus, tmp_path / "out" / "train.jsonl", tmp_path / "out" / "measured.jsonl")
    train, whole = (read_corpus(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "measured"))
    assert not {document.text for document in whole} & {document.text for document in train}
    assert {document.text for document in [*whole, *train]} == {*texts, "x " * 40}
    assert len(whole) + len(train) == 61
    write_corpus(corpus, tmp_path / "again" / "train.jsonl", tmp_path / "again" / "measured.jsonl")
    assert read_corpus(tmp_path / "again" / "train.jsonl") == train


def test_a_corpus_of_which_nothing_is_left_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    corpus = CorpusConfig(sources=[Source(files=str(tmp_path / "a.jsonl"))])
    with pytest.raises(UserError, match=r"corpus: 1 pieces to train on and 0 documents to measure on"):
        write_corpus(corpus, tmp_path / "train.jsonl", tmp_path / "measured.jsonl")
    assert not (tmp_path / "train.jsonl").exists()


def text_of(domain: str, n: int) -> str:
    return " ".join(f"{domain}{n}{word}" for word in range(30))


@pytest.fixture
def rows_of(made):
    """Return a function that makes rows of three documents of each of two domains."""

    def make(measure: MeasureConfig, *overrides: str):
        run = next(iter(configs_of(load_experiment(made, overrides)).values()))
        texts = [(domain, text_of(domain, n)) for domain in ("a", "b") for n in range(3)]
        return make_rows(texts, tiny_tokenizer(), run, measure)

    return make


def configs_of(experiment: TrainingExperiment):
    return {cell: experiment.config(cell, Path("runs"), Path("train.jsonl")) for cell in experiment.cells()}


def test_rows_hold_a_passage_twice_at_the_distance(rows_of):
    measure, tokenizer = MeasureConfig(**MEASURE), tiny_tokenizer()
    rows = rows_of(measure)
    ends = [tokenizer(text_of(domain, 0), add_special_tokens=False).input_ids[-6:] for domain in ("a", "b")]
    bos = tokenizer.bos_token_id
    assert rows.domains == ["a", "b"]
    assert [len(ids) for ids in rows.documents] == [40, 40]
    for of_document in rows.copies:
        for ids, distance in zip(of_document, measure.distances, strict=True):
            assert ids[1:7] == ids[-6:] == ids[1 + distance : 7 + distance]
            assert ids[0] == bos
            assert len(ids) == 1 + distance + 6
    # A passage is the end of the other document, which nothing else in the row tells.
    assert [of_document[0][1:7] for of_document in rows.copies] == ends[::-1]


def test_rows_begin_with_the_runs_own_anchor(rows_of):
    assert {ids[0] for ids in rows_of(MeasureConfig(**MEASURE), "run.pack.anchor=5").documents} == {5}


def test_a_special_token_in_a_text_is_what_it_is_in_training(made):
    run = next(iter(configs_of(load_experiment(made)).values()))
    texts = [("a", "</s> " * 60), ("b", "</s> " * 60)]
    tokenizer, measure = tiny_tokenizer(), MeasureConfig(**MEASURE)
    assert tokenizer.eos_token_id not in make_rows(texts, tokenizer, run, measure).documents[0]


def test_too_few_long_documents_are_refused(rows_of):
    with pytest.raises(UserError, match=r"measure\.documents: 6 documents hold more than 40 tokens, fewer than the 7"):
        rows_of(MeasureConfig(**MEASURE | {"documents": 7}))


def test_losses_are_those_of_the_logits(rows_of):
    measure, model = MeasureConfig(**MEASURE), tiny_model("llama").float().eval()
    rows = rows_of(measure)

    def losses(ids):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none").numpy()

    wanted = [[losses(ids)[a - 1 : b - 1].mean() for a, b in ((1, 8), (8, 16), (16, 40))] for ids in rows.documents]
    copies = [[losses(ids)[-5:].mean() for ids in of_document] for of_document in rows.copies]
    first = [losses(of_document[0])[1:6].mean() for of_document in rows.copies]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = measure_model(model, rows, measure, again_rounded=True)
    # float32 against float64 of float32 logits: a unit in the last place of a loss of about 6.
    for ours, theirs in ((found.losses, wanted), (found.copies, copies), (found.passages, first)):
        assert np.abs(np.array(ours) - np.array(theirs)).max() < len(rows.documents[0]) * np.spacing(np.float32(8))
    assert found.rounded is not None
    assert found.rounded != found.losses
    again = measure_model(model, rows, measure, again_rounded=False)
    assert (again.losses, again.rounded) == (found.rounded, None)  # the weights are rounded by now


def test_an_experiment_stops_at_a_stage_and_is_reported(made, tmp_path, monkeypatch):
    """Real processes: a run is trained to step 1 of 8, stopped there, and measured."""
    cell = PairedRun("bfloat16", "anchor", 0)
    monkeypatch.setattr(TrainingExperiment, "cells", lambda self: iter([cell]))  # the other is as this
    experiment, out, said = load_experiment(made), tmp_path / "out", []
    run_experiment(experiment, out, workers=1, stages=1, say=said.append)
    folder = Folder(out)
    assert said[-1].startswith("bfloat16-anchor-0 measured after step 1 · 1 of 1")
    left = RunFolder(folder.run(cell))
    assert step_of(left.exports_of_steps()[0].name) == 1  # it may be a step further before it is stopped
    assert not left.finished
    found = json.loads(folder.measurement(cell, 1).read_text())
    assert np.isfinite(found["losses"]).all()
    document = tmp_path / "page.md"
    document.write_text(f"before\n{PLACE.begin}\nof last time\n{PLACE.end}\nafter\n")
    report = write_report(experiment, out, document)
    assert "| 768 | 0 | 1 |" in report.read_text()
    head, _, rest = document.read_text().partition(PLACE.begin)
    assert (head, rest.partition(PLACE.end)[2]) == ("before\n", "\nafter\n")
    assert "of last time" not in rest
    assert (tmp_path / "figures" / "page.svg").read_bytes() == (out / "effects.svg").read_bytes()
    said.clear()
    run_experiment(experiment, out, workers=1, stages=1, say=said.append)
    assert said == ["step 1: 1 of 1 runs are measured"]
    with pytest.raises(UserError, match="another run"):
        write_report(load_experiment(made, ["run.train.sequences_per_step=4"]), out)
    with pytest.raises(UserError, match=r"--out .*: holds an experiment with another measure; choose another folder"):
        run_experiment(load_experiment(made, ["measure.documents=3"]), out, workers=1)


FAKE = """
import os, re, shutil, signal, sys, time
from pathlib import Path
verb, what = sys.argv[3:]
run = Path(what if verb == "resume" else re.search("folder: (.*)", Path(what).read_text())[1])
if "{fails}" in run.name:
    sys.exit("gone wrong")
left = Path({left!r})
if verb == "train":
    (run / "exports" / "step-00000001").mkdir(parents=True)
    shutil.copy(left / "run.json", run / "run.json~")
    os.replace(run / "run.json~", run / "run.json")  # whole or not at all, as a run's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as torchrun ends
    time.sleep(100)
shutil.copytree(left / "model", run / "model")
shutil.copy(left / "outputs.json", run / "outputs.json")
with open({calls!r}, "a") as calls:
    calls.write(run.name + "\\n")
"""


def leave_a_run(path: Path) -> None:
    """What a finished run leaves, by the classes that read it; the launcher copies it, and imports nothing."""
    run = RunFolder(path)
    run.model.mkdir(parents=True)
    run.record.write_text("{}")
    (run.model / "config.json").write_text("{}")
    outputs = Outputs(models={"model": {"config.json": entry_of(run.model / "config.json")}})
    outputs.write(run.outputs, finished=8)
    assert (run.record.name, run.outputs.name, run.model.name) == ("run.json", "outputs.json", "model")


@pytest.fixture
def fake(made, tmp_path, monkeypatch):
    """Return a function that runs four runs by a launcher of no weights, and what it said and which runs it resumed."""
    calls, result, beside = tmp_path / "calls", tmp_path / "measured.json", Folder(tmp_path / "beside")
    beside.path.mkdir()
    running._prepare(load_experiment(made), beside)
    same = {"documents": read_rows(beside.rows).digest}
    result.write_text(measurement(0, documents=2).model_copy(update=same).model_dump_json())
    copy = "import shutil, sys; from pathlib import Path; Path(sys.argv[-1]).parent.mkdir(exist_ok=True); "
    monkeypatch.setattr(
        running, "_MEASURE", (sys.executable, "-c", copy + f"shutil.copy({str(result)!r}, sys.argv[-1])")
    )
    monkeypatch.setattr(running, "_SECONDS_BETWEEN_LOOKS", 0.02)
    leave_a_run(tmp_path / "left")

    def run(fails: str, **how):
        said: list[str] = []
        file = tmp_path / "fake.py"
        file.write_text(FAKE.format(fails=fails, calls=str(calls), left=str(tmp_path / "left")))
        experiment = load_experiment(made, ["arithmetics=[bfloat16,float32]", "variants=[intra,anchor]"])
        try:
            run_experiment(experiment, tmp_path / "out", launch=[sys.executable, str(file)], say=said.append, **how)
        finally:
            run.said, run.calls = said, calls.read_text().split() if calls.is_file() else []

    return run


def test_every_run_comes_to_a_stage_before_any_goes_on(fake):
    fake("none", workers=3)
    stages = [line for line in fake.said if line.startswith("step")]
    assert stages == ["step 1: 0 of 4 runs are measured", "step 8: 0 of 4 runs are measured"]
    at = [line.split(" · ")[0].rpartition(" ")[2] for line in fake.said if "measured after" in line]
    assert at == ["1"] * 4 + ["8"] * 4
    assert sorted(fake.calls) == sorted({*fake.calls})  # each run is resumed once
    fake("none", workers=3)
    assert [line for line in fake.said if "measured after" in line] == []


def test_what_was_measured_elsewhere_is_not_run_again(fake, made, tmp_path):
    """By the published file: what stands there is taken over, but of the same experiment and documents alone."""
    with pytest.raises(TasksUnfinished):
        fake("float32", workers=2)  # those of bfloat16 come to an end
    experiment = load_experiment(made, ["arithmetics=[bfloat16,float32]", "variants=[intra,anchor]"])
    write_report(experiment, tmp_path / "out")
    there = tmp_path / "out" / "measurements.json"
    records = read_records(experiment, there)
    assert len(records.measured) == 4
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").rename(elsewhere / "out")
    there, done = elsewhere / "out" / "measurements.json", len(fake.calls)
    fake("none", workers=2, records=records)
    assert fake.said[0] == "step 1: 2 of 4 runs are measured"
    assert sorted(fake.calls[done:]) == ["float32-anchor-0", "float32-intra-0"]
    assert write_report(experiment, tmp_path / "out").is_file()
    assert len(read_records(experiment, tmp_path / "out" / "measurements.json").measured) == 8
    with pytest.raises(UserError, match=r"--measured .*: is of an experiment with another stages; measure anew"):
        read_records(load_experiment(made, ["stages=[2,8]"]), there)
    asked = ["experiment", str(made), "--out", str(tmp_path / "report"), "--measured", str(there), "--only-report"]
    result = CliRunner().invoke(app, [*asked, "arithmetics=[bfloat16,float32]", "variants=[intra,anchor]"])
    assert result.exit_code == 0, result.output
    ours, theirs = (folder / "report.md" for folder in (tmp_path / "report", there.parent))
    assert ours.read_text() == theirs.read_text()
    right = there.read_text()
    for old, new, says in (
        ('"losses"', '"loses"', "is damaged, or no measurements"),
        ('"bfloat16-', '"bfloat15-', "'bfloat15-.*' is the name of no run and step"),
        ('"distances":[8,24]', '"distances":[8,25]', "has other bands or distances"),
        ('"passages":[0.0,0.0]', '"passages":[0.0]', "has not 2 documents"),
        ('"copies":[[', '"copies":[[0.5,', "has rows of other lengths"),
    ):
        assert old in right
        there.write_text(right.replace(old, new))
        with pytest.raises(UserError, match=rf"--measured .*{says}"):
            read_records(experiment, there)


def test_measurements_of_other_documents_are_refused_before_any_training(fake, made, tmp_path):
    with pytest.raises(TasksUnfinished):
        fake("", workers=2)  # every run fails
    folder = Folder(tmp_path / "out")
    file = folder.measurement(PairedRun("bfloat16", "intra", 0), 1)
    file.parent.mkdir()
    file.write_text(measurement(0).model_copy(update={"documents": "other"}).model_dump_json())
    with pytest.raises(UserError, match="is of other documents than corpus gives here"):
        fake("none", workers=2)
    assert fake.calls == []


def test_records_of_other_documents_leave_no_trace(fake, made, tmp_path):
    """Nor do those that come while another experiment's documents lie there, half made."""
    experiment = load_experiment(made, ["arithmetics=[bfloat16,float32]", "variants=[intra,anchor]"])
    one = {(PairedRun("bfloat16", "intra", 0), 1): measurement(0, documents=2)}
    write_records(experiment, one, there := tmp_path / "measurements.json")
    records = read_records(experiment, there)
    with pytest.raises(UserError, match=r"--measured .*: is of other documents than corpus gives here"):
        fake("none", workers=2, records=records)
    folder = Folder(tmp_path / "out")
    assert not folder.measurement(PairedRun("bfloat16", "intra", 0), 1).exists()
    made_here = folder.train.read_bytes()
    for name in ("configs", "logs"):
        shutil.rmtree(folder.path / name)
    folder.experiment.unlink()
    folder.train.write_text("of another experiment")
    running.receive(experiment, folder.path, records)
    assert not folder.train.exists()
    folder.measurement(PairedRun("bfloat16", "intra", 0), 1).unlink()
    fake("none", workers=2)
    assert folder.train.read_bytes() == made_here


def test_a_run_that_fails_is_told_with_its_last_words_and_the_others_go_on(fake):
    with pytest.raises(
        TasksUnfinished, match=r"1 runs failed, the first: float32-anchor-0: its training ended with 1: .*gone wrong"
    ):
        fake("float32-anchor", workers=2)
    assert sorted(fake.calls) == ["bfloat16-anchor-0", "bfloat16-intra-0", "float32-intra-0"]
    fake("none", workers=2)
    assert fake.calls.count("float32-anchor-0") == 1


def test_too_few_documents_are_told_before_any_training_and_may_be_mended(made, tmp_path):
    asleep = ["sh", "-c", f"touch {tmp_path / 'trained'}"]
    with pytest.raises(UserError, match=r"measure\.documents: \d+ documents hold more than"):
        run_experiment(load_experiment(made, ["measure.documents=4000"]), tmp_path / "out", 1, launch=asleep)
    assert not (tmp_path / "trained").exists()
    with pytest.raises(TasksUnfinished):
        run_experiment(load_experiment(made), tmp_path / "out", 1, launch=asleep, say=lambda _: None)
    assert (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--document", "missing.md", "No such file"), ("--launch", "torchrun 'x", "No closing quotation")],
)
def test_options_are_looked_at_before_hours_of_work(made, tmp_path, option, value, says):
    result = CliRunner().invoke(app, ["experiment", str(made), "--out", str(tmp_path / "out"), option, value])
    assert result.exit_code == 2
    assert says.lower() in result.output.lower()
    assert not (tmp_path / "out").exists()


def test_a_termination_stops_every_run_and_waits_for_it(made, tmp_path):
    said = tmp_path / "said"
    sleeper = ["sh", "-c", f"trap 'echo saved > {said}; exit 143' TERM; echo $$ > {said}; while :; do sleep 0.05; done"]

    def terminate() -> None:
        while not (said.is_file() and said.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(Terminated, match="what the runs have saved stays, and the same command goes on"):
        run_experiment(load_experiment(made), tmp_path / "out", 1, launch=sleeper, say=lambda _: None)
    assert said.read_text() == "saved\n"


def test_a_folder_of_something_else_is_refused(made, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    result = CliRunner().invoke(app, ["experiment", str(made), "--out", str(tmp_path / "mine")])
    assert result.exit_code == 2
    assert "holds something else" in result.output
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_report_of_nothing_is_refused(made, tmp_path):
    result = CliRunner().invoke(app, ["experiment", str(made), "--out", str(tmp_path / "new"), "--only-report"])
    assert result.exit_code == 2
    assert "nothing is measured yet" in result.output
    assert not (tmp_path / "new").exists()


def test_a_document_without_marks_is_refused(made, tmp_path):
    experiment, folder = load_experiment(made), Folder(tmp_path / "out")
    file = folder.measurement(PairedRun("bfloat16", "anchor", 0), 1)
    file.parent.mkdir(parents=True)
    folder.experiment.write_text(settings.dump(experiment.model_dump(mode="json")))
    file.write_text(measurement(0).model_dump_json())
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(UserError, match="has not one line"):
        write_report(experiment, folder.path, tmp_path / "page.md")
    file.write_text("{")
    with pytest.raises(UserError, match=r"is damaged .*; remove it, and it is made again"):
        write_report(experiment, folder.path)


def test_an_experiment_knows_every_arithmetic_it_names():
    assert set(TrainingExperiment.model_fields["arithmetics"].default) == set(ARITHMETICS)
