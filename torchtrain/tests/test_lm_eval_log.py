"""Results in lm-eval's own log format, judged by strangers: lm-eval's readers, pandas, datasets."""

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas
import pytest

from anchorline.errors import UserError
from torchtrain.evaluation import lm_eval_log
from torchtrain.evaluation.lm_eval_log import write_log
from torchtrain.evaluation.measured import Measured, read_measured
from torchtrain.evaluation.results import Answer
from torchtrain.evaluation.samples import _place, _write
from torchtrain.evaluation.suite import TASKS, group_of
from torchtrain.tests.measured_results import perplexity_result, save_results, settings_of, task_result

utils = importlib.import_module("lm_eval.utils")
wandb_logger = importlib.import_module("lm_eval.loggers.wandb_logger")


def _ruler(folder, cache, scores, length):
    """A result of fwe with its samples in the cache."""
    identity = {"task": "fwe", "length": length, "materials": {}, "tokenizer": {"name": "t"}}
    samples = [
        {"index": i, "input": f"{length} question {i}\n", "gen_prefix": "Answer: it is", "outputs": [f"ö{i}", "b"],
         "max_length": length}
        for i in range(len(scores))
    ]  # fmt: skip
    place = _place(identity, cache)
    _write(place, samples, identity)
    digest = json.loads((place / "manifest.json").read_text())["file"]["sha256"]
    result = task_result("fwe", scores, length=length, settings=settings_of(digest))
    answers = [of.model_copy(update={"prediction": f"said {of.index}"}) for of in result.answers]
    save_results(folder, result.model_copy(update={"identity": identity, "answers": answers, "source": "runs/demo"}))


def _choices(task, likelihoods, right):
    result = task_result(task, right)
    pairs = zip(result.answers, likelihoods, strict=True)
    return result.model_copy(
        update={
            "answers": [
                Answer(index=of.index, prediction="1", score=of.score, acc=1.0 - of.score, log_likelihoods=values)
                for of, values in pairs
            ]
        }
    )


@pytest.fixture
def written(tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    _ruler(folder, cache, [1.0, 0.5, 0.0], 1024)
    _ruler(folder, cache, [1.0, 1.0, 0.0], 4096)
    save_results(
        folder,
        _choices("hellaswag", [[-3.0, -1.0, -2.0, -4.0], [-1.5, -0.5, -2.5, -3.5]], (1.0, 0.0)),
        task_result("longbench_trec", [0.25, 0.75]),
        perplexity_result(),
    )
    said = []
    files = write_log(read_measured(str(folder), None), tmp_path / "log", cache, said.append)
    return SimpleNamespace(files={path.name.rpartition("_")[0]: path for path in files}, said=said, root=tmp_path)


def test_lm_eval_finds_and_tabulates_what_is_written(written):
    names = [str(path) for path in written.files.values()]
    (results,) = utils.get_results_filenames(names)
    samples = utils.get_sample_results_filenames(names)
    tasks = {utils.get_file_task_name(name.rpartition("/")[2]) for name in samples}
    assert tasks == {"fwe", "hellaswag", "longbench_trec"}
    loaded = json.loads(Path(results).read_text(encoding="utf-8"))
    table = utils.make_table(loaded)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    shown = {(row[4], row[6], row[8]) for row in rows[2:]}
    assert ("1024", "0.500", "0.2887") in shown  # 0.5 / sqrt 3
    assert ("4096", "0.667", "0.3333") in shown
    assert ("acc_norm", "0.500", "0.5000") in shown
    assert ("score", "0.500", "0.2500") in shown
    assert loaded["n-samples"]["fwe"] == {"original": 6, "effective": 6}
    assert loaded["higher_is_better"]["fwe"] == {"1024": True, "4096": True}
    assert loaded["model_name"] == "runs/demo"
    assert {len(of) for of in loaded["task_hashes"].values()} == {64}
    assert not list((written.root / "log").glob(".*"))


def test_pandas_and_datasets_read_the_samples(written):
    frame = pandas.read_json(written.files["samples_fwe"], lines=True)
    assert frame["doc_id"].tolist() == list(range(6))
    assert (frame["1024"].mean(), frame["4096"].mean()) == (0.5, pytest.approx(2 / 3))  # null counts for nothing
    first = frame.iloc[0]
    prompt = first["arguments"]["gen_args_0"]["arg_0"]
    assert prompt == "1024 question 0\n Answer: it is"
    assert first["prompt_hash"] == utils.hash_string(prompt)
    assert first["filtered_resps"] == ["said 0"]
    assert first["target"] == str(["ö0", "b"])
    for chunk in (10 << 20, 3000):  # all rows at once, or a few
        rows = datasets.load_dataset(
            "json", data_files=str(written.files["samples_fwe"]), split="train", chunksize=chunk,
            cache_dir=str(written.root / f"hf-{chunk}"),
        )  # fmt: skip
        assert rows["4096"] == frame["4096"].astype(object).where(frame["4096"].notna(), None).tolist()


def test_wandbs_reader_sees_choices_and_answers(written):
    """lm-eval's own: of samples before they are written, so what is written is turned back."""
    loaded = json.loads(written.files["results"].read_text())
    for task, expected in (("hellaswag", [1, 1]), ("fwe", [f"said {i}" for i in (0, 0, 1, 1, 2, 2)])):
        lines = [json.loads(line) for line in written.files[f"samples_{task}"].read_text().splitlines()]
        for line in lines:
            line["arguments"] = [list(of.values()) for of in line["arguments"].values()]
            if task == "hellaswag":
                line["resps"] = [[[float(of[0][0])]] for of in line["resps"]]
                line["filtered_resps"] = [[float(of[0])] for of in line["filtered_resps"]]
        logger = SimpleNamespace()
        frame = wandb_logger.WandbLogger._generate_dataset(logger, lines, loaded["configs"][task])
        assert frame["filtered_predictions"].tolist() == expected


def test_samples_that_are_gone_are_told_and_empty(written):
    assert len(written.said) == 2  # of hellaswag and longbench_trec
    assert all("its samples are not in the cache; no prompts" in line for line in written.said)
    (first, _) = [json.loads(line) for line in written.files["samples_longbench_trec"].read_text().splitlines()]
    assert first["arguments"]["gen_args_0"]["arg_0"] == first["target"] == ""
    assert first["score"] == 0.25


def test_groups_stand_where_they_are_whole(tmp_path):
    tasks = [task for task in TASKS if task != "vt"]
    results = [task_result(task, [i / 12, 1.0]) for i, task in enumerate(tasks)]
    for last, whole in ((13, True), (12, False)):
        files = write_log(Measured("run").add(results[:last]), tmp_path / str(last), tmp_path)
        loaded = json.loads(next(path for path in files if path.name.startswith("results")).read_text())
        assert ("ruler" in loaded.get("groups", {})) is whole
    files = write_log(Measured("run").add(results), tmp_path / "all", tmp_path)
    loaded = json.loads(next(path for path in files if path.name.startswith("results")).read_text())
    assert loaded["groups"]["ruler"]["1024,none"] == pytest.approx(0.75)
    assert "ruler" in utils.make_table(loaded, "groups")


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="has no result of a task"):
        write_log(Measured("run").add([perplexity_result()]), tmp_path / "log", tmp_path)
    (tmp_path / "file").write_text("")
    run = Measured("run").add([task_result()])
    with pytest.raises(UserError, match=r"--out: .*not a directory"):
        write_log(run, tmp_path / "file", tmp_path)
    tracker = importlib.import_module("lm_eval.loggers.evaluation_tracker")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(tracker, "sanitize_list", fail)
    with pytest.raises(UserError, match=r"lm-eval's writer: .*Could not save sample results.*disk full"):
        write_log(run, tmp_path / "log", tmp_path)
    assert not list((tmp_path / "log").rglob("*"))


@pytest.mark.parametrize("source", ["..", ".", "../..", "a/../..", "x" * 300, "錨" * 150, "/"])
def test_a_log_lies_below_out_whatever_the_model_is_called(tmp_path, source):
    out = tmp_path / "deep" / "log"
    result = task_result().model_copy(update={"source": source})
    files = write_log(Measured("run").add([result]), out, tmp_path)
    assert sorted(path.name.partition("_")[0] for path in files) == ["results", "samples"]
    assert all(path.is_file() and path.parent.parent == out for path in files)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)


def test_checkpoints_of_one_run_are_told_apart(tmp_path):
    results = [task_result(checkpoint=name) for name in ("step-00000010", "step-00000020")]
    results = [of.model_copy(update={"source": "runs/demo", "step": 10 * i}) for i, of in enumerate(results, start=1)]
    files = write_log(Measured("run").add(results), tmp_path / "log", tmp_path)
    read = {of.parent.name: json.loads(of.read_text())["config"] for of in files if of.name.startswith("results")}
    assert sorted(read) == ["runs__demo__step-00000010", "runs__demo__step-00000020"]
    assert [(of["checkpoint"], of["step"]) for _, of in sorted(read.items())] == [
        ("step-00000010", 10),
        ("step-00000020", 20),
    ]


def test_nothing_stays_where_a_file_cannot_be_moved(tmp_path, monkeypatch):
    results = [task_result("fwe"), task_result("cwe", checkpoint="other")]
    moved = []

    def move(path, place, replace=os.replace):
        moved.append(path.name.partition("_")[0])
        if len(moved) == 4:
            raise OSError(28, "No space left on device")
        replace(path, place)

    monkeypatch.setattr(lm_eval_log.os, "replace", move)
    (tmp_path / "log").mkdir()
    with pytest.raises(UserError, match=r"--out: .*[Nn]o space left"):
        write_log(Measured("run").add(results), tmp_path / "log", tmp_path)
    assert moved == ["samples", "samples", "results", "results"]
    assert not list((tmp_path / "log").rglob("*"))


def test_a_group_of_two_lengths_pools_the_questions_of_each(tmp_path):
    subjects = group_of("mmlu")
    wrong = {1024: 1, 4096: 3}  # of four each
    results = [
        task_result(task, [0.0] * wrong[length] + [1.0] * (4 - wrong[length]), length=length)
        for task in subjects
        for length in wrong
    ]
    results += [task_result(subjects[0], [1.0] * 40, length=8192)]  # alone at its length
    files = write_log(Measured("run").add(results), tmp_path / "log", tmp_path)
    loaded = json.loads(next(path for path in files if path.name.startswith("results")).read_text())
    metrics = importlib.import_module("lm_eval.api.metrics")
    for length, share in ((1024, 0.75), (4096, 0.25)):
        each = (0.25 * 0.75 * 4 / 3 / 4) ** 0.5
        assert loaded["groups"]["mmlu"][f"acc,{length}"] == pytest.approx(share)
        pooled = metrics.pooled_sample_stderr([each] * len(subjects), [4] * len(subjects))
        assert loaded["groups"]["mmlu"][f"acc_stderr,{length}"] == pytest.approx(pooled)
