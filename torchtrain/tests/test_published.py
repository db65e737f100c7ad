"""What a paper publishes stands beside a run of the same model, data, variant and length, and beside no other."""

from pathlib import Path

import pytest
import yaml

from anchorline.errors import UserError
from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.measured import ELEVEN
from torchtrain.evaluation.published import ICL, PLACE, Publication, load_published
from torchtrain.evaluation.results import TaskResult, Training
from torchtrain.evaluation.suite import IN_2024, LONGBENCH, TASKS
from torchtrain.tests.measured_results import save_results, settings_of, task_result

PAPER = Path(__file__).parents[2] / PLACE
LLAMA, DATASET, LONG = "meta-llama/Llama-2-7b-hf", "cerebras/SlimPajama-627B", 65536
ESSAYS = "folder essays, sentences english"


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
    return [
        task_result(
            task,
            (1.0, 1.0),
            length=length,
            settings=settings_of(anchor=as_asked["anchor"], dtype="bfloat16"),
            training=training,
        ).model_copy(
            update={
                "step": as_asked["step"],
                "source": as_asked["source"],
                "identity": {"materials": {"haystack": as_asked["haystack"]}},
            }
        )
        for task in tasks
    ]


def _save(folder, results) -> Path:
    save_results(folder, *results)
    return folder


def _beside(tables) -> dict[str, dict[str, list[str]]]:
    """Of each table with published numbers, its rows; nothing in it is bold."""
    found = [table for table in tables if table.title.endswith("beside what is published")]
    assert not any(cell.bold for table in found for _, cells in table.rows for cell in cells)
    return {
        table.title.partition(",")[0]: {"": table.head[1:]}
        | {name: [cell.text for cell in cells] for name, cells in table.rows}
        for table in found
    }


def _as_then(tasks) -> list[str]:
    then = {new: old for old, new in IN_2024.items()}
    return [then.get(task, task) for task in tasks]


def test_the_papers_tables_agree_where_they_say_the_same(published):
    icl = {7: {}, 12: {}}
    for table in published.tables:
        name = ICL if table.scores == "short" else "ICL"
        if name in table.columns and table.training:
            place = table.columns.index(name)
            icl[table.table] |= {(table.training, variant): row[place] for variant, row in table.rows.items()}
    assert icl[7] == icl[12]
    assert len(icl[7]) == 15
    assert [key for key, score in icl[7].items() if score is None] == [("UpSampledMix-128K", "anchor+tag")]
    # Table 10 and table 11 say the same of CWE at the length they share with no one: 24.46 and 76.8 are two lengths'.
    cwe = {of.length: of.rows["LLaMA-2-7B"][of.columns.index("cwe")] for of in published.tables if "cwe" in of.columns}
    assert cwe == {4000: 24.46, 4096: 76.8}
    numbers = sum(score is not None for of in published.tables for row in of.rows.values() for score in row)
    assert numbers == 101 + 54 + (48 - 1) + 52 + 1 + (90 - 1)  # as many as both transcriptions have, but for the two


def test_a_run_trained_as_the_papers_has_the_papers_row_below_it(tmp_path, published):
    mine = _results(_as_then(ELEVEN), _training()) + _results(_as_then(ELEVEN), _training(), 8192)
    other = [of.model_copy(update={"training": _training(steps=1999)}) for of in mine]
    runs = [_save(tmp_path / "anchor", mine), _save(tmp_path / "shorter", other)]
    tables, _, measured = compare(runs, published=published)
    assert _beside(tables) == {
        "Average of the paper's 11 tasks": {
            "": ["4K", "8K"],
            "anchor": ["100.0 [80.2, 100.0]"] * 2,  # Wilson of two: 65.8 below, over the root of 11
            "anchor, published (table 5)": ["90.69", "85.48"],
        }
    }
    (table,) = [table for table in tables if table.title.endswith("beside what is published")]
    assert table.notes[0].startswith("Published: arXiv 2411.13476v2, of the same model, data, variant and length, ")
    assert any("RULER's are essays" in note for note in table.notes)
    # All else is as it is without: no mean, difference, interval or figure knows of it.
    plain, _, without = compare(runs)
    assert [of for of in tables if of is not table] == plain
    assert measured == without  # of which figures are drawn


@pytest.mark.parametrize(
    ("training", "changes"),
    [
        pytest.param(None, {}, id="not known"),
        pytest.param(_training(sequence_length=32768), {}, id="another trained length"),
        pytest.param(_training(source={"dataset": "owner/other"}), {}, id="another data set"),
        pytest.param(_training(source={"dataset": "/data/SlimPajama-627B"}), {}, id="a folder that may be any"),
        pytest.param(_training(source={"max_documents": 9}), {}, id="its first documents"),
        pytest.param(_training(data={}), {}, id="data that are not known"),
        pytest.param(_training(variant="anchor+tag+interleave"), {}, id="a variant that it lacks"),
        pytest.param(_training(model="Qwen/Qwen1.5-1.8B"), {}, id="another model"),
        pytest.param(_training(rope={"rope_type": "yarn", "rope_theta": 5e6}), {}, id="another RoPE"),
        pytest.param(_training(rope={"rope_type": "default", "rope_theta": 1e6}), {}, id="another base"),
        pytest.param(_training(sequences_per_step=4), {}, id="half the tokens"),
        pytest.param(_training(), {"step": 1950}, id="before the last 50 steps"),
        pytest.param(_training(), {"step": None}, id="no step"),
        pytest.param(_training(), {"anchor": [1]}, id="an anchor before the prompts"),
        pytest.param(_training(), {"haystack": "demo speeches, sentences untrained"}, id="another haystack"),
        pytest.param(_training(), {"length": 4000}, id="another length"),
    ],
)
def test_a_near_miss_shows_nothing(tmp_path, published, training, changes):
    run = _save(tmp_path / "run", _results(_as_then(ELEVEN), training, **changes))
    assert _beside(compare([run], published=published)[0]) == {}


def test_numbers_of_eleven_tasks_are_not_those_of_thirteen(tmp_path, published):
    whole = _save(tmp_path / "whole", _results(_as_then(TASKS), _training()))
    assert [*_beside(compare([whole], published=published)[0])] == ["Average of the paper's 11 tasks"]
    ten = _save(tmp_path / "ten", _results(_as_then(ELEVEN)[1:], _training()))
    assert _beside(compare([ten], published=published)[0]) == {}
    for one in IN_2024:  # one task as it is now, the other as it was then
        tasks = [IN_2024[one] if task == one else task for task in _as_then(ELEVEN)]
        now = _save(tmp_path / one, _results(tasks, _training()))
        assert _beside(compare([now], published=published)[0]) == {}


def test_data_are_told_apart_by_their_mixture(published):
    upsampled = published.trainings["UpSampledMix-128K"]
    mixture = {"shares": upsampled.shares, "long_weight": 10.0, "long_share": None}

    def found(**mixed) -> list[str]:
        data = _training().data | mixed
        of = _training(data=data, sequence_length=131072, rope={"rope_type": "default", "rope_theta": 1e7})
        return [name for name, each in published.trainings.items() if each.is_of(of)]

    assert found() == found(mixture=None) == ["SlimPajama-128K"]
    assert found(mixture=mixture) == ["UpSampledMix-128K"]
    for other in ({"long_weight": None}, {"shares": (upsampled.shares or {}) | {"C4": 0.2}}, {"shares": None}):
        assert found(mixture=mixture | other) == []
    assert found(sources=_training().data["sources"] * 2) == found(sources=[]) == found(sources=None) == []


def test_short_benchmarks_stand_beside_the_papers_and_longbench_does_not(tmp_path, published):
    """lm-eval's LongBench has other prompts and scores than LongBench's own."""
    every = [f"longbench_{name}" for names in LONGBENCH.values() for name in names]
    subjects = [f"mmlu_{i}" for i in range(57)]
    run = _save(tmp_path / "a", _results([*every, *subjects, "hellaswag"], _training(), LONG))
    found = _beside(compare([run], published=published)[0])
    assert found.keys() == {"Short benchmarks"}
    assert found["Short benchmarks"]["a, published (table 7)"] == ["70.78", "40.32"]
    run = _save(tmp_path / "b", _results([*subjects[1:], "hellaswag"], _training(), LONG))
    assert _beside(compare([run], published=published)[0])["Short benchmarks"]["b, published (table 7)"] == ["70.78"]


def test_a_model_as_it_was_published_is_known_by_its_hub_id(tmp_path, published):
    def beside(name, length, **changes):
        results = _results(["cwe", "vt_2024_10", "hellaswag"], length=length, step=None, **changes)
        return _beside(compare([_save(tmp_path / name, results)], published=published)[0])

    found = beside("a", 4000, source=LLAMA)
    assert found["Tasks at 4"]["a, published (table 10)"] == ["59.0", "24.46"]
    assert found["Short benchmarks"]["a, published (table 7)"] == ["71.39"]
    assert beside("b", 4096, source=LLAMA)["Tasks at 4"]["b, published (table 11)"] == ["76.8"]
    assert beside("c", 4000, source="models/Llama-2-7b-hf") == beside("d", 4000, training=_training()) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": {}}, "table 5: 'LLaMA-2-7B' is not described above"),
        ({"columns": [4096, 8192]}, "full has 1 numbers for 2 columns"),
        ({"columns": ["fwe"]}, "ruler_11 has no column 'fwe'"),
        ({"rows": {"ful": [50.0]}}, "variant 'ful'"),
        ({"rows": {"full": [500.0]}}, "give 100 or less"),
        ({"training": None}, "model and training stand together"),
        ({"length": 4096}, "length belongs to ruler_tasks"),
        ({"unsaid": {}}, "unsaid has no ruler_11"),
        ({"title": "x"}, "title"),
    ],
)
def test_a_file_of_published_numbers_is_strict(tmp_path, changes, said):
    training = {"dataset": "a/b", "sequence_length": 8, "rope_theta": 1e4, "sequences_per_step": 8, "steps": [1, 2]}
    table = {"table": 5, "scores": "ruler_11", "model": "LLaMA-2-7B", "training": "T", "columns": [4096]}
    tree = {"arxiv": "2411.13476", "version": 2, "models": {"LLaMA-2-7B": LLAMA}, "unsaid": {"ruler_11": "anything"}}
    tree |= {"trainings": {"T": training}, "tables": [table | {"rows": {"full": [50.0]}}]}
    path = tmp_path / "results.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_published(path).tables[0].rows == {"full": [50.0]}
    top = {name: value for name, value in changes.items() if name in tree}
    tree["tables"][0] |= {name: value for name, value in changes.items() if name not in tree}
    path.write_text(yaml.safe_dump(tree | top))
    with pytest.raises(UserError, match=said):
        load_published(path)
