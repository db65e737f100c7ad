"""A suite, the models that it is asked of, lm-eval's own tasks, and several processes."""

import json
import os
from pathlib import Path

import pytest
import yaml
from tokenizers import processors
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.evaluation import evaluate
from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.evaluate import check_suite, check_tokenizer
from torchtrain.evaluation.results import read_result, read_results
from torchtrain.evaluation.suite import Suite, load_suite
from torchtrain.evaluation.tasks.index import leaves
from torchtrain.run.folder import RunFolder
from torchtrain.tests.measured_results import as_on_the_hub
from torchtrain.tests.ruler_fixtures import few_nouns  # noqa: F401
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
LENGTH = 1536


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model; HellaSwag, MMLU and LongBench as the hub has them, a few questions each; a suite without them."""
    place = tmp_path_factory.mktemp("evaluated")
    model, tokenizer = tiny_model("qwen3", max_position_embeddings=LENGTH), tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    for part in (model, tokenizer):
        part.save_pretrained(place / "model")
    record = {"activity_label": "A", "ctx_a": "We count.", "ctx_b": "1 2", "endings": ["3 4", "b c", "x", "9 9 9"]}
    counts = [record | {"label": str(i % 4), "ctx_b": f"{i} {i + 1}"} for i in range(6)]
    as_on_the_hub(place / "hellaswag", {("default", split): counts for split in ("train", "validation")})
    choices = ["1", "two, or 2", "three", "four"]
    algebra = [{"question": f"What is {i}?", "choices": choices, "answer": i % 4} for i in range(6)]
    as_on_the_hub(place / "mmlu", {("abstract_algebra", split): algebra for split in ("dev", "test")})
    asked = {"question": "Which?", "answers": ["word"], "all_classes": None}
    lengths = [asked | {"context": "word", "length": words} for words in (3999, 4000, 9000)]
    long = [asked | {"context": "word " * 500}]
    as_on_the_hub(place / "longbench", {("qasper", "test"): long, ("qasper_e", "test"): lengths})
    (place / "suite.yaml").write_text(yaml.safe_dump({"tasks": ["fwe"], "samples": 3, "cache": str(place / "cache")}))
    return place


@pytest.fixture
def call(folder, tmp_path):
    def run(*more, model="model"):
        given = ["evaluate", str(folder / model), "--suite", str(folder / "suite.yaml"), "--lengths", "1024"]
        given += [f"data.{name}={folder / name}" for name in ("hellaswag", "mmlu", "longbench")]
        return CliRunner().invoke(app, [*given, "--out", str(tmp_path / "out"), *map(str, more)])

    return run


def test_any_task_of_lm_eval_runs_by_name(call, folder, tmp_path):
    """Benchmarks from local folders, and a task file of the user's own."""
    hub, own = tmp_path / "hub", tmp_path / "own"
    asked = [{"question": "Q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}]
    as_on_the_hub(hub, {("ARC-Easy", split): asked for split in ("train", "validation", "test")})
    own.mkdir()
    data = json.dumps({"data_files": {"test": str(folder / "hellaswag" / "default-validation.jsonl")}})
    (own / "mine.yaml").write_text(
        f"{{task: mine, dataset_path: json, dataset_kwargs: {data}, output_type: generate_until, test_split: test, "
        'doc_to_text: "{{ctx_a}}", doc_to_target: "{{ctx_b}}", metric_list: [{metric: exact_match}], '
        "generation_kwargs: {max_gen_toks: 4, until: [], do_sample: true, temperature: 0.9}}"
    )
    (hub / "data").mkdir()
    sums = [json.dumps({"context": f"Question: {i} + 1\nAnswer:", "completion": f" {i + 1}"}) for i in range(3)]
    (hub / "data" / "single_digit_three_ops.jsonl").write_text("\n".join(sums))
    tasks = "hellaswag,mmlu_abstract_algebra,mmlu_anatomy,longbench_qasper,arc_easy,mine,arithmetic_1dc,sciq"
    more = (f"include_path={own}", f"data.arc_easy={hub}", f"data.arithmetic={hub}")
    done = call("--tasks", tasks, "fewshot.mmlu=5", *more)
    assert done.exit_code == 0, done.output
    found = {of.task: of for of in read_results(tmp_path / "out")}
    assert found.keys() == set(tasks.split(","))
    hellaswag, algebra, qasper = (found[of] for of in ("hellaswag", "mmlu_abstract_algebra", "longbench_qasper"))
    assert (hellaswag.metric, len(hellaswag.answers), len(algebra.answers)) == ("acc_norm", 3, 3)
    assert hellaswag.values.keys() >= {"acc", "acc_norm"}
    assert (qasper.metric, qasper.cut_prompts) == ("score", 1)  # 2,500 tokens
    metrics = [(found[task].metric, len(found[task].answers)) for task in ("arc_easy", "mine", "arithmetic_1dc")]
    assert metrics == [("acc_norm", 1), ("exact_match", 3), ("acc", 3)]
    assert found["sciq"].not_run.endswith("; data.sciq=FOLDER names local data")
    assert "BuilderConfig 'anatomy' not found" in found["mmlu_anatomy"].not_run
    # Of short prompts the greatest length alone is measured.
    again = call("--tasks", "hellaswag", "--lengths", "1024,1280", "dtype=bfloat16", "--out", tmp_path / "again")
    assert (again.exit_code, "products  in " in again.output) == (0, True), "how bfloat16 is multiplied is said"
    assert [path.name for path in (tmp_path / "again" / "model").glob("*.json")] == ["hellaswag-1280.json"]


def test_longbench_e_is_scored_by_the_length_of_the_context_too(call, tmp_path):
    assert [len(leaves(name)) for name in ("longbench_e", "longbench_en", "ruler", "mmlu")] == [13, 16, 13, 57]
    done = call("--tasks", "longbench_e")
    assert done.exit_code == 0, done.output
    result = read_result(tmp_path / "out" / "model" / "longbench_qasper_e-1024.json")
    assert [answer.part for answer in result.answers] == ["0-4k", "4-8k", "8k+"]
    (table,) = compare([tmp_path / "out"])[0]
    rows = [row for row, _ in table.rows if row.startswith("LongBench-E")]
    assert rows == [f"LongBench-E {part}, mean of 1" for part in ("0-4k", "4-8k", "8k+")]


@pytest.mark.sweep  # twelve seconds of processes
def test_two_processes_give_the_answers_of_one(call, tmp_path):
    tasks = ("--tasks", "hellaswag,fwe")
    assert call(*tasks).exit_code == 0
    shared = call(*tasks, "--processes", "2", "--out", tmp_path / "two")
    assert shared.exit_code == 0, shared.output
    alone, both = ({of.task: of for of in read_results(tmp_path / name)} for name in ("out", "two"))
    assert {task: of.samples for task, of in alone.items()} == {task: of.samples for task, of in both.items()}
    said = [{task: [a.prediction for a in of.answers] for task, of in each.items()} for each in (alone, both)]
    assert said[0] == said[1]


def _die(*_):
    os._exit(9)


def test_a_process_that_is_killed_is_one_line(call, monkeypatch):
    """As the kernel does where memory runs out."""
    monkeypatch.setattr(evaluate, "_measure_share", _die)
    done = call("--tasks", "hellaswag", "--processes", "2")
    assert done.exit_code == 1, "a fault of the machine"
    assert "--processes: one of them was killed" in done.stderr


def test_prompts_go_into_the_chat_template_and_still_fit(call, tmp_path):
    assert call("--tasks", "fwe", "--apply-chat-template", "--lm-eval-log", tmp_path / "log").exit_code == 0
    (log,) = (tmp_path / "log").rglob("samples_fwe_*.jsonl")
    prompt = json.loads(log.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith("[user]Read the following coded text")
    assert read_result(tmp_path / "out" / "model" / "fwe-1024.json").cut_prompts == 0
    tokenizer = tiny_tokenizer()
    with pytest.raises(UserError, match="has no chat template; leave it out"):
        check_tokenizer(tokenizer, "m", chat_template=True)


def test_a_task_without_room_is_not_run_with_its_reason_and_the_rest_runs(call, tmp_path, monkeypatch):
    monkeypatch.setattr("torchtrain.evaluation.evaluate._FEW", 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = call("--tasks", "niah_single_1,hellaswag", "--lengths", "512")
    assert done.exit_code == 0, done.output
    assert "model niah_single_1 512: not run: 512 tokens leave no room; it needs 640" in done.stderr
    assert "3 samples of each task take long without a GPU; a first look: --samples 2\n" in done.stderr
    assert done.stderr.index("not run") < done.stderr.index("hellaswag 512: acc_norm")
    alone = call("--tasks", "longbench_qasper", "--lengths", "128", "--out", tmp_path / "alone")
    assert "its answers have up to 128 tokens, which 128 do not hold" in alone.stderr
    assert alone.exit_code == 1
    assert "nothing ran: the reasons are above" in alone.stderr


def test_a_task_is_not_measured_as_it_is_and_as_it_was():
    with pytest.raises(UserError, match="one task at two times"):
        check_suite(Suite(tasks=["ruler", "vt"]), [1024])


def test_what_is_named_and_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"data.mmlu 'nope': there is no such folder; correct it or leave it out"):
        load_suite(ROOT / "configs" / "eval" / "short.yaml", ["data={mmlu: nope}"])
    monkeypatch.chdir(tmp_path)
    assert "niah_single_1" in load_suite("configs/eval/ruler.yaml").tasks, "the default suite comes with the package"


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


def test_a_tokenizer_that_ends_prompts_is_refused():
    tokenizer = tiny_tokenizer()
    check_tokenizer(tokenizer, "m", chat_template=False)
    for single, appends in (("<s> $A", ""), ("<s> $A </s>", "</s>"), ("$A <pad>", "<pad>")):
        known = [("<s>", 256), ("</s>", 257), ("<pad>", 258)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=known)
        if not appends:
            check_tokenizer(tokenizer, "m", chat_template=False)
            continue
        with pytest.raises(UserError, match=f"appends {appends} to prompts; set add_eos_token to false"):
            check_tokenizer(tokenizer, "m", chat_template=False)
