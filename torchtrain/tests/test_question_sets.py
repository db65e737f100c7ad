"""SQuAD and HotpotQA as the hub has them: the same samples, byte for byte, as from the published files."""

import json

import datasets
import pytest

from anchorline.errors import UserError
from torchtrain.evaluation.materials import Materials
from torchtrain.evaluation.ruler import make_samples
from torchtrain.evaluation.samples import open_samples
from torchtrain.evaluation.suite import Suite
from torchtrain.tests.ruler_fixtures import few_nouns  # noqa: F401
from torchtrain.tests.tiny import tiny_tokenizer

CITIES = ["Arlen", "Bornholt", "Cassel", "Dunmore", "Elvas", "Fermo", "Gotha", "Huesca"]


def _file(asked: list[dict]) -> dict:
    """A SQuAD file of one paragraph."""
    return {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q"} | of for of in asked]}]}]}


def _both_layouts(folder):
    """A few questions as the published files and as the hub's rows: unanswerable ones, contexts that stand twice."""
    contexts = [f"{CITIES[n % 8]} {n} is a town. Its river is called {CITIES[n % 8][::-1]}." for n in range(40)]
    articles = [
        {"title": title, "paragraphs": [
            {"context": context, "qas": [
                {"id": f"{title}{i}{k}", "question": f"Which river {k} of {title}, {context[:9]}?",
                 "is_impossible": k > 1,
                 "answers": [{"text": f"answer {k}{n}", "answer_start": 0} for n in range(2 - k)]}
                for k in range(3)
            ]}
            for i, context in enumerate(of_article)
        ]}
        for title, of_article in (
            ("Z", [contexts[3], contexts[1], contexts[3], *contexts[5:9]]), ("A", [contexts[2], contexts[0]]),
            ("Z2", [contexts[1], *contexts[9:]]),
        )
    ]  # fmt: skip
    squad = [
        {"id": asked["id"], "title": article["title"], "context": paragraph["context"], "question": asked["question"],
         "answers": {name: [of[name] for of in asked["answers"]] for name in ("text", "answer_start")}}
        for article in articles for paragraph in article["paragraphs"] for asked in paragraph["qas"]
    ]  # fmt: skip
    documents = [[city, [f"{city} is a town.", f" Its river is {city[::-1]}."]] for city in CITIES]
    hotpot = [
        {"_id": str(i), "question": f"Which river is in {city}?", "answer": city[::-1],
         "context": [documents[(i + k) % len(documents)] for k in (2, 0, 1)]}
        for i, city in enumerate(CITIES)
    ]  # fmt: skip
    of_hub = [
        {"id": of["_id"], "question": of["question"], "answer": of["answer"],
         "context": {"title": [t for t, _ in of["context"]], "sentences": [p for _, p in of["context"]]}}
        for of in hotpot
    ]  # fmt: skip
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return squad, of_hub


@pytest.mark.parametrize("layout", ["saved", "parquet"])
def test_questions_of_the_hub_make_the_samples_of_the_published_files(tmp_path, layout):
    squad, hotpot = _both_layouts(tmp_path)
    places = {}
    for name, rows in (("squad", squad), ("hotpotqa", hotpot)):
        table, place = datasets.Dataset.from_list(rows), tmp_path / f"{name}-set"
        if layout == "saved":
            datasets.DatasetDict({"validation": table}).save_to_disk(place)
        else:
            place.mkdir()
            table.to_parquet(place / "validation-00000-of-00001.parquet")
        places[name] = {"dataset": str(place)}
    files = {"squad": str(tmp_path / "squad.json"), "hotpotqa": str(tmp_path / "hotpot.json")}
    published, hub = (
        Materials(Suite.model_validate({"tasks": ["qa_1", "qa_2"], "cache": str(tmp_path / "cache")} | given))
        for given in (files, places)
    )
    tokenizer = tiny_tokenizer()
    for task in ("qa_1", "qa_2"):
        for length in (1024, 2048, 6000):  # of the article's own documents, of others, all
            one, other = (open_samples(task, length, 6, tokenizer, of) for of in (published, hub))
            assert one.sha256 == other.sha256
            assert len({sample["input"] for sample in one.samples}) == len(one.samples) > 3
        assert hub.identity(task)["questions"].startswith("dataset ")


@pytest.mark.parametrize(
    ("setting", "change", "said"),
    [
        ("squad", {"answers": ["a"]}, "has no answers.text as rajpurkar/squad_v2"),
        ("squad", {"title": None}, "has no title as rajpurkar/squad_v2"),
        ("squad", {"question": 3}, "has no question as"),
        (
            "hotpotqa",
            {"context": {"title": ["a"], "sentences": ["b"]}},
            "has no context.sentences as hotpotqa/hotpot_qa",
        ),
        (
            "hotpotqa",
            {"context": {"title": ["a", "b"], "sentences": [["b"]]}},
            "has no context.sentences for each title",
        ),
        ("hotpotqa", {"answer": None}, "has no answer as"),
        ("hotpotqa", {"answer": " "}, "has an empty answer; give the rows of hotpotqa/hotpot_qa"),
        ("squad", {"answers": {"text": ["a", ""], "answer_start": [0, 0]}}, "has an empty answer; give the rows of"),
    ],
)
def test_rows_that_are_not_the_hubs_are_one_line(tmp_path, setting, change, said):
    squad, hotpot = _both_layouts(tmp_path)
    row = (squad if setting == "squad" else hotpot)[0] | change
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "set" / "validation.parquet")
    materials = Materials(Suite.model_validate({"tasks": ["fwe"], setting: {"dataset": str(tmp_path / "set")}}))
    with pytest.raises(UserError, match=rf"^{setting} .*set': record 1: {said}") as raised:
        materials.questions("qa_1" if setting == "squad" else "qa_2")
    assert "\n" not in str(raised.value)


def test_a_set_without_the_split_is_told_by_its_own_setting(tmp_path):
    datasets.Dataset.from_list([{"a": 1}]).to_parquet(tmp_path / "set" / "train.parquet")
    materials = Materials(Suite.model_validate({"tasks": ["fwe"], "squad": {"dataset": str(tmp_path / "set")}}))
    with pytest.raises(UserError, match=r"^squad: dataset .*validation"):
        materials.questions("qa_1")


@pytest.mark.parametrize(
    ("setting", "content", "said"),
    [
        (
            "squad",
            _file([{"answers": [{"text": "a"}, {"text": ""}], "is_impossible": False}]),
            "1: has an empty answer",
        ),
        ("squad", _file([{"answers": [], "is_impossible": False}]), "1: has an empty answer"),
        ("squad", _file([{"answers": [], "is_impossible": True}]), "holds no question with an answer"),
        ("squad", {"data": []}, "holds no question with an answer"),
        ("hotpotqa", [{"question": "q", "answer": "\t", "context": [["t", ["a"]]]}], "1: has an empty answer"),
    ],
)
def test_a_published_file_without_answers_is_one_line(tmp_path, setting, content, said):
    """An empty answer stands in whatever a model says."""
    (tmp_path / "f.json").write_text(json.dumps(content))
    materials = Materials(Suite.model_validate({"tasks": ["fwe"], setting: str(tmp_path / "f.json")}))
    task = "qa_1" if setting == "squad" else "qa_2"
    with pytest.raises(UserError, match=rf"^{task}: f\.json.*{said}") as raised:
        make_samples(task, 1024, 3, 42, tiny_tokenizer(), materials)
    assert "\n" not in str(raised.value)
