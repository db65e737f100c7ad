"""RULER's samples: counted, placed, answered and kept as they must be; a model that reads scores 100, a mute one 0."""

import collections
import json
import random
import re
import string
from pathlib import Path

import pytest
import yaml
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.evaluation import ruler
from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.evaluate import run_task
from torchtrain.evaluation.generation import AnswerCost
from torchtrain.evaluation.materials import Materials, MissingMaterialError
from torchtrain.evaluation.results import read_result
from torchtrain.evaluation.ruler import NEEDLES, _seeded, library, make_samples, prompt_of
from torchtrain.evaluation.samples import SampleSet, open_samples
from torchtrain.evaluation.suite import TASKS, Suite
from torchtrain.tests.ruler_fixtures import few_nouns  # noqa: F401
from torchtrain.tests.tiny import tiny_model

LENGTH, SEED = 1536, 42
CITIES = ["Arlen", "Bornholt", "Cassel", "Dunmore", "Elvas", "Fermo", "Gotha", "Huesca"]


def _prose(words: int) -> str:
    """Sentences of six plain words."""
    draw = random.Random(0)
    names = ["".join(draw.choices(string.ascii_lowercase[:12], k=4)) for _ in range(60)]
    sentences = (" ".join(draw.choices(names, k=6)).capitalize() + "." for _ in range(words // 6))
    return " ".join(sentences)


@pytest.fixture(scope="module")
def tokenizer():
    """A small byte-level BPE that knows the templates' and the haystack's words; BOS before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    with library() as lm:
        texts = [lm.niah.TEMPLATE, lm.vt.TEMPLATE, lm.cwe.TEMPLATE, lm.fwe.TEMPLATE, lm.qa.TEMPLATE]
        texts += [_prose(3000), " ".join(lm.cwe.WORDS[:2000]), lm.prepare_niah.get_haystack("repeat")]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A suite's tree with every material: prose in a folder, questions in the layout of the published files."""
    folder = tmp_path_factory.mktemp("materials")
    (folder / "prose").mkdir()
    (folder / "prose" / "a.txt").write_text(_prose(3000))
    paragraphs = [
        {
            "context": f"{city} is a town. Its river is called {city[::-1].lower()}.",
            "qas": [
                {
                    "question": f"Which river is in {city}?",
                    "answers": [{"text": "nowhere"}, {"text": city[::-1].lower()}],
                    "is_impossible": False,
                },
                {"question": f"Who rules {city}?", "answers": [], "is_impossible": True},
            ],
        }
        for city in CITIES
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    context = [[city, [f"{city} is a town.", f" Its river is called {city[::-1].lower()}."]] for city in CITIES]
    questions = [
        {"question": f"Which river is in {city}?", "answer": city[::-1].lower(), "context": context} for city in CITIES
    ]
    (folder / "hotpot.json").write_text(json.dumps(questions))
    return {
        "tasks": [task for task in TASKS if task != "vt"],
        "samples": 4,
        "cache": str(folder / "cache"),
        "haystack": {"folder": str(folder / "prose"), "sentences": "untrained"},
        "squad": str(folder / "squad.json"),
        "hotpotqa": str(folder / "hotpot.json"),
    }


@pytest.fixture(scope="module")
def materials(settings):
    return Materials(Suite.model_validate(settings))


@pytest.fixture(scope="module")
def made(tokenizer, materials):
    """Samples of every task."""
    return {task: make_samples(task, LENGTH, 6, SEED, tokenizer, materials) for task in TASKS}


def _needles(text: str) -> list[tuple[str, str]]:
    return re.findall(r"special magic \S+ for (\S+) is: (\S+)\.(?=\s|$)", text)


def _read(prompt: str) -> str:
    """Answer a prompt by reading it."""
    if found := re.search(r"The special magic \S+ for (.+) mentioned in the provided text (?:is|are)$", prompt):
        asked = re.split(r", and |, ", found[1])
        return ", ".join(value for key, value in _needles(prompt) if key in asked)
    if found := re.search(r"variables are ass\w+ the value (\d+), they are: $", prompt):
        own = prompt[prompt.rindex("Memorize and track") :]
        known = re.findall(rf"VAR (\w+) = {found[1]}\b", own)
        for name, of in re.findall(r"VAR (\w+) = VAR (\w+)", own):
            known += [name] if of in known else []
        return " ".join(known)
    if "numbered list of words" in prompt:
        own = prompt[prompt.rindex("Below is") : prompt.rindex("Question:")]
        return " ".join(word for word, _ in collections.Counter(re.findall(r"\d+\. (\S+)", own)).most_common(10))
    if "coded text" in prompt:
        words = prompt[prompt.index("coded words. ") + 13 : prompt.rindex("\nQuestion")].split()
        return " ".join(word for word, _ in collections.Counter(w for w in words if w != "...").most_common(3))
    city = re.search(r"Which river is in (\w+)\? Answer:$", prompt)
    assert city
    return re.search(rf"{city[1]} is a town\. Its river is called (\w+)\.", prompt)[1]


def _double(tokenizer, read):
    def answers(prompts, room, on_batch):
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]
        on_batch(len(prompts), AnswerCost(0, 0, 0))
        return [tokenizer(read(text), add_special_tokens=False).input_ids[:room] for text in texts]

    return answers


@pytest.mark.parametrize("task", TASKS)
def test_who_reads_scores_everything_and_who_says_nothing_nothing(task, made, tokenizer):
    samples = SampleSet(made[task], {}, "")
    for read, expected in ((_read, 1.0), (lambda _: "", 0.0)):
        answers, _ = run_task(samples, task, tokenizer, [], _double(tokenizer, read))
        assert [answer.score for answer in answers] == [expected] * len(made[task])


@pytest.mark.parametrize("task", TASKS)
def test_prompt_anchor_and_answer_never_exceed_the_length(task, made, tokenizer):
    for sample in made[task]:
        tokens = len(tokenizer(prompt_of(sample)).input_ids)
        assert tokens + 1 + TASKS[task][0] == sample["length"] <= LENGTH
    if not task.startswith("qa"):  # whose documents here are few
        assert max(sample["length"] for sample in made[task]) > LENGTH // 2


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_seeded_alone_and_leaves_the_process_as_it_was(task, made, tokenizer, materials):
    random.seed(1)
    before = random.getstate()
    assert make_samples(task, LENGTH, 2, SEED, tokenizer, materials) == made[task][:2]
    assert random.getstate() == before
    if not task.startswith("qa"):
        assert make_samples(task, LENGTH, 2, SEED + 1, tokenizer, materials) != made[task][:2]


def test_every_constant_of_lm_evals_that_shuffles_follows_the_seed(tokenizer, materials):
    with library() as lm:
        before = lm.fwe.SEED, lm.qa.SEED
        with _seeded(7, lm):
            assert (lm.fwe.SEED, lm.qa.SEED) == (7, 7)
        assert (lm.fwe.SEED, lm.qa.SEED) == before == (42, 42)
    first, other = (make_samples("niah_multikey_1", LENGTH, 1, seed, tokenizer, materials)[0] for seed in (42, 7))
    assert first["input"] != other["input"]


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_are_those_of_lm_eval(task, tokenizer, materials, monkeypatch):
    """Byte by byte, at a length where lm-eval, which does not count the answer's prefix, has room for it."""
    with library() as lm:
        essay = NEEDLES[task]["type_haystack"] == "essay"
        haystack = materials.haystack if essay else lm.prepare_niah.get_haystack(NEEDLES[task]["type_haystack"])
        monkeypatch.setattr(lm.prepare_niah, "cached_sent_tokenize", ruler.sentence_splitter("untrained"))
        equal = []
        for length in (1400, LENGTH, 1600):
            random.seed(SEED)
            stock = lm.prepare_niah.generate_samples(
                haystack,
                TOKENIZER=tokenizer,
                max_seq_length=length,
                template=lm.niah.TEMPLATE,
                num_samples=3,
                **NEEDLES[task],
            )
            ours = make_samples(task, length, 3, SEED, tokenizer, materials)
            equal.append([sample | {"length": 0} for sample in stock] == [sample | {"length": 0} for sample in ours])
        assert any(equal)


def test_frequent_words_and_questions_are_those_of_lm_eval(tokenizer, materials, made):
    with library() as lm:
        random.seed(SEED)
        stock = lm.fwe.sys_kwext(lambda text: tokenizer(text + "."), LENGTH - 50, num_samples=3)
        for own, other in zip(made["fwe"], stock, strict=False):
            assert (own["input"], own["gen_prefix"], own["outputs"]) == (
                other["input"],
                other["gen_prefix"],
                other["outputs"],
            )
    for task in ("qa_1", "qa_2"):
        assert [sample["gen_prefix"] for sample in made[task]] == ["Answer:"] * len(made[task])


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needles_lie_at_every_depth_alike(task, tokenizer, materials):
    depths = []
    for sample in make_samples(task, LENGTH, 120, SEED, tokenizer, materials):
        text = sample["input"]
        begin, end = text.index("\n"), text.rindex("\nWhat")
        depths.append((text.index(sample["outputs"][0]) - begin) / (end - begin))
    # Kolmogorov's distance of 120 draws stays below this with 99 per cent; the 40 depths add as much as one of them.
    bound = 1.63 / len(depths) ** 0.5 + 1 / 40
    assert stats.kstest(depths, "uniform").statistic < bound


def test_answers_stand_in_their_own_prompt_as_often_as_they_should(made):
    for task in NEEDLES:
        for sample in made[task]:
            assert [sample["input"].count(answer) for answer in sample["outputs"]] == [1] * len(sample["outputs"])
    for task in ("vt", "vt_2024_10"):
        for sample in made[task]:
            own = sample["input"][sample["input"].rindex("Memorize") :]
            # Each variable is set once and read once, but for the last, which nothing reads.
            counts = [len(re.findall(rf"VAR {name}\b", own)) for name in sample["outputs"]]
            assert counts == [2, 2, 2, 2, 1]
    for sample in made["cwe"]:
        own = re.findall(r"\d+\. (\S+)", sample["input"][sample["input"].rindex("Below is") :])
        counts = collections.Counter(own)
        assert [counts[word] for word in sample["outputs"]] == [6] * 10
        assert {count for word, count in counts.items() if word not in sample["outputs"]} == {1}
    for sample in made["fwe"]:
        counts = collections.Counter(sample["input"].split())
        ranks = sorted((count for word, count in counts.items() if len(word) == 6 and word.isalpha()), reverse=True)
        assert [counts[word] for word in sample["outputs"]] == ranks[:3]
        assert ranks[2] > ranks[3]
    for task in ("qa_1", "qa_2"):
        for sample in made[task]:
            assert sample["outputs"][-1] in sample["input"]


def test_nothing_of_a_sample_stands_in_another(made):
    for task in [*NEEDLES, "vt", "vt_2024_10"]:
        for sample in made[task]:
            others = [other for other in made[task] if other is not sample]
            assert not [a for a in sample["outputs"] for other in others if re.search(rf"\b{a}\b", prompt_of(other))]


def test_the_example_of_vt_is_one_for_all_in_2024_and_another_each_time_now(made):
    def examples(task: str) -> set[str]:
        return {s["input"][: s["input"].rindex("Memorize")] for s in made[task]}

    assert len(examples("vt_2024_10")) == 1
    assert len(examples("vt")) == len(made["vt"])
    (example,) = examples("vt_2024_10")
    assert example.startswith(" Memorize and track the chain(s) of variable assignment hidden in the following text. ")
    assert " in the text Answer: According" in example  # the last word falls where the template is folded
    assert example.endswith("\n\n\n\n")
    assert "assigned the value" in made["vt"][0]["gen_prefix"]
    assert "assgined the value" in made["vt_2024_10"][0]["gen_prefix"]


def test_common_words_has_its_example(made):
    for sample in made["cwe"]:
        example, _, own = sample["input"].partition("\nBelow is")
        assert own
        assert example.startswith("Below is")
        answers = re.findall(r"\d+\. (\S+)", example[example.index("in the list are:") :])
        counts = collections.Counter(re.findall(r"\d+\. (\S+)", example[: example.index("Question:")]))
        assert [counts[word] for word in answers] == [3] * 10


def test_samples_are_made_once_and_damage_is_one_line(tokenizer, materials, monkeypatch):
    first = open_samples("vt", 1024, 2, tokenizer, materials)
    monkeypatch.setattr("torchtrain.evaluation.samples.make_samples", None)  # nothing is made again
    assert open_samples("vt", 1024, 2, tokenizer, materials) == first
    (file,) = Path(materials.suite.cache).glob("ruler/vt-1024-*/samples.jsonl")
    file.write_bytes(file.read_bytes().replace(b"VAR", b"VAN", 1))
    with pytest.raises(UserError, match=r"samples.jsonl: its content has changed .*; remove .* made again"):
        open_samples("vt", 1024, 2, tokenizer, materials)
    (manifest,) = Path(materials.suite.cache).glob("ruler/vt-1024-*/manifest.json")
    manifest.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        open_samples("vt", 1024, 2, tokenizer, materials)


def test_what_is_missing_or_too_small_is_said(tokenizer, materials, settings, monkeypatch):
    bare = Materials(Suite.model_validate(settings | {"haystack": None, "squad": None, "hotpotqa": None}))
    for task, said in (("niah_single_2", "haystack"), ("qa_1", "squad"), ("qa_2", "hotpotqa")):
        with pytest.raises(MissingMaterialError, match=f"{said} is not set"):
            make_samples(task, LENGTH, 1, SEED, tokenizer, bare)
    with pytest.raises(UserError, match="words are too few for a length of 65,536 tokens"):
        make_samples("niah_single_2", 65_536, 1, SEED, tokenizer, materials)
    with pytest.raises(UserError, match="vt_2024_10 at 512 tokens: leaves no room"):
        make_samples("vt_2024_10", 512, 1, SEED, tokenizer, materials)
    with library() as lm:
        monkeypatch.delattr(lm.cwe, "generate_input_output")
        with pytest.raises(UserError, match=r"cwe: lm-eval's generator is not the one of 0\.4\.13"):
            make_samples("cwe", LENGTH, 1, SEED, tokenizer, materials)


def test_the_tasks_of_lm_eval_ask_the_same(settings, tokenizer, tmp_path):
    """Through lm-eval's own task manager, as `lm_eval --include_path` does."""
    from lm_eval.tasks import TaskManager

    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().config.save_pretrained(tmp_path / "model")
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(settings | {"samples": 2}))
    metadata = {"pretrained": str(tmp_path / "model"), "length": LENGTH, "suite": str(tmp_path / "suite.yaml")}
    folder = Path(ruler.__file__).parent / "tasks"
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    names = [f"anchorline_{task}" for task in TASKS]
    assert set(names) <= set(manager.all_tasks)
    for name, task in manager.load(names)["tasks"].items():
        room, metric = TASKS[name.removeprefix("anchorline_")]
        task.build_all_requests(limit=2, rank=0, world_size=1)
        for request in task.instances:
            assert request.args[0] == prompt_of(request.doc)
            assert request.args[1]["max_gen_toks"] == room
            assert task.process_results(request.doc, [request.doc["outputs"][-1]])["score"] == (
                1.0 if metric == "any" else 1 / len(request.doc["outputs"])
            )


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=1200, max_position_embeddings=LENGTH, eos_token_id=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def call(settings, tmp_path):
    settings = settings | {"tasks": ["niah_multiquery", "fwe", "qa_1"], "squad": None, "samples": 3}
    settings["perplexity"] = {"source": {"demo": "speeches"}, "documents": 2, "stride": 300}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(settings))

    given = ["evaluate", "--suite", str(tmp_path / "suite.yaml"), "--lengths", "1024"]
    return lambda *more: CliRunner().invoke(app, [*given, *map(str, more)])


def _line(result) -> str:
    assert result.exit_code == 2, result.output
    return result.stderr.strip().splitlines()[-1]


def test_evaluate_goes_on_where_it_stopped_and_tells_what_did_not_run(call, model, tmp_path):
    out = tmp_path / "out"
    first = call(model, "--out", out)
    assert first.exit_code == 0, first.output
    assert "qa_1 1,024: not run, squad is not set" in first.stderr
    assert "none: 11 did not run" in first.stdout  # of the 13
    files = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert {path.name for path in files} == {f"{t}-1024.json" for t in ("niah_multiquery", "fwe", "qa_1", "perplexity")}
    result = read_result(out / "model" / "niah_multiquery-1024.json")
    assert result.computed_tokens < result.prompt_tokens
    (out / "model" / "fwe-1024.json").unlink()
    again = call(model, "--out", out)
    assert again.stderr.count("finished before") == 1
    kept = {path: content for path, content in files.items() if not path.name.startswith("fwe")}
    assert {path: path.read_bytes() for path in kept} == kept
    fwe = read_result(out / "model" / "fwe-1024.json")
    before = json.loads(files[out / "model" / "fwe-1024.json"])
    assert [answer.prediction for answer in fwe.answers] == [answer["prediction"] for answer in before["answers"]]
    assert "haystack is not set" in call(model, "--out", out, "tasks=[niah_multiquery]", "haystack=null").stderr
    assert {path: path.read_bytes() for path in kept} == kept  # scores are not replaced by a task that did not run
    other = call(model, "--out", out, "--samples", "2")
    assert "was measured with other samples" in _line(other)
    assert "loading" not in other.stderr  # what is refused is refused before anything is computed
    with_anchor = call(model, "--out", out, "--anchor", "tasks=[fwe,cwe]")
    assert "was measured with other anchor" in _line(with_anchor)
    assert not (out / "model" / "cwe-1024.json").exists()
    assert call(model, "--out", tmp_path / "few", "--samples", "2", "perplexity=null").exit_code == 0
    (out / "model" / "perplexity-1024.json").unlink()
    with pytest.raises(UserError, match=r"out and few were not measured alike: .* has other samples"):
        compare([out, tmp_path / "few"])


def test_an_anchor_is_put_before_prompts_that_have_none(made, tokenizer):
    seen = []

    def answers(prompts, room, on_batch):
        seen.extend(prompts)
        return [[] for _ in prompts]

    run_task(SampleSet(made["fwe"], {}, ""), "fwe", tokenizer, [1], answers)
    assert {tuple(ids[:2]) for ids in seen} == {(1, 0)}
    seen.clear()
    run_task(SampleSet(made["fwe"], {}, ""), "fwe", tokenizer, [0], answers)
    assert {ids[0] for ids in seen} == {0}
    assert not [ids for ids in seen if ids[1] == 0]


def test_bad_input_is_one_line(call, model, tmp_path):
    assert "did you mean niah_single_1?" in _line(call(model, "tasks=[niah_singel_1]"))
    assert f"holds {LENGTH:,} positions" in _line(call(model, "--lengths", "4096"))
    assert "write whole numbers with commas" in _line(call(model, "--lengths", "4k"))
    assert "is not a run's folder" in _line(call(model, "--last", "2"))
    assert "perplexity.stride 512" in _line(call(model, "perplexity.stride=512"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in model.iterdir():
        if not path.name.startswith(("tokenizer", "special")):
            (bare / path.name).write_bytes(path.read_bytes())
    assert "bare': holds no tokenizer" in _line(call(bare, "--out", tmp_path / "o"))
    (tmp_path / "file").write_text("")
    unwritable = call(model, "--out", tmp_path / "file" / "o")
    assert "file: not a directory; choose a folder that can be written" in _line(unwritable)
    assert "loading" not in unwritable.stderr
    place = tmp_path / "o" / "model" / "fwe-1024.json"
    place.parent.mkdir(parents=True)
    for content in ("{", '{"task": "fwe"}', "[]"):
        place.write_text(content)
        assert str(place.name) in _line(call(model, "tasks=[fwe]", "--out", tmp_path / "o"))
