"""Which results are compared, and which are refused in one line."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from anchorline.errors import UserError
from torchtrain.cli import app
from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.intervals import (
    format_perplexity,
    mean_interval,
    paired_interval,
    sign_flip,
    student_interval,
)
from torchtrain.evaluation.measured import Average
from torchtrain.tests.measured_results import perplexity_result, save_results, save_seeds, settings_of, task_result

AT = {"checkpoint": "step-1"}
OTHER_SETTINGS = {"weights": "v", "dtype": "bfloat16", "anchor": [1]}


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([task_result(samples="t", **AT)], "fwe at 1,024 has other samples"),
        ([task_result(settings=settings_of(anchor=[1]), **AT)], "has other anchor"),
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


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([task_result(samples="t")], "'a' and 'b' were not measured alike: fwe at 1,024 has other samples"),
        ([task_result(length=2048)], "'a' and 'b' were not measured alike: fwe at 1,024 is in one alone"),
        ([task_result(metric="acc")], "'a' and 'b' were not measured alike: fwe at 1,024 has other metric"),
        ([task_result("cwe")], "'a' and 'b' were not measured alike: cwe at 1,024 is in one alone"),
        (
            [task_result(settings=settings_of(dtype="float64"))],
            "the model of 'b' again, with dtype=float32 and in a new",
        ),
        ([task_result(scores=[1.0])], "fwe at 1,024 has other answered"),
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
    assert (run.name, len(run.checkpoint_names), Average([("fwe", 1024)]).mean(run)) == ("a", 2, 1.0)


@pytest.mark.parametrize(
    ("result", "old", "new", "said"),
    [
        (task_result(), '"score": 1.0', '"score": "a"', "is damaged, or of another version"),
        (task_result(), '"format": 2', '"format": 1', "is damaged, or of another version"),
        (task_result(), '"fwe"', '"cwe"', "is of cwe at 1024"),
        (task_result(), "{", "", "is damaged, or of another version"),
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


# --- docs/results.md is made of its data ------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results" / "needles"


def test_the_page_is_made_of_its_data(tmp_path, monkeypatch):
    """By the command that the page names, run where it says."""
    text = PAGE.read_text()
    command = text[text.index("    cd ") :].split("\n\n")[0].replace("\\\n", " ")
    place, compare = command.split("&&")
    assert shlex.split(place) == ["cd", str(DATA.relative_to(ROOT))]
    copy = tmp_path / "docs" / PAGE.name
    copy.parent.mkdir()
    shutil.copy(PAGE, copy)
    arguments = shlex.split(compare)[1:]
    arguments[arguments.index("--document") + 1] = str(copy)
    monkeypatch.chdir(DATA)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert copy.read_text() == text
    (figure,) = (copy.parent / "figures").iterdir()
    assert (PAGE.parent / "figures" / figure.name).is_file()


# --- how sure a mean and a difference are -----------------------------------------------------------------------------


def test_a_mean_has_wilsons_interval_and_students_where_scores_have_no_bounds():
    assert mean_interval([2.0, 3.0, 5.0]) == student_interval([2.0, 3.0, 5.0])
    assert mean_interval([1.0] * 8) == pytest.approx((1.0, 0.6756, 1.0), abs=1e-4)
    assert mean_interval([0.0] * 8) == pytest.approx((0.0, 0.0, 0.3244), abs=1e-4)


def test_intervals_are_paired_by_sample():
    draw = np.random.default_rng(1)
    hard = draw.random(300)
    a, b = [(hard > 0.5).astype(float)], [(hard > 0.45).astype(float)]  # b finds what a finds, and a little more
    mean, low, high = paired_interval(b, a)
    assert 0 < low < mean < high
    shuffled = [draw.permutation(b[0])]
    assert paired_interval(shuffled, a)[1] < 0  # unpaired, as much tells nothing


def test_signs_are_tried_or_drawn():
    """Against the exact test of McNemar: samples of 0 and 1 differ by a sign alone."""
    zeros = np.zeros(500)
    for n in (3, 6, 9):
        few, p = zeros.copy(), scipy.stats.binomtest(n, n).pvalue
        few[:n] = 1
        assert sign_flip([few], [zeros]) == pytest.approx(p)
    many = zeros.copy()
    many[:30], many[30:50] = 1, -1
    assert sign_flip([many], [zeros]) == pytest.approx(scipy.stats.binomtest(30, 50).pvalue, abs=0.02)
    assert sign_flip([zeros], [zeros]) == 1


def test_equal_scores_do_not_prove_two_runs_equal():
    mean, low, high = paired_interval([np.zeros(20)] * 3, [np.zeros(20)] * 3)
    unseen = (1 - 0.025 ** (1 / 20)) / 3**0.5
    assert (mean, low, high) == pytest.approx((0.0, -unseen, unseen))
    assert paired_interval([np.ones(5)], [np.zeros(5)])[2] == 1
    # A task of one sample weighs as much as one of two hundred, and alone may move the mean by half.
    _, low, high = paired_interval([np.zeros(1), np.zeros(200)], [np.zeros(1), np.zeros(200)])
    assert -low == high > 0.48
    varied = np.random.default_rng(0).integers(0, 2, 200).astype(float)
    alone = paired_interval([varied], [varied[::-1]])
    mean, low, high = paired_interval([np.ones(1), varied], [np.zeros(1), varied[::-1]])
    assert mean - low == pytest.approx(np.hypot((alone[0] - alone[1]) / 2, 0.975), rel=0.01)  # the one might be -1
    assert high - mean == pytest.approx((alone[2] - alone[0]) / 2, rel=0.01)  # and no more than 1


def test_a_perplexity_is_told_whatever_it_is():
    told = [format_perplexity(loss) for loss in (0.0, 13.0, 20.0, 708.0, 800.0)]
    assert told == ["1.00", "442413.39", "4.9e+08", "3.0e+307", "inf"]
