"""A suite, the models that it is asked of, and the benchmarks' section of it."""

from pathlib import Path

import pytest
from tokenizers import processors
from typer.testing import CliRunner

from anchorline.errors import UserError
from benchmarks.evaluation import with_section
from torchtrain.cli import app
from torchtrain.evaluation.evaluate import Checkpoint, evaluate
from torchtrain.evaluation.prompt_tokens import check_tokenizer
from torchtrain.evaluation.suite import SUITE, Suite, load_suite
from torchtrain.run.folder import RunFolder
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def test_the_section_of_the_benchmarks_is_written_alone():
    row = {"task": "fwe", "ours_seconds": 1.0, "stock_seconds": 2.0, "ratio": 2.0, "ratios": [1.5, 2.5]}
    rows = [row | {"computed_share": 0.5, "same_answers": 4}]
    facts = {"batch_of_stock": 4, "model": "m", "dtype": "float32", "length": 1024, "samples": 4, "pairs": 1}
    report = facts | {"device": "d", "threads": 1, "versions": {"torch": "2"}, "results": rows}
    once = with_section("# Benchmarks\n\n<!-- begin: data -->\n## Data\n<!-- end: data -->\n", report)
    assert "| fwe | 1.00 | 2.00 | 2.00 (1.50 to 2.50) | 50% | 4 of 4 |" in once
    assert "## Data\n<!-- end: data -->\n\n<!-- begin: evaluation" in once
    assert with_section(once, report) == once
    changed = with_section(once, report | {"results": [rows[0] | {"ratio": 3.0}]})
    assert changed == once.replace("| 2.00 (1.50", "| 3.00 (1.50")


def test_a_suite_is_strict():
    for tasks, said in (
        (["niah_single_4"], "did you mean niah_single_"),
        (["vt", "vt_2024_10"], "the same task at two times"),
        (["fwe", "fwe"], "stands twice"),
        (["zzz"], "known: niah_single_1"),
    ):
        with pytest.raises(ValueError, match=said):
            Suite.model_validate({"tasks": tasks})
    with pytest.raises(ValueError, match="exactly one of folder, demo, files, dataset"):
        Suite.model_validate({"tasks": ["fwe"], "haystack": {"folder": "a", "demo": "speeches"}})

    for name, value in (
        ("pretrained", "other"),
        ("dtype", "float16"),
        ("max_model_len", 10),
        ("model", "m"),
        ("backend", "b"),
    ):
        with pytest.raises(ValueError, match=f"vllm: {name} cannot be set there"):
            Suite.model_validate({"tasks": ["fwe"], "backend": "vllm", "vllm": {name: value}})
    assert Suite.model_validate({"tasks": ["fwe"], "backend": "vllm", "vllm": {"tensor_parallel_size": 2}}).vllm


def test_material_that_is_named_and_not_there_is_refused(tmp_path, monkeypatch):
    for name in ("mmlu", "hellaswag", "longbench"):
        with pytest.raises(UserError, match=rf"{name}\.folder 'nope': there is no such folder; correct it or leave it"):
            load_suite(ROOT / "configs" / "eval" / "short.yaml", [f"{name}={{folder: nope}}"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--suite: the default configs/eval/ruler\.yaml is not here; go to the repos"):
        load_suite(SUITE)


def test_a_suite_of_which_nothing_ran_is_no_success(tmp_path):
    """And its folder is compared, and says so."""
    tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks: [hellaswag]\n")
    arguments = ["evaluate", str(tmp_path / "model"), "--suite", str(suite), "--lengths", "512"]
    told = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert told.exit_code == 1, told.output
    assert "nothing ran: every task's material is missing" in told.stderr
    told = CliRunner().invoke(app, ["compare", str(tmp_path / "out")])
    assert told.exit_code in (0, 1)
    assert told.exception is None or isinstance(told.exception, SystemExit)


def test_the_last_models_of_a_run_are_found_by_step(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="has exported no model yet"):
        RunFolder(tmp_path).last_models(5)
    for name in ("exports/step-00000010", "exports/step-00000020", "exports/step-00000030", "model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outputs.json").write_text('{"finished": 30}')
    steps = [(name, step) for name, step, _ in RunFolder(tmp_path).last_models(2)]
    assert steps == [("step-00000020", 20), ("model", 30)]  # the last export has the trained model's weights
    assert len(RunFolder(tmp_path).last_models(5)) == 3


def test_a_tokenizer_that_ends_prompts_is_refused_before_anything_is_loaded(tmp_path):
    tokenizer = tiny_tokenizer()
    check_tokenizer(tokenizer, "m")
    for single, appends in (("<s> $A", False), ("<s> $A </s>", True), ("$A <pad>", True)):
        known = [("<s>", 256), ("</s>", 257), ("<pad>", 258)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=known)
        tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / single[-5:])
        tokenizer.save_pretrained(tmp_path / single[-5:])
        said = f"appends {single[3:].split()[-1]} to prompts; set add_eos_token to false" if appends else "the least is"
        checkpoint = Checkpoint("model", None, str(tmp_path / single[-5:]))
        with pytest.raises(UserError, match=said):
            evaluate([checkpoint], Suite(tasks=["fwe"]), [64], tmp_path / "out", say=lambda line: None)
