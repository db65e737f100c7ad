"""Which results are compared, and which are refused in one line."""

import re

import pytest

from anchorline.errors import UserError
from torchtrain.evaluation.compare import compare
from torchtrain.tests.measured_results import perplexity_result, save_results, save_seeds, settings_of, task_result

AT = {"checkpoint": "step-1"}
OTHER_SETTINGS = {"weights": "v", "dtype": "bfloat16", "engine": {"backend": "vllm"}, "anchor": [1]}


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([task_result(samples="t", **AT)], "fwe at 1,024 has other samples"),
        ([task_result(settings=settings_of(anchor=[1]), **AT)], "has other anchor"),
        ([task_result(settings=settings_of(engine={"backend": "vllm"}), **AT)], "has other engine"),
        ([task_result("cwe"), task_result(**AT)], "cwe at 1,024 is in one alone; evaluate both"),
        ([perplexity_result(), task_result(**AT)], "perplexity at 1,024 is in one alone"),
        (
            [task_result("vt"), task_result("vt_2024_10")],
            "holds vt_2024_10 and vt at 1,024 tokens, two versions of one",
        ),
        ([perplexity_result(settings=settings_of(weights="v"))], "were measured with other weights"),
        *(
            ([task_result("cwe", settings=settings_of(**{name: value}))], f"were measured with other {name}")
            for name, value in OTHER_SETTINGS.items()
        ),
    ],
)
def test_results_of_a_run_that_do_not_belong_together_are_refused(tmp_path, results, said):
    """An average or a mean over checkpoints would be of several models, samples or prompts."""
    save_results(tmp_path / "a", task_result(), *results)
    with pytest.raises(UserError, match=f"a.*{said}"):
        compare([tmp_path / "a"])


def test_perplexity_needs_no_anchor(tmp_path):
    save_results(tmp_path / "a", task_result(settings=settings_of(anchor=[1])), perplexity_result())
    assert compare([tmp_path / "a"])


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([task_result(samples="t")], "'a' and 'b' were not measured alike: fwe at 1,024 has other samples"),
        ([task_result(length=2048)], "'a' and 'b' were not measured alike: fwe at 1,024 is in one alone"),
        ([task_result(metric="acc")], "'a' and 'b' were not measured alike: fwe at 1,024 has other metric"),
        ([task_result("cwe")], "'a' and 'b' were not measured alike: cwe at 1,024 is in one alone"),
        ([task_result(scores=[1.0])], "fwe at 1,024 has other samples, though it says the same"),
        ([task_result(), task_result(**AT)], "one has 1 checkpoints, the other 2, .*; give --last"),
    ],
)
def test_runs_that_were_not_measured_alike_are_refused(tmp_path, others, said):
    save_results(tmp_path / "a", task_result())
    save_results(tmp_path / "b-evaluation", *others)
    with pytest.raises(UserError, match=said):
        compare([tmp_path / "a", tmp_path / "b"])


def test_rows_may_differ_in_the_anchor_and_seeds_of_one_row_may_not(tmp_path):
    save_results(tmp_path / "a-0", task_result())
    save_results(tmp_path / "a-1", task_result(settings=settings_of(anchor=[1])))
    assert compare([tmp_path / "a-0", tmp_path / "a-1"])
    with pytest.raises(UserError, match=r"'a-0' and 'a-1' were not measured alike: fwe at 1,024 has other anchor"):
        compare([f"a={tmp_path / 'a-0'},{tmp_path / 'a-1'}"])


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (["/"], "is no run"),
        (["."], "holds no results"),
        (["gone"], "holds no results; first: torchtrain evaluate"),
        (["a-0", "a-0"], "two are called "),
        (["a=a-0"], "names two runs or more"),
        (["=a-0,a-1"], "names two runs or more"),
        (["a=a-0,a-0"], "two have one name"),
        (["a=a-0,other"], "were not measured alike"),
    ],
)
def test_what_names_no_run_is_refused(tmp_path, monkeypatch, runs, said):
    monkeypatch.chdir(tmp_path)
    save_seeds(tmp_path, "a", [[1.0], [0.0]])
    save_results(tmp_path / "other", task_result(scores=[1.0]))
    with pytest.raises(UserError, match=said):
        compare(runs)


def test_what_was_measured_on_the_way_is_taken_where_nothing_was_measured_afterwards(tmp_path):
    place = tmp_path / "a-on-the-way"
    save_results(place, task_result(scores=[0.0], **AT))
    assert compare([tmp_path / "a"])[2][0].checkpoint_names == ["step-1"]
    save_results(place, task_result("cwe", checkpoint="step-2"))
    with pytest.raises(UserError, match=rf"{place}/step-2.* not measured alike: cwe .* is in one alone"):
        compare([tmp_path / "a"])
    save_results(tmp_path / "a-evaluation", task_result(scores=[1.0]), task_result(scores=[1.0], **AT))
    (run,) = compare([tmp_path / "a"])[2]
    assert (run.name, len(run.checkpoint_names), run.scores(("fwe", 1024)).tolist()) == ("a", 2, [1.0])


@pytest.mark.parametrize(
    ("result", "old", "new", "said"),
    [
        (task_result(), '"score": 1.0', '"score": "a"', "is damaged, or of another version"),
        (task_result(), '"format": 2', '"format": 1', "is damaged, or of another version"),
        (task_result(), '"fwe"', '"cwe"', "is of cwe at 1024"),
        (task_result(), "{", "", "is not JSON"),
    ],
)
def test_a_damaged_result_is_refused(tmp_path, result, old, new, said):
    save_results(tmp_path / "a", result)
    (place,) = (tmp_path / "a" / "model").iterdir()
    text = re.sub(r"\s*".join(map(re.escape, old.split())), new, place.read_text(), count=1)
    assert text != place.read_text()
    place.write_text(text)
    with pytest.raises(UserError, match=said):
        compare([tmp_path / "a"])
