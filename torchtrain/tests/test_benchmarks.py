"""LongBench, MMLU and HellaSwag: asked, cut and scored as their own code does, from files in their own layout."""

import hashlib
import json
import random
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.evaluation import choices, engines, longbench
from torchtrain.evaluation.evaluate import run_choices, run_task
from torchtrain.evaluation.generation import Generator
from torchtrain.evaluation.materials import Materials, MissingMaterialError
from torchtrain.evaluation.results import read_result
from torchtrain.evaluation.samples import SampleSet, open_samples
from torchtrain.evaluation.suite import LONGBENCH, Suite, group_of
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

LENGTH, LONG = 1024, 1536
# Of LongBench/config/dataset2prompt.json (THUDM/LongBench, commit 2e00731), its JSON with keys in order.
OFFICIAL_PROMPTS = "bb89f011861ff65f8534f366632b99cc9d5681ae983c50f2537230faae16613f"
SUBJECT = "mmlu_abstract_algebra"


def _write_records(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def _passages(count: int) -> str:
    draw = random.Random(count)
    return "\n".join(" ".join(str(draw.randrange(1000)) for _ in range(9)) + "." for _ in range(count))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The three benchmarks' own layouts: data.zip, data.tar and hellaswag_val.jsonl, a few questions each."""
    folder = tmp_path_factory.mktemp("published")
    for name in ("qasper", "triviaqa", "samsum", "trec", "lcc", "passage_count"):
        records = [
            {
                "input": f"What is thing {i}?",
                "context": f"Thing {i} is called {name}{i}.\n{_passages(5 + 30 * i)}",
                "answers": ["something else", f"{name}{i}"],
                "length": 9,
                "dataset": name,
                "language": "en",
                "all_classes": [f"{name}{j}" for j in range(4)] if name == "trec" else None,
                "_id": str(i),
            }
            for i in range(4)
        ]
        _write_records(folder / "longbench" / "data" / f"{name}.jsonl", records)
    for split, count in (("dev", 5), ("test", 6)):
        (folder / "mmlu" / split).mkdir(parents=True)
        lines = [f'" What is {i}, {split}? ",{i},"two, or 2",three,four,{"ABCD"[i % 4]}' for i in range(count)]
        (folder / "mmlu" / split / f"abstract_algebra_{split}.csv").write_text("\n".join(lines) + "\n")
    endings = [
        {
            "ind": i,
            "activity_label": "Baking",
            "ctx_a": f"A cook [header] takes {i} eggs.",
            "ctx_b": "she",
            "ctx": "not read",
            "label": i % 4,
            "endings": [f"breaks egg {i}.", "leaves for good, and does not come back.", "sings [x] .", "sleeps."],
        }
        for i in range(6)
    ]
    _write_records(folder / "hellaswag" / "hellaswag_val.jsonl", endings)
    return folder


@pytest.fixture(scope="module")
def tree(published, tmp_path_factory):
    return {
        "tasks": ["longbench_qasper", SUBJECT, "hellaswag"],
        "samples": 4,
        "cache": str(tmp_path_factory.mktemp("cache")),
        **{name: {"folder": str(published / name)} for name in ("longbench", "mmlu", "hellaswag")},
    }


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def _materials(tree, **changes) -> Materials:
    return Materials(Suite.model_validate(tree | changes))


def test_all_prompts_of_longbench_are_its_own():
    names = [name for names in LONGBENCH.values() for name in names]
    prompts = {name: longbench.prompt_template(name) for name in names}
    assert len(prompts) == 21
    assert hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest() == OFFICIAL_PROMPTS


def test_what_is_too_long_is_cut_in_its_middle(tree, tokenizer):
    made = longbench.make_prompts("longbench_qasper", LONG, 4, tokenizer, _materials(tree))
    most = LONG - 128 - 1
    assert [sample["cut"] for sample in made] == [False, True, True, True]
    for sample in made:
        tokens = len(tokenizer(sample["prompt"]).input_ids)
        assert sample["length"] == tokens + 128 + 1 <= LONG
        assert sample["prompt"].startswith("You are given a scientific article")
        assert sample["prompt"].endswith("\n\nAnswer:")
        assert tokens == most - most % 2 or not sample["cut"]
    shorter = _materials(tree, longbench_prompt=700)
    tokens = [
        sample["length"] - 129 for sample in longbench.make_prompts("longbench_qasper", LONG, 4, tokenizer, shorter)
    ]
    assert max(tokens) == 700
    with pytest.raises(UserError, match="longbench_prompt 1500: longbench_qasper leaves 1,407 tokens"):
        longbench.make_prompts("longbench_qasper", LONG, 4, tokenizer, _materials(tree, longbench_prompt=1500))
    with pytest.raises(UserError, match="at 150 tokens: an answer of 128 leaves no room"):
        longbench.make_prompts("longbench_qasper", 150, 4, tokenizer, _materials(tree))


def test_what_grows_when_put_together_is_cut_again():
    """Two halves of one word are more tokens than the word was; LongBench lets that pass its own limit."""

    class Growing:
        def __call__(self, text, **_):
            return SimpleNamespace(input_ids=list(range(len(text) + (5 if "ad" in text else 0))))

        def decode(self, ids, **_):
            return "".join("abcd"[i % 4] for i in ids)

    text, tokens = longbench.cut_in_the_middle("abcd" * 20, 30, Growing())
    assert tokens == len(Growing()(text).input_ids) <= 30


def test_answers_of_longbench_score_as_its_own_code_scores_them():
    def score(name, prediction, *answers, classes=()):
        sample = {"outputs": list(answers), "classes": list(classes)}
        return longbench.score_answer(f"longbench_{name}", prediction, sample)

    assert score("qasper", "The Answer, is 42", "no", "answer 42") == pytest.approx(0.8)
    # The first line that is not empty: lm-eval stops at the first break and has nothing.
    assert score("trec", "\n\nNumber\nHuman", "Number", classes=["Number", "Human"]) == 1.0
    assert score("trec", "Number or Human", "Number", classes=["Number", "Human"]) == 0.5
    assert score("triviaqa", "\nParis\nLondon", "Paris") == 1.0
    assert score("samsum", "a b\nc", "a b") > 0.99 > score("gov_report", "a b\nc d e f", "a b")
    # A line of blanks is a line, once the breaks before it are gone.
    assert score("lcc", "\n# note\nx = 1\ny", "x = 1") == 1.0
    assert score("lcc", "\n   \nx = 1", "x = 1") < 1.0
    assert score("passage_count", "3 or 4", "3") == 0.5
    assert score("passage_retrieval_en", "Paragraph 7", "Paragraph 7") == 1.0


def test_all_of_longbench_is_read_by_who_reads(tree, tokenizer):
    for name in ("qasper", "triviaqa", "samsum", "trec"):
        task = f"longbench_{name}"
        samples = open_samples(task, LENGTH, 2, tokenizer, _materials(tree))
        assert samples.identity["group"] == longbench.group_name(task)
        for right, expected in ((True, 1.0), (False, 0.0)):

            def answer(prompts, room, on_batch, name=name, right=right):
                texts = [tokenizer.decode(ids) for ids in prompts]
                said = [f"{name}{text.split(' is called')[0][-1]}" if right else "" for text in texts]
                return [tokenizer(text, add_special_tokens=False).input_ids for text in said]

            answers, _ = run_task(samples, task, tokenizer, [], answer)
            assert [answer.score for answer in answers] == pytest.approx([expected] * 2, abs=1e-6)


def test_samsum_ends_at_a_line_break_that_is_not_its_first_token(tokenizer):
    assert longbench.newline_stops("longbench_samsum", tokenizer) == tokenizer("\n").input_ids
    assert not longbench.newline_stops("longbench_trec", tokenizer)
    model = tiny_model("qwen3", max_position_embeddings=256).eval()
    prompts = [[1, 2, 3], [4, 5]]
    free = Generator(model, 10_000, []).answers(prompts, 4)
    stop = free[0][0]
    assert Generator(model, 10_000, [stop]).answers(prompts, 4)[0] == []
    with torch.no_grad():
        logits = model(torch.tensor([prompts[0]])).logits[0, -1]
    logits[stop] = -torch.inf
    assert Generator(model, 10_000, [stop], opens=True).answers(prompts, 4)[0][0] == int(logits.argmax())


def _mmlu_by_hand(shots: int, test: int) -> str:
    """hendrycks/test, evaluate_hf.py, of the questions of the fixture."""

    def ask(split: str, i: int, solved: bool) -> str:
        lines = [f" What is {i}, {split}? ", f"A. {i}", "B. two, or 2", "C. three", "D. four", "Answer:"]
        return "\n".join(lines) + (f" {'ABCD'[i % 4]}\n\n" if solved else "")

    head = "The following are multiple choice questions (with answers) about  abstract algebra.\n\n"
    return head + "".join(ask("dev", i, True) for i in range(shots)) + ask("test", test, False)


def test_mmlu_asks_as_its_own_code_and_drops_shots_that_do_not_fit(tree, tokenizer):
    made = choices.make_choices(SUBJECT, LENGTH, 4, tokenizer, _materials(tree))
    assert [sample["prompt"] for sample in made] == [_mmlu_by_hand(5, i) for i in range(4)]
    assert made[1]["choices"] == [" A", " B", " C", " D"]
    assert [sample["answer"] for sample in made] == [0, 1, 2, 3]
    few = choices.make_choices(SUBJECT, 400, 1, tokenizer, _materials(tree))[0]
    assert 0 < few["shots"] < 5
    assert few["prompt"] == _mmlu_by_hand(few["shots"], 0)
    assert few["length"] <= 400 < len(_mmlu_by_hand(few["shots"] + 1, 0)) + 3
    with pytest.raises(UserError, match="at 100 tokens: question 1 alone is longer"):
        choices.make_choices(SUBJECT, 100, 1, tokenizer, _materials(tree))


def test_hellaswag_is_lm_evals_and_pairs_are_cut_where_it_cuts_them(tree, tokenizer):
    from lm_eval.api.model import TemplateLM

    made = choices.make_choices("hellaswag", LENGTH, 6, tokenizer, _materials(tree))
    assert made[3]["prompt"] == "Baking: A cook takes 3 eggs. She"
    assert made[3]["choices"][2] == " sings ."
    assert [sample["answer"] for sample in made] == [0, 1, 2, 3, 0, 1]
    double = SimpleNamespace(backend="causal", tok_encode=lambda text: tokenizer(text).input_ids)
    for sample in [*made, made[0] | {"prompt": "It ends with blanks  "}]:
        cut = [TemplateLM._encode_pair(double, sample["prompt"], choice) for choice in sample["choices"]]
        assert choices.encode_pairs(sample, tokenizer) == cut
    # Over its length, an ending that is long wins; the likelihood alone prefers the short one.
    task = choices._library_task("hellaswag", _materials(tree).published("hellaswag"), 6)
    document = list(task.eval_docs)[1]
    for likelihoods in ([-9.0, -20.0, -8.0, -7.0], [-1.0, -50.0, -2.0, -3.0]):
        told = task.process_results(document, [(of, False) for of in likelihoods])
        points, plain = choices.score_choices("hellaswag", made[1], likelihoods)
        assert (points, plain) == (told["acc_norm"], told["acc"])


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("mistral", {"sliding_window": 16})])
def test_log_likelihoods_are_those_of_each_pair_alone(family, changes):
    model = tiny_model(family, max_position_embeddings=256, **changes).eval()
    draw = random.Random(0)
    base = [draw.randrange(256) for _ in range(50)]
    pairs = [
        (base[:cut], [draw.randrange(256) for _ in range(more)]) for cut, more in ((40, 1), (40, 1), (40, 4), (1, 3))
    ]
    pairs += [(base[:44], base[44:46]), (base[:40], base[40:46]), (base[:30], base[30:46])]  # one text, cut elsewhere
    works = []
    found = Generator(model, 1, []).log_likelihoods(pairs, lambda done, work: works.append(work))
    for (context, after), log_p in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + after])).logits[0].double().log_softmax(-1)
        alone = sum(float(logits[len(context) + i - 1, token]) for i, token in enumerate(after))
        # float32: some roundings of each logit
        assert log_p == pytest.approx(alone, abs=2e-5)
    if family == "qwen3":
        assert sum(work.computed_tokens for work in works) < sum(work.prompt_tokens for work in works) / 2


def test_who_knows_is_right_and_an_anchor_stands_before_each_prompt(tree, tokenizer):
    for task in (SUBJECT, "hellaswag"):
        samples = SampleSet(choices.make_choices(task, LENGTH, 4, tokenizer, _materials(tree)), {}, "")
        for knows in (True, False):
            seen = []

            def likelihoods(pairs, on_batch, samples=samples, seen=seen, knows=knows):
                seen += pairs
                right = [i == sample["answer"] for sample in samples.samples for i in range(4)]
                return [-1.0 if is_right == knows else -1000.0 for is_right in right]

            answers, _ = run_choices(samples, task, tokenizer, [256], likelihoods)
            assert [answer.score for answer in answers] == [float(knows)] * 4
            assert {context[0] for context, _ in seen} == {256}


def test_what_is_missing_is_not_run_and_what_is_damaged_is_one_line(tree, tokenizer, published, tmp_path):
    for task in (*group_of("longbench"), SUBJECT, "hellaswag"):
        name = task.partition("_")[0]
        with pytest.raises(MissingMaterialError, match=f"{name} is not set"):
            open_samples(task, LENGTH, 1, tokenizer, _materials(tree, **{name: None}))
    with pytest.raises(MissingMaterialError, match=r"has no vcsum\.jsonl"):
        open_samples("longbench_vcsum", LENGTH, 1, tokenizer, _materials(tree))
    with pytest.raises(MissingMaterialError, match=r"has no test/anatomy_test\.csv"):
        open_samples("mmlu_anatomy", LENGTH, 1, tokenizer, _materials(tree))

    def told(task, name, content, said):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        benchmark = task.partition("_")[0]
        with pytest.raises(UserError, match=said):
            open_samples(task, LENGTH, 1, tokenizer, _materials(tree, **{benchmark: {"folder": str(tmp_path)}}))

    told(
        "longbench_lcc",
        "lcc.jsonl",
        b'{"input": 1',
        r"lcc\.jsonl: is damaged; copy it again from LongBench's data\.zip",
    )
    told("longbench_lcc", "lcc.jsonl", b'{"input": "a", "context": "b", "answers": []}\n', "record 1: has no answers")
    told("longbench_lcc", "lcc.jsonl", b"[1]\n", "record 1: has no input")
    for answer in (b"", b"BC"):  # neither is one of four letters
        told(SUBJECT, f"test/{SUBJECT.removeprefix('mmlu_')}_test.csv", b"q,a,b,c,d," + answer, "damaged|copy it again")
    with pytest.raises(ValidationError, match=r"longbench_prompt\n.*greater than or equal to 64"):
        _materials(tree, longbench_prompt=32)
    told("longbench_lcc", "lcc.jsonl", b"\n", "longbench_lcc has no questions")
    told("longbench_lcc", "lcc.jsonl", b"\xff", "is damaged")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "abstract_algebra_dev.csv").write_text("q,1,2,3,4,A\n")
    told(SUBJECT, "test/abstract_algebra_test.csv", b"q,1,2,3,4,E\n", "is damaged; copy it again from MMLU")
    told(SUBJECT, "test/abstract_algebra_test.csv", b"q,1,2,3\n", "is damaged")
    told(SUBJECT, "test/abstract_algebra_test.csv", b"q,1,2,3,4,A\n", "has 1 solved questions of mmlu_shots 5")
    line = {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d"] * 4, "label": ""}
    told("hellaswag", "hellaswag_val.jsonl", json.dumps(line).encode(), "label '' names none of four endings")


def test_another_lm_eval_or_a_package_that_is_missing_is_one_line(tree, tokenizer, monkeypatch):
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.delattr(ConfigurableTask, "fewshot_context")
    with pytest.raises(UserError, match=r"hellaswag: lm-eval's task is not the one of 0\.4\.13"):
        choices.make_choices("hellaswag", LENGTH, 1, tokenizer, _materials(tree))
    import lm_eval.tasks.longbench._generate_config as config

    monkeypatch.delattr(config, "dataset2prompt")
    with pytest.raises(UserError, match=r"longbench: lm-eval's tasks are not those of 0\.4\.13"):
        longbench.prompt_template("lcc")
    import importlib

    real = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: (_ for _ in ()).throw(ImportError("please install")) if name.endswith("metrics") else real(name),
    )
    with pytest.raises(UserError, match=r"jieba, fuzzywuzzy and rouge: pip install 'anchorline\[longbench\]'"):
        longbench.metric_of("longbench_qasper")


TASKS_OF = {"longbench": "longbench_qasper", "mmlu": SUBJECT, "hellaswag": "hellaswag"}


def _as_on_the_hub(tree, folder) -> dict[str, dict[str, datasets.DatasetDict]]:
    """Each benchmark's data sets by configuration, with the fields and types that they have on the hub."""

    def table(records, **casts):
        found = datasets.Dataset.from_list(records)
        return found.cast(datasets.Features(found.features | casts))

    longbench_records, hellaswag_records = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (folder / "longbench" / "data" / "qasper.jsonl", folder / "hellaswag" / "hellaswag_val.jsonl")
    )
    asked = [{"question" if name == "input" else name: of[name] for name in of} for of in longbench_records]
    mmlu = _materials(tree).published(SUBJECT)
    letters = {"answer": datasets.ClassLabel(names=list("ABCD"))}
    splits = {"test": table(mmlu.questions, **letters), "dev": table(mmlu.shots, **letters)}
    endings = [of | {"label": str(of["label"])} for of in hellaswag_records]
    return {
        "longbench": {"qasper": datasets.DatasetDict(test=table(asked))},
        "mmlu": {SUBJECT.removeprefix("mmlu_"): datasets.DatasetDict(splits)},
        "hellaswag": {"": datasets.DatasetDict(validation=table(endings), train=table(endings[:1]))},
    }


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_data_sets_are_read_as_the_benchmarks_own_files_are(tree, published, tmp_path, monkeypatch, kind):
    """From folders as the hub has them (parquet, configurations in README.md), and as `save_to_disk` leaves them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from_files = _materials(tree)
    for benchmark, subsets in _as_on_the_hub(tree, published).items():
        place = tmp_path / benchmark
        for name, splits in subsets.items():
            if kind == "saved":
                splits.save_to_disk(place / name)
                continue
            for split, table in splits.items():
                (place / (name or "data")).mkdir(parents=True, exist_ok=True)
                table.to_parquet(place / (name or "data") / f"{split}-00000-of-00001.parquet")
            files = [{"split": split, "path": f"{name}/{split}-*"} for split in splits]
            head = yaml.safe_dump({"configs": [{"config_name": name, "data_files": files}]})
            (place / "README.md").write_text(f"---\n{head}---\n" if name else "")
        own = {name: from_files.published(TASKS_OF[benchmark]).__dict__[name] for name in ("questions", "shots")}
        materials = _materials(tree, **{benchmark: {"dataset": str(place)}})
        found = materials.published(TASKS_OF[benchmark])
        assert {"questions": found.questions, "shots": found.shots} == own
        assert found.digest == from_files.published(TASKS_OF[benchmark]).digest  # so samples are the same
        other = {"longbench": "longbench_trec", "mmlu": "mmlu_anatomy"}.get(benchmark)
        if other is not None:
            with pytest.raises(UserError, match=rf"^{benchmark}: dataset '{place}' \(subset '.*', split 'test'\)"):
                materials.published(other)


def test_groups_stand_for_their_tasks_and_typos_are_told():
    tasks = Suite.model_validate({"tasks": ["longbench_en", "mmlu", "hellaswag", "fwe"]}).tasks
    assert len(tasks) == 16 + 57 + 1 + 1
    assert "longbench_vcsum" not in tasks
    for name, near in (("longbench_lc", "longbench_lcc"), ("mmlu_anatomi", "mmlu_anatomy"), ("helaswag", "hellaswag")):
        with pytest.raises(ValueError, match=f"did you mean {near}"):
            Suite.model_validate({"tasks": [name]})
    with pytest.raises(ValueError, match="give exactly one of folder"):
        Suite.model_validate({"tasks": ["mmlu"], "mmlu": {}})


def test_vllm_is_asked_through_lm_evals_class_and_is_told_where_it_is_missing(tree, tmp_path, monkeypatch):
    for save in (tiny_model("qwen3", max_position_embeddings=LENGTH), tiny_tokenizer()):
        save.save_pretrained(tmp_path / "model")
    tasks = {"tasks": ["hellaswag", "longbench_samsum"], "samples": 2, "backend": "vllm"}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(tree | tasks | {"vllm": {"tensor_parallel_size": 2}}))

    def call(*more):
        given = ["evaluate", str(tmp_path / "model"), "--suite", str(tmp_path / "suite.yaml"), "--lengths", "1024"]
        return CliRunner().invoke(app, [*given, *more])

    missing = call("tasks=[hellaswag]")
    assert missing.exit_code == 2
    assert missing.stderr.strip().splitlines()[-1].endswith("not installed: pip install vllm, or set backend to torch")
    with pytest.raises(ValueError, match="vllm belongs to backend vllm"):
        Suite.model_validate({"tasks": ["fwe"], "vllm": {"seed": 1}})

    made, asked = [], []

    class Double:
        """Takes what lm-eval 0.4.13's VLLM takes."""

        def __init__(self, pretrained, dtype="auto", max_model_len=None, seed=0, tensor_parallel_size=1, **more):
            made.append({"dtype": dtype, "max_model_len": max_model_len, "seed": seed, **more})
            assert (pretrained, tensor_parallel_size) == (str(tmp_path / "model"), 2)

        def _model_generate(self, requests, generate=False, sampling_params=None):
            asked.append((requests, sampling_params))
            said = SimpleNamespace(token_ids=tiny_tokenizer()("samsum0\n").input_ids)
            return [SimpleNamespace(outputs=[said]) for _ in requests]

        def _loglikelihood_tokens(self, requests, disable_tqdm=False):
            return [(-float(len(after)), True) for _, _, after in requests]

    monkeypatch.setattr(engines, "vllm_classes", lambda: (Double, lambda **settings: settings))
    monkeypatch.setattr(longbench, "metric_of", lambda task: lambda text, answer, **_: float(text == answer))
    done = call("--anchor")
    assert done.exit_code == 0, done.output
    assert made == [{"dtype": "float32", "max_model_len": LENGTH, "seed": 42, "enable_prefix_caching": True}]
    ((prompts, sampling),) = asked
    assert {prompt[0] for prompt in prompts} == {256}
    stops = [257, *tiny_tokenizer()("\n").input_ids]
    assert sampling == {
        **{"temperature": 0, "max_tokens": 128, "min_tokens": 1, "stop_token_ids": stops, "detokenize": False}
    }
    result = read_result(tmp_path / "model-evaluation" / "model" / "longbench_samsum-1024.json")
    assert (result.attention, result.answers[0].score) == ("causal, vllm", 1.0)
    assert result.answers[0].prediction == "samsum0"
    assert "backend vllm does not give it" in call("perplexity={source: {demo: speeches}}").stderr


def test_short_benchmarks_are_evaluated_and_compared(tree, tmp_path):
    for name, family in (("a", "qwen3"), ("b", "llama")):
        tiny_model(family, max_position_embeddings=LENGTH).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    tasks = [SUBJECT, "mmlu_anatomy", "hellaswag", "longbench_vcsum"]
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(tree | {"tasks": tasks}))
    for name in ("a", "b"):
        given = ["evaluate", str(tmp_path / name), "--suite", str(tmp_path / "suite.yaml"), "--lengths", "512,1024"]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.output
        assert "mmlu_anatomy 1,024: not run, mmlu.folder" in done.stderr
    result = read_result(tmp_path / "a-evaluation" / "model" / "hellaswag-1024.json")
    assert len(result.answers) == 4
    assert result.computed_tokens < result.prompt_tokens
    assert not (tmp_path / "a-evaluation" / "model" / "hellaswag-512.json").exists()
