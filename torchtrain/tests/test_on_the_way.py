"""Evaluation between steps: not a bit of the training changes, a resumed run keeps it, what cannot be is told."""

import errno
import io
import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

from anchorline.errors import UserError
from torchtrain.checkpoint import rng
from torchtrain.config import load_config
from torchtrain.distributed.world import World
from torchtrain.evaluation import measure as measuring
from torchtrain.evaluation import results
from torchtrain.evaluation.evaluate import evaluate
from torchtrain.evaluation.measure import Checkpoint
from torchtrain.evaluation.on_the_way import TrainingEvaluation
from torchtrain.evaluation.results import read_result, read_results
from torchtrain.evaluation.suite import load_suite
from torchtrain.run import recipe
from torchtrain.run.folder import RunFolder
from torchtrain.tests.measured_results import as_on_the_hub
from torchtrain.tests.run_fixtures import QUIET
from torchtrain.tests.tiny import POSITIONS, tiny_tokenizer

LENGTH = 2 * POSITIONS


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """HellaSwag, three short questions, and a task that samples: what a model of 128 positions can be asked."""
    folder = tmp_path_factory.mktemp("suite")
    record = {"activity_label": "A", "ctx_a": "We count.", "ctx_b": "1 2", "endings": ["3 4", "b c", "x", "9 9 9"]}
    counts = [record | {"label": str(i), "ctx_b": f"{i} {i + 1}"} for i in range(3)]
    as_on_the_hub(folder / "data", {("default", split): counts for split in ("train", "validation")})
    data = json.dumps({"data_files": {"test": str(folder / "data" / "default-train.jsonl")}})
    (folder / "drawn.yaml").write_text(
        f"{{task: drawn, dataset_path: json, dataset_kwargs: {data}, output_type: generate_until, test_split: test, "
        'doc_to_text: "{{ctx_b}}", doc_to_target: "", metric_list: [{metric: exact_match}], '
        "generation_kwargs: {max_gen_toks: 4, until: [], do_sample: true, temperature: 1.5}}"
    )
    tree = {
        "tasks": ["hellaswag", "mmlu_anatomy", "drawn"],
        "include_path": str(folder),
        "batch_tokens": 1,
        "cache": str(folder / "cache"),
        "data": {"hellaswag": str(folder / "data"), "mmlu": str(folder / "data")},
    }
    (folder / "suite.yaml").write_text(yaml.safe_dump(tree))
    return folder / "suite.yaml"


def _left(folder):
    """All of a run but its clock, its config (which says that it was evaluated), and records of when and where."""
    names = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    skipped = ("timing.jsonl", "run.json", "config.yaml", "manifest.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in names if path.name not in skipped}


def _train(place, folder, *overrides, **more):
    return recipe.train(load_config(place.config, [f"run.folder={folder}", *overrides]), console=QUIET, **more)


def evaluation_of(config):
    return TrainingEvaluation(config.evaluation, config.pack, config.model.dtype, config.run.folder)


@pytest.fixture
def evaluation(place, suite, tmp_path):
    settings = ["evaluation.every=2", f"evaluation.suite={suite}", f"run.folder={tmp_path / 'run'}"]
    return evaluation_of(load_config(place.config, settings))


@pytest.fixture(scope="module", autouse=True)
def no_picture():
    """A run's picture of its losses takes as long as its steps; what it is drawn of is compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtrain.run.report.plot", lambda metrics: b"")
        yield


@pytest.fixture(scope="module")
def full_disk(place, suite, tmp_path_factory):
    """A run whose disk is full while it is evaluated for the first time: its folder, and what was said.

    It comes before those that are compared: packages draw from numpy's generator when they are first imported.
    """
    folder, said = tmp_path_factory.mktemp("full") / "run", io.StringIO()
    real, calls = results.replace_file, []

    def replace_file(path, data):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "replace_file", replace_file)
        settings = [f"run.folder={folder}", "train.steps=2", "save.every=0", "save.last=1"]
        settings += ["evaluation.every=1", f"evaluation.suite={suite}"]
        recipe.train(load_config(place.config, settings), console=Console(file=said, width=1000))
    return folder, said.getvalue()


def test_a_full_disk_ends_no_training(full_disk, place):
    folder, said = full_disk
    assert (folder / "model" / "config.json").is_file()
    (line,) = [line for line in said.splitlines() if line.startswith("warning")]
    assert line.startswith("warning   evaluation after step 1 failed: no space left on device (")
    found = list(read_results(folder.with_name("run-on-the-way")))
    assert {of.checkpoint for of in found} == {"step-00000002"}
    (scores,) = [of for of in found if of.task == "hellaswag"]
    # What published numbers are found by; `torchtrain evaluate` reads the same of the run's record.
    assert scores.training == RunFolder(folder).check_run().training()
    assert (scores.training.variant, scores.training.steps) == ("anchor+interleave", 2)
    assert [of["files"] for of in scores.training.data["sources"]] == [str(place.folder / "documents.jsonl")]
    assert scores.training.rope["rope_theta"] == 50_000.0


WITH_IT = ("evaluation.every=2", f"evaluation.lengths=[{LENGTH - 20},{LENGTH}]", "train.steps=4")
OTHERS = ("rope.type=dynamic", "model.activation_checkpointing=true")


@pytest.fixture(scope="module")
def measured(full_disk, place, suite, tmp_path_factory):
    """A run that was measured twice on the way."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    _train(place, folder, *WITH_IT, f"evaluation.suite={suite}")
    return folder


@pytest.mark.one_of(2)
@pytest.mark.parametrize("overrides", [(), OTHERS])
def test_not_a_bit_of_the_training_changes(place, suite, measured, tmp_path, overrides):
    _train(place, tmp_path / "plain", "train.steps=4", *overrides)
    if overrides:
        measured = tmp_path / "measured"
        _train(place, measured, *WITH_IT, f"evaluation.suite={suite}", *overrides)
    left, left_measured = _left(tmp_path / "plain"), _left(measured)
    assert left.keys() == left_measured.keys()
    assert any(name.endswith("rng-00000.safetensors") for name in left)
    assert [name for name in left if left[name] != left_measured[name]] == []
    found = list(read_results(measured.with_name(f"{measured.name}-on-the-way")))
    scores = [of for of in found if of.task == "hellaswag"]
    assert [(of.checkpoint, of.step) for of in scores] == [(f"step-0000000{step}", step) for step in (2, 4)]
    assert len({of.settings.weights for of in scores}) == 2
    assert all("BuilderConfig 'anatomy' not found" in of.not_run for of in found if of.task == "mmlu_anatomy")
    # What was measured is what the model of that step, exported, is found to be.
    export = measured / "exports" / "step-00000002"
    again = evaluate(
        [Checkpoint("x", 2, str(export))], load_suite(suite), [LENGTH], tmp_path / "o", say=lambda line: None
    )
    kept = {(of.checkpoint, of.task, of.length): of for of in found}
    for task in ("hellaswag", "drawn"):
        (alone,) = [of for of in again if of.task == task]
        assert alone.answers == kept["step-00000002", task, LENGTH].answers


def test_a_run_that_is_stopped_while_it_is_evaluated_goes_on(place, suite, measured, tmp_path, monkeypatch):
    settings = (*WITH_IT, f"evaluation.suite={suite}")
    asked = []

    def stop(*_):
        asked.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_run", stop)
        with pytest.raises(KeyboardInterrupt):
            _train(place, tmp_path / "run", *settings)
    assert asked == [1]
    folder = tmp_path / "run"
    recipe.resume(load_config(folder / "config.yaml", [f"run.folder={folder}"]), console=QUIET)
    for step in (2, 4):  # the evaluation that was interrupted is made after all
        own, straight = (
            read_result(of.with_name("run-on-the-way") / f"step-0000000{step}" / f"hellaswag-{LENGTH}.json")
            for of in (folder, measured)
        )
        assert (own.answers, own.settings) == (straight.answers, straight.settings)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"run-on-the-way.* holds results of another run; move them away"):
        _train(place, folder, *settings)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (UserError("samples: damaged"), "samples: damaged"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "CUDA out of memory. Tried"),
        (KeyError("x"), "KeyError: 'x' (a bug, please report it)"),
    ],
    ids=lambda of: type(of).__name__,
)
def test_a_fault_on_the_way_is_one_line_and_the_next_evaluation_tries_again(
    evaluation, model_folder, monkeypatch, fault, said
):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder("llama")), tiny_tokenizer()
    lines, before = [], rng.capture()

    def fail(*_, **__):
        np.random.rand(3), torch.rand(3)
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(results, "save_result", fail)
        evaluation.measure(model, tokenizer, 2, lines.append, lambda: None)
    assert lines[-1].startswith("warning   evaluation after step 2 failed: ")
    assert said in lines[-1]
    assert lines[-1].endswith("training goes on, the next evaluation tries again")
    after = rng.capture()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    evaluation.measure(model, tokenizer, 2, lines.append, lambda: None)
    assert {of.task for of in read_results(evaluation.out)} == {"hellaswag", "mmlu_anatomy", "drawn"}
    assert not lines[-1].startswith("warning")


@pytest.mark.parametrize(
    ("tasks", "cannot", "said"),
    [
        (["hellaswag", "vt"], ["vt"], "128 tokens leave no room"),
        (["vt", "cwe", "fwe"], None, "no task can run: vt at 128: 128 tokens leave no room"),
        (["niah_single_2", "qa_1"], None, "no task can run: niah_single_2 at 128: haystack is not set"),
        (["mmlu_astronomy"], None, "no task can run: mmlu_astronomy at 128: lm-eval cannot load it"),
    ],
)
def test_what_no_row_has_room_for_is_known_before_the_first_step_and_once(
    place, suite, model_folder, tmp_path, monkeypatch, tasks, cannot, said
):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder("llama")), tiny_tokenizer()
    tree = yaml.safe_load(suite.read_text()) | {"tasks": tasks}
    if tasks[0].startswith("mmlu"):
        tree["data"] = {"mmlu": str(tmp_path)}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(tree))
    settings = ["evaluation.every=1", f"evaluation.suite={tmp_path / 'suite.yaml'}", f"run.folder={tmp_path / 'run'}"]
    evaluation, lines, tried = evaluation_of(load_config(place.config, settings)), [], []
    real = measuring.build_job
    monkeypatch.setattr(measuring, "build_job", lambda task, *of: tried.append(task) or real(task, *of))
    if cannot is None:
        with pytest.raises(UserError, match=rf"^evaluation \(suite .*\): {said}.* or set evaluation\.every: 0$"):
            evaluation.check_fits(model, tokenizer, lines.append)
        return
    evaluation.check_fits(model, tokenizer, lines.append)
    (line,) = lines
    assert line.startswith(f"evaluation vt 128: not run: {said}")
    for step in (1, 2):
        evaluation.measure(model, tokenizer, step, lines.append, lambda: None)
    assert [line for line in lines[1:] if "not run" in line] == []
    assert tried.count("vt") == 1
    there = {json.loads(path.read_text()).get("not_run", "") for path in evaluation.out.glob("step-*/vt-*.json")}
    assert there == {line.partition("not run: ")[2]}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.lengths=[4096]"], "evaluation.lengths 4096: the model is trained for pack.sequence_length 128"),
        (["evaluation.suite=nowhere.yaml"], "nowhere.yaml"),
        (["distributed.zero_stage=1"], "works with one process without ZeRO; set it to 0, keep models"),
    ],
)
def test_what_cannot_be_is_told_before_a_run_is_made(place, suite, tmp_path, overrides, said):
    config = load_config(
        place.config, [f"run.folder={tmp_path / 'run'}", "evaluation.every=1", f"evaluation.suite={suite}", *overrides]
    )
    with pytest.raises(UserError, match=said):
        recipe.make_evaluation(config, World())
    if "zero" in overrides[0]:
        with pytest.raises(UserError, match=said):
            recipe.make_evaluation(load_config(place.config, ["evaluation.every=1"]), World(size=2))
        assert recipe.make_evaluation(load_config(place.config), World(size=2)) is None
        return
    with pytest.raises(UserError, match=said):
        recipe.train(config, console=Console(quiet=True))
    assert not (tmp_path / "run").exists()
