"""The paper's numbers are shown below a run of the same model, data, variant, split and length, and below no other."""

from pathlib import Path

import pytest

from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.published import PLACE, Publication, load_published
from torchtrain.evaluation.results import TaskResult, Training
from torchtrain.evaluation.suite import ELEVEN, IN_2024, TASKS
from torchtrain.tests.measured_results import save_results, settings_of, task_result

PAPER = Path(__file__).parents[2] / PLACE
LLAMA, DATASET, LONG = "meta-llama/Llama-2-7b-hf", "cerebras/SlimPajama-627B", 65536
ESSAYS = "texts essays/*.txt, sentences english"


@pytest.fixture(scope="module")
def published() -> Publication:
    return load_published(PAPER)


def _training(source=None, **changes) -> Training:
    own = {"dataset": DATASET, "split": "train", "subset": None, "max_documents": None, "sample_files": 0.0022}
    as_published = {
        "model": LLAMA,
        "variant": "anchor",
        "sequence_length": LONG,
        "rope": {"rope_type": "default", "rope_theta": 5e6},
        "steps": 2000,
        "sequences_per_step": 8,
        "data": {"sources": [own | (source or {})]},
    }
    return Training.model_validate(as_published | changes)


def _results(tasks, training=None, length=4096, **changes) -> list[TaskResult]:
    as_asked = {"haystack": ESSAYS, "anchor": [], "step": 2000, "source": "a folder"} | changes
    settings = settings_of(anchor=as_asked["anchor"], dtype="bfloat16")
    identity = {"materials": {"haystack": as_asked["haystack"]}}
    return [
        task_result(task, (1.0, 1.0), length=length, settings=settings, training=training).model_copy(
            update={"step": as_asked["step"], "source": as_asked["source"], "identity": identity}
        )
        for task in tasks
    ]


def _save(folder, results) -> Path:
    save_results(folder, *results)
    return folder


def _shown(tables) -> dict[str, dict[str, list[str]]]:
    """The columns of published numbers by the rows that have one. Nothing in them is bold."""
    shown = {}
    for table in tables:
        for place, name in enumerate(table.head[1:]):
            if name.endswith(", published"):
                column = {row: cells[place] for row, cells in table.rows if cells[place]}
                shown.setdefault(table.title, {})[name] = column
                assert not any(cell.startswith("**") for cell in column.values())
    return shown


def _as_in_2024(tasks) -> list[str]:
    then = {new: old for old, new in IN_2024.items()}
    return [then.get(task, task) for task in tasks]


def test_a_run_trained_as_the_papers_has_the_papers_row_below_it(tmp_path, published):
    mine = _results(_as_in_2024(ELEVEN), _training()) + _results(_as_in_2024(ELEVEN), _training(), 8192)
    other = [of.model_copy(update={"training": _training(steps=1999)}) for of in mine]
    runs = [_save(tmp_path / "anchor", mine), _save(tmp_path / "shorter", other)]
    tables, _, measured = compare(runs, published=published)
    assert _shown(tables) == {
        "Average of the paper's 11 tasks": {
            "anchor, published": {"4K": "90.69 (table 5)", "8K": "85.48 (table 5)"},
        }
    }
    assert dict(tables[0].rows)["4K"][0] == "100.0 [80.2, 100.0]"  # Wilson of two: 65.8 below, over the root of 11
    # Nothing else knows of it: no mean, difference, interval or figure.
    plain, _, without = compare(runs)
    assert [cells for _, cells in plain[0].rows] == [cells[:-1] for _, cells in tables[0].rows]
    assert measured == without


@pytest.mark.parametrize(
    ("training", "changes"),
    [
        pytest.param(None, {}, id="not known"),
        pytest.param(_training(sequence_length=32768), {}, id="another trained length"),
        pytest.param(_training(source={"dataset": "owner/other"}), {}, id="another data set"),
        pytest.param(_training(source={"dataset": "/data/SlimPajama-627B"}), {}, id="a folder that may be any"),
        pytest.param(_training(data=_training().data | {"mixture": {"shares": {"C4": 1.0}}}), {}, id="a mixture"),
        pytest.param(_training(variant="anchor+tag+interleave", split="authors"), {}, id="a variant that it lacks"),
        pytest.param(_training(variant="anchor+interleave", split="random"), {}, id="another split"),
        pytest.param(_training(model="Qwen/Qwen1.5-1.8B"), {}, id="another model"),
        pytest.param(_training(rope={"rope_type": "default", "rope_theta": 1e6}), {}, id="another base"),
        pytest.param(_training(sequences_per_step=4), {}, id="half the tokens"),
        pytest.param(_training(), {"step": 1950}, id="before the last 50 steps"),
        pytest.param(_training(), {"anchor": [1]}, id="an anchor before the prompts"),
        pytest.param(_training(), {"haystack": "demo speeches, sentences untrained"}, id="another haystack"),
        pytest.param(_training(), {"length": 4000}, id="another length"),
    ],
)
def test_a_near_miss_shows_nothing(tmp_path, published, training, changes):
    run = _save(tmp_path / "run", _results(_as_in_2024(ELEVEN), training, **changes))
    assert _shown(compare([run], published=published)[0]) == {}


def test_an_interleaved_run_needs_the_authors_split_and_a_note_says_what_is_known(tmp_path, published):
    training = _training(variant="anchor+interleave", split="authors")
    tables = compare([_save(tmp_path / "a", _results(_as_in_2024(ELEVEN), training))], published=published)[0]
    assert _shown(tables)["Average of the paper's 11 tasks"]["a, published"] == {"4K": "89.31 (table 5)"}
    assert any("What made these rows is unknown" in note for note in tables[0].notes)


def test_numbers_of_eleven_tasks_are_not_those_of_thirteen_or_of_tasks_as_they_are_now(tmp_path, published):
    whole = _save(tmp_path / "whole", _results(_as_in_2024(TASKS), _training()))
    assert [*_shown(compare([whole], published=published)[0])] == ["Average of the paper's 11 tasks"]
    for name, tasks in (("ten", _as_in_2024(ELEVEN)[1:]), ("now", [*_as_in_2024(ELEVEN)[:-3], "fwe", "qa_1", "qa_2"])):
        run = _save(tmp_path / name, _results(tasks, _training()))
        assert _shown(compare([run], published=published)[0]) == {}


def test_a_model_as_it_was_published_is_known_by_its_hub_id(tmp_path, published):
    def shown(name, length, **changes):
        results = _results(["cwe", "vt_2024_10", "hellaswag"], length=length, step=None, **changes)
        return _shown(compare([_save(tmp_path / name, results)], published=published)[0])

    found = shown("a", 4000, source=LLAMA)
    assert found == {
        "Tasks at 4,000 tokens": {
            "a, published": {"vt_2024_10": "59 (table 10)", "cwe": "24.46 (table 10)", "hellaswag": "71.39 (table 7)"}
        }
    }
    assert shown("b", 4096, source=LLAMA)["Tasks at 4,096 tokens"]["b, published"]["cwe"] == "76.8 (table 11)"
    assert shown("c", 4000, source="models/Llama-2-7b-hf") == shown("d", 4000, training=_training()) == {}


def test_what_the_paper_prints_beside_its_tables_follows_from_our_copy(published):
    """Table 3's means, table 4's falls beyond the trained length, and the three places where two tables disagree."""
    rows = {n: {name: row for t in published.tables if t.table == n for name, row in t.rows.items()} for n in (2, 3, 4)}
    means = {"500": 20.80, "10K": 42.66, "200K": 79.81, "600K": 82.70, "900K": 82.64, "5M": 81.48, "1B": 78.47}
    assert {name: sum(row) / 4 for name, row in rows[3].items()} == {
        f"RoPE {base}": pytest.approx(mean, abs=0.006) for base, mean in means.items()
    }
    falls = [30.95, 14.83, 22.84, 7.15, 11.18, 8.06, 23.01, 26.94, 19.58]
    assert [row[1] - row[0] for row in rows[4].values()] == pytest.approx(falls)
    differ = [name for name, (_, at_64k) in rows[4].items() if name in rows[2] and rows[2][name][0] != at_64k]
    assert differ == ["RoPE 1M", "YaRN 5M"]
    icl = {t.training: t.rows["anchor+tag"][1] for t in published.tables if t.table == 12}
    assert icl["UpSampledMix-128K"] == 49.70  # 50.70 in table 7
