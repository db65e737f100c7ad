"""RULER's samples: counted, placed, answered and kept as they must be; a model that reads scores 100, a mute one 0."""

import collections
import json
import random
import re
import shutil
import string
from pathlib import Path

import lm_eval.tasks
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.evaluate import evaluate
from torchtrain.evaluation.measure import Checkpoint
from torchtrain.evaluation.results import Training, read_result
from torchtrain.evaluation.suite import IN_2024, TASKS, Suite, room_of
from torchtrain.evaluation.tasks import ruler
from torchtrain.evaluation.tasks.materials import CannotRunError, Materials
from torchtrain.evaluation.tasks.ruler import library, make_samples, open_samples, prompt_of, score
from torchtrain.modeling.prompts import NotedAnchor
from torchtrain.run.status import status_lines
from torchtrain.tests.ruler_fixtures import few_nouns  # noqa: F401
from torchtrain.tests.tiny import tiny_model

LENGTH, SEED = 1536, 42
EVERY = [*TASKS, *IN_2024]
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
        "tasks": [task for task in TASKS if task not in IN_2024.values()],
        "samples": 4,
        "cache": str(folder / "cache"),
        "haystack": {"texts": str(folder / "prose" / "*.txt"), "sentences": "untrained"},
        "squad": str(folder / "squad.json"),
        "hotpotqa": str(folder / "hotpot.json"),
    }


@pytest.fixture(scope="module")
def materials(settings):
    return Materials(Suite.model_validate(settings))


@pytest.fixture(scope="module")
def made(tokenizer, materials):
    """Samples of every task."""
    return {task: make_samples(task, LENGTH, 6, SEED, tokenizer, materials) for task in EVERY}


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


@pytest.mark.parametrize("task", EVERY)
def test_who_reads_scores_everything_within_the_length(task, made, tokenizer):
    for sample in made[task]:
        assert score(sample, [_read(prompt_of(sample))]) == {"score": 1.0}
        assert score(sample, [""]) == {"score": 0.0}
        first = 1.0 if task.startswith("qa") else 1 / len(sample["outputs"])
        assert score(sample, [f" {sample['outputs'][-1].upper()}\x00"]) == {"score": first}
        tokens = len(tokenizer(prompt_of(sample)).input_ids)
        assert tokens + 1 + room_of(task) == sample["length"]  # with one token of anchor
        assert sample["length"] <= LENGTH + (room_of(task) if task == "fwe_2024_10" else 0)
        others = [prompt_of(other) for other in made[task] if other is not sample]
        if task.startswith("niah"):
            assert [sample["input"].count(answer) for answer in sample["outputs"]] == [1] * len(sample["outputs"])
        if task.startswith(("niah", "vt")):  # nothing of a sample tells of another
            assert not [a for a in sample["outputs"] for other in others if re.search(rf"\b{a}\b", other)]
    if not task.startswith("qa"):  # whose documents here are few
        assert max(sample["length"] for sample in made[task]) > LENGTH // 2
    assert task != "fwe_2024_10" or max(sample["length"] for sample in made[task]) > LENGTH


@pytest.mark.parametrize("task", EVERY)
def test_a_task_is_seeded_alone_and_leaves_the_process_as_it_was(task, made, tokenizer, materials):
    random.seed(1)
    before = random.getstate()
    assert make_samples(task, LENGTH, 2, SEED, tokenizer, materials) == made[task][:2]
    assert random.getstate() == before
    if not task.startswith("qa"):
        assert make_samples(task, LENGTH, 2, SEED + 1, tokenizer, materials) != made[task][:2]


def test_the_example_of_vt_is_one_for_all_in_2024_and_another_each_time_now(made):
    then, now = ({s["input"][: s["input"].rindex("Memorize")] for s in made[task]} for task in ("vt_2024_10", "vt"))
    assert (len(then), len(now)) == (1, len(made["vt"]))
    (example,) = then
    assert " in the text Answer: According" in example  # the last word falls where the template is folded
    assert "assigned the value" in made["vt"][0]["gen_prefix"]
    assert "assgined the value" in made["vt_2024_10"][0]["gen_prefix"]


def test_samples_are_made_once(tokenizer, materials):
    samples, identity = open_samples("vt", 1024, tokenizer, materials)
    (file,) = Path(materials.suite.cache).glob("ruler/vt-1024-*.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
    assert open_samples("vt", 1024, tokenizer, materials) == (samples[:1], identity)
    file.write_text("{")
    with pytest.raises(UserError, match=r"vt-1024-.*\.jsonl is damaged; remove it"):
        open_samples("vt", 1024, tokenizer, materials)


@pytest.mark.parametrize("task", ["vt", "vt_2024_10", "cwe", "fwe", "niah_multivalue"])
def test_a_length_that_leaves_no_room_is_the_reason_why_a_task_does_not_run(task, tokenizer, materials):
    with pytest.raises(CannotRunError, match=r"64 tokens leave no room; it needs ([0-9,]+) with this") as caught:
        make_samples(task, 64, 1, SEED, tokenizer, materials)
    least = int(re.search(r"needs ([0-9,]+)", str(caught.value))[1].replace(",", ""))
    assert make_samples(task, least, 1, SEED, tokenizer, materials)
    with pytest.raises(CannotRunError, match="leave no room"):
        make_samples(task, least - 128, 1, SEED, tokenizer, materials)


def test_what_is_missing_is_said(tokenizer, materials, settings, monkeypatch):
    bare = Materials(Suite.model_validate(settings | {"haystack": None, "squad": None, "hotpotqa": None}))
    for task, said in (("niah_single_2", "haystack"), ("qa_1", "squad"), ("qa_2", "hotpotqa")):
        with pytest.raises(CannotRunError, match=f"{said} is not set"):
            make_samples(task, LENGTH, 1, SEED, tokenizer, bare)
    with pytest.raises(UserError, match="words are too few for a length of 65,536 tokens"):
        make_samples("niah_single_2", 65_536, 1, SEED, tokenizer, materials)
    monkeypatch.setattr(ruler, "version", lambda _: "0.4.12")
    with pytest.raises(
        UserError, match=r"RULER needs lm_eval 0\.4\.13, whose generators make its samples: pip install"
    ):
        make_samples("cwe", LENGTH, 1, SEED, tokenizer, materials)


def test_a_question_without_an_answer_is_refused(tokenizer, settings, tmp_path):
    """An empty answer stands in whatever a model says."""
    asked = {"question": "q", "answers": [{"text": "a"}, {"text": ""}], "is_impossible": False}
    (tmp_path / "f.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [asked]}]}]}))
    materials = Materials(Suite.model_validate(settings | {"squad": str(tmp_path / "f.json")}))
    with pytest.raises(UserError, match=r"^qa_1: f\.json: answered question 1: has an empty answer"):
        make_samples("qa_1", LENGTH, 1, SEED, tokenizer, materials)


def test_lm_eval_asks_the_same_through_its_own_task_manager(settings, tokenizer, tmp_path):
    """As `lm_eval --include_path` does."""
    from lm_eval.tasks import TaskManager

    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().config.save_pretrained(tmp_path / "model")
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(settings | {"samples": 2}))
    metadata = {"pretrained": str(tmp_path / "model"), "length": LENGTH, "suite": str(tmp_path / "suite.yaml")}
    folder = Path(ruler.__file__).parent
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    assert {*EVERY, "ruler", "longbench_en"} <= set(manager.all_tasks)
    for name in EVERY:
        (task,) = manager.load([name])["tasks"].values()
        task.build_all_requests(limit=2, rank=0, world_size=1)
        for request in task.instances:
            assert request.args[0] == prompt_of(request.doc)
            assert request.args[1]["max_gen_toks"] == room_of(name)


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=1200, max_position_embeddings=LENGTH, eos_token_id=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def call(settings, tmp_path):
    settings = settings | {"tasks": ["niah_multiquery", "fwe", "qa_1"], "squad": None, "samples": 3}
    keys = {"context": 700, "stride": 300, "gain": 1e-3, "most_loss": 100.0}
    settings["perplexity"] = {"source": {"demo": "speeches"}, "documents": 2, "key_tokens": keys}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(settings))

    given = ["evaluate", "--suite", str(tmp_path / "suite.yaml"), "--lengths", "1024"]
    return lambda *more: CliRunner().invoke(app, [*given, *map(str, more)])


def _line(result) -> str:
    assert result.exit_code == 2, result.output
    return result.stderr.strip().splitlines()[-1]


def test_evaluate_goes_on_where_it_stopped_and_tells_what_did_not_run(call, model, tmp_path, model_folder):
    out = tmp_path / "out"
    first = call(model, "--out", out, "--lm-eval-log", tmp_path / "log")
    assert first.exit_code == 0, first.output
    assert "qa_1 1,024: not run: squad is not set" in first.stderr
    assert "Average of those that ran (2" in first.stdout
    assert "none:" not in first.stdout  # no average of tasks that nobody asked for
    assert "key tokens" in first.stdout
    files = {path: path.read_bytes() for path in out.rglob("*.json")}
    assert {path.name for path in files} == {f"{t}-1024.json" for t in ("niah_multiquery", "fwe", "qa_1", "perplexity")}
    result = read_result(out / "model" / "niah_multiquery-1024.json")
    assert result.computed_tokens < result.prompt_tokens
    logged = [json.loads(path.read_text()) for path in (tmp_path / "log").rglob("results_*.json")]
    assert {name for of in logged for name in of["results"]} == {"niah_multiquery", "fwe"}
    assert len(list((tmp_path / "log").rglob("samples_fwe_*.jsonl"))) == 1
    (out / "model" / "fwe-1024.json").unlink()
    again = call(model, "--out", out)
    assert again.stderr.count("finished before") == 2
    kept = {path: content for path, content in files.items() if not path.name.startswith("fwe")}
    assert {path: path.read_bytes() for path in kept} == kept
    fwe, before = read_result(out / "model" / "fwe-1024.json"), json.loads(files[out / "model" / "fwe-1024.json"])
    assert [answer.prediction for answer in fwe.answers] == [answer["prediction"] for answer in before["answers"]]
    none_left = call(model, "--out", tmp_path / "none", "perplexity.key_tokens.context=1023")
    assert "perplexity.key_tokens.context 1,023: leaves nothing of 1,024 tokens; lower it" in _line(none_left)
    judged = call(model, "--out", tmp_path / "none", f"perplexity.key_tokens.judge={model_folder('llama')}")
    assert "': has another vocabulary than the evaluated model; give a judge with the same" in _line(judged)
    nowhere = call(model, "--out", tmp_path / "none", "perplexity.key_tokens.judge=./nowhere")
    assert "perplexity.key_tokens.judge" in _line(nowhere)
    other = call(model, "--out", out, "--samples", "2")
    assert "was measured with other samples" in _line(other)
    with_anchor = call(model, "--out", out, "--anchor", "tasks=[fwe,cwe]")
    assert "was measured with other anchor" in _line(with_anchor)
    assert not (out / "model" / "cwe-1024.json").exists()
    assert call(model, "--out", tmp_path / "few", "--samples", "2", "perplexity=null").exit_code == 0
    (out / "model" / "perplexity-1024.json").unlink()
    with pytest.raises(UserError, match=r"'out' and 'few' were not measured alike: .* has other samples"):
        compare([out, tmp_path / "few"])


def test_what_a_judge_found_serves_the_next_model(call, model, tmp_path):
    judge, cache = shutil.copytree(model, tmp_path / "judge"), tmp_path / "cache"
    options = ["tasks=[fwe]", f"cache={cache}", f"perplexity.key_tokens.judge={judge}", "--samples", "1"]
    assert call(model, "--out", tmp_path / "one", *options).exit_code == 0
    (kept,) = (cache / "key_tokens").iterdir()
    first, second = (own[:1] for own in json.loads(kept.read_text())["key_tokens"])  # of two documents
    kept.write_text(json.dumps({"key_tokens": [first, second]}))
    assert call(model, "--out", tmp_path / "two", *options).exit_code == 0
    assert read_result(tmp_path / "two" / "model" / "perplexity-1024.json").values["key_tokens"] == 2
    assert call(model, "--out", tmp_path / "three", *options, "perplexity.key_tokens.gain=0.5").exit_code == 0
    assert len(list((cache / "key_tokens").iterdir())) == 2


def test_the_held_out_losses_of_a_run_follow(call, straight, tmp_path):
    told = call(straight, "--out", tmp_path / "out", "--tasks", "qa_1", "--lengths", "128")
    assert told.exit_code == 1, "for want of a material"
    losses = [line for line in status_lines(straight) if line.startswith("held out ")]
    assert len(losses) == 2
    assert [line for line in told.stdout.splitlines() if line.startswith("held out ")] == losses


@pytest.mark.parametrize(
    ("variant", "noted", "asked", "ids"),
    [
        ("anchor", None, None, [7, 9]),
        ("anchor", None, False, []),
        ("full", None, None, []),
        (None, None, None, []),
        (None, [8], None, [8]),
        (None, [8], False, []),
        (None, None, True, [0]),
    ],
)
def test_the_anchor_of_a_run_or_of_a_card_precedes_prompts(
    settings, model, tmp_path, monkeypatch, variant, noted, asked, ids
):
    folder, said, found = Path(shutil.copytree(model, tmp_path / "model")), [], []
    if noted:
        (folder / "README.md").write_text(f"---\n{NotedAnchor(noted, False)}\n---\n")
    monkeypatch.setattr("torchtrain.evaluation.evaluate.measure", lambda model, *_, **__: found.append(model))
    suite = Suite.model_validate(settings | {"tasks": ["fwe"], "perplexity": None, "samples": 1})
    of = {"model": "tiny", "anchor": [7, 9], "sequence_length": 1024, "rope": {}, "steps": 1, "data": {}}
    training = Training(**of, variant=variant, sequences_per_step=1) if variant else None
    of_run = Checkpoint("run", 1, str(folder), training)
    evaluate([of_run], suite, [1024], tmp_path / "out", anchor=asked, say=said.append)
    assert found[0].settings.anchor == ids
    told = [line for line in said if line.startswith("anchor ")]
    assert len(told) == (variant == "anchor" or noted is not None)
    assert ("do not begin with" in "".join(told)) == (asked is False)


def test_a_task_that_is_not_known_is_one_line_that_names_the_nearest(call, model, tmp_path, monkeypatch):
    real = lm_eval.tasks.TaskManager
    monkeypatch.setattr(  # lm-eval's own tasks take 8 seconds
        lm_eval.tasks, "TaskManager", lambda include_path, include_defaults: real(None, include_path, False)
    )
    told = _line(call(model, "tasks=[niah_singel_1]", f"include_path={tmp_path}"))
    assert "tasks: 'niah_singel_1' is not known (did you mean niah_single_1?" in told


def test_bad_input_is_one_line(call, model, tmp_path):
    assert f"holds {LENGTH:,} positions" in _line(call(model, "--lengths", "4096"))
    assert "write whole numbers with commas" in _line(call(model, "--lengths", "4k"))
    assert "is not a run's folder" in _line(call(model, "--last", "2"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in model.iterdir():
        if not path.name.startswith(("tokenizer", "special")):
            (bare / path.name).write_bytes(path.read_bytes())
    assert "bare': the folder holds no tokenizer" in _line(call(bare, "--out", tmp_path / "o"))
    assert not (tmp_path / "o").exists()
    (tmp_path / "file").write_text("")
    unwritable = call(model, "--out", tmp_path / "file" / "o")
    assert re.search("--out: not a directory .*; choose a folder that can be written", _line(unwritable))
    place = tmp_path / "o" / "model" / "fwe-1024.json"
    place.parent.mkdir(parents=True)
    for content in ("{", '{"task": "fwe"}'):
        place.write_text(content)
        assert str(place.name) in _line(call(model, "tasks=[fwe]", "--out", tmp_path / "o"))
