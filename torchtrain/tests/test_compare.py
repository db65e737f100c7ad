"""Which runs stand side by side, and which are refused, in one line."""

import re

import pytest

from anchorline.errors import UserError
from torchtrain.evaluation.compare import compare
from torchtrain.evaluation.results import NotRun, check_one_model
from torchtrain.tests.measured_results import perplexity_result, save_results, save_seeds, settings_of, task_result


def test_runs_of_other_numbers_of_checkpoints_are_refused(tmp_path):
    save_results(tmp_path / "a", task_result(), task_result(checkpoint="step-1"))
    save_results(tmp_path / "b", task_result())
    with pytest.raises(UserError, match=r"a has 2 checkpoints, b 1, .*; give --last"):
        compare([tmp_path / "a", tmp_path / "b"])


def test_checkpoints_of_a_run_that_were_measured_otherwise_are_refused(tmp_path):
    """A mean over them would be of other samples, other documents or other prompts."""
    for name, changed in (
        ("samples", task_result(checkpoint="step-1", samples="t")),
        ("anchor", task_result(checkpoint="step-1", settings=settings_of(anchor=[1]))),
        ("engine", task_result(checkpoint="step-1", settings=settings_of(engine={"backend": "vllm"}))),
        ("samples", perplexity_result(samples="e").model_copy(update={"checkpoint": "step-1"})),
    ):
        place = tmp_path / f"{name}-{changed.task}"
        save_results(place, task_result(), perplexity_result(), task_result(checkpoint="step-1"))
        save_results(place, perplexity_result().model_copy(update={"checkpoint": "step-1"}), changed)
        with pytest.raises(
            UserError, match=f"{place.name} were not measured alike: .*of 'model' and .* has other {name}"
        ):
            compare([place])


def test_a_checkpoint_without_perplexity_is_no_part_of_a_mean(tmp_path):
    save_results(tmp_path / "a", task_result(), perplexity_result(), task_result(checkpoint="step-1"))
    with pytest.raises(UserError, match="'step-1' has no result of perplexity at 1,024, and others have"):
        compare([tmp_path / "a"])


def test_two_versions_of_one_task_are_refused(tmp_path):
    save_results(tmp_path / "a", task_result("vt"), task_result("vt_2024_10"))
    with pytest.raises(UserError, match="holds vt_2024_10 and vt at 1,024 tokens, two versions of one task"):
        compare([tmp_path / "a"])


def test_seeds_with_and_without_an_anchor_are_no_row(tmp_path):
    save_results(tmp_path / "a-0", task_result())
    save_results(tmp_path / "a-1", task_result(settings=settings_of(anchor=[1])))
    with pytest.raises(UserError, match=r"a-0 and a-1 were not measured alike: fwe at 1,024 has other anchor"):
        compare([f"a={tmp_path / 'a-0'},{tmp_path / 'a-1'}"])
    assert compare([tmp_path / "a-0", tmp_path / "a-1"])  # which is what one wants to see


@pytest.mark.parametrize(("said", "message"), [("/", "is no run"), (".", "holds no results")])
def test_a_run_is_a_folder_with_a_name(tmp_path, monkeypatch, said, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        compare([said])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("a={0}/a-0", "names two runs or more"),
        ("={0}/a-0,{0}/a-1", "names two runs or more"),
        ("a={0}/a-0,{0}/a-0", "two have one name"),
        ("a={0}/a-0,{0}/other", "were not measured alike"),
        ("a={0}/a-0,{0}/gone", "holds no results"),
    ],
)
def test_seeds_that_do_not_fit_are_refused(tmp_path, said, message):
    save_seeds(tmp_path, "a", [[1.0], [0.0]])
    save_results(tmp_path / "other", task_result(scores=[1.0]))
    with pytest.raises(UserError, match=message):
        compare([said.format(tmp_path)])


def test_what_was_measured_on_the_way_is_taken_where_nothing_was_measured_afterwards(tmp_path):
    save_results(tmp_path / "a-on-the-way", task_result(scores=[0.0], checkpoint="step-1"))
    assert compare([tmp_path / "a"])[2][0].checkpoint_names == ["step-1"]
    save_results(tmp_path / "a-evaluation", task_result(scores=[1.0]), task_result(scores=[1.0], checkpoint="step-1"))
    (run,) = compare([tmp_path / "a"])[2]
    assert (run.name, len(run.checkpoint_names), run.scores(("fwe", 1024)).tolist()) == ("a", 2, [1.0])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (task_result(samples="t"), "fwe at 1,024 has other samples"),
        (task_result(length=2048), "tasks: fwe at 1,024 is in one alone"),
        (task_result(metric="acc"), "fwe at 1,024 has other metric"),
        (task_result("cwe"), "tasks: "),
    ],
)
def test_compare_refuses_other_samples_lengths_and_tasks(tmp_path, other, said):
    save_results(tmp_path / "a", task_result())
    save_results(tmp_path / "b-evaluation", other)
    with pytest.raises(UserError, match=f"a and b were not measured alike: {said}"):
        compare([tmp_path / "a", tmp_path / "b"])


def test_a_checkpoint_that_lacks_a_task_is_told(tmp_path):
    save_results(tmp_path / "a", task_result(), task_result("cwe"), task_result(checkpoint="step-1"))
    with pytest.raises(UserError, match=r"a: '?step-1'? has no result of cwe at 1,024, and others have; evaluate"):
        compare([tmp_path / "a"])


def test_a_step_whose_evaluation_failed_on_the_way_is_told_with_its_folder(tmp_path):
    place = tmp_path / "a-on-the-way"
    save_results(place, task_result(), task_result("cwe"), task_result(checkpoint="step-1"))
    with pytest.raises(UserError, match=rf"a: '?step-1'? has no result of cwe .*; remove {place}/step-1, or evaluate"):
        compare([tmp_path / "a"])


def test_what_is_no_result_is_one_line(tmp_path):
    save_results(tmp_path / "a", task_result())
    with pytest.raises(UserError, match=r"holds no results; first: torchtrain evaluate"):
        compare([tmp_path / "a", tmp_path / "none"])
    with pytest.raises(UserError, match="two are called "):
        compare([tmp_path / "a", tmp_path / "a"])
    place = tmp_path / "a" / "model" / "fwe-1024.json"
    text = place.read_text()
    for damaged, said in (
        (text[:-20], "is not JSON"),
        (text.replace('"score": 1.0', '"score": "a"'), "is damaged, or of another version"),
        (text.replace('"format": 2', '"format": 1'), "is damaged, or of another version"),
        (text.replace('"fwe"', '"cwe"'), "is of cwe at 1024"),
    ):
        place.write_text(damaged)
        with pytest.raises(UserError, match=said):
            compare([tmp_path / "a"])


@pytest.mark.parametrize("what", ["weights", "dtype", "engine", "anchor"])
def test_a_row_is_of_one_model_asked_in_one_way(tmp_path, what):
    """Each task's results agree among themselves; an average over both would be of two models."""
    other = {"weights": "v", "dtype": "bfloat16", "engine": {"backend": "vllm"}, "anchor": [1]}[what]
    save_results(tmp_path / "a", task_result(), task_result("cwe", settings=settings_of(**{what: other})))
    with pytest.raises(UserError, match=rf"a: (cwe and fwe|fwe and cwe) of '?model'? were measured with other {what}"):
        compare([tmp_path / "a"])


def test_perplexity_is_of_the_same_weights_and_needs_no_anchor(tmp_path):
    save_results(tmp_path / "a", task_result(settings=settings_of(anchor=[1])), perplexity_result())
    strange = perplexity_result().model_copy(update={"settings": settings_of(weights="v")})
    save_results(tmp_path / "a", strange)
    with pytest.raises(UserError, match="were measured with other weights"):
        compare([tmp_path / "a"])


def test_results_that_were_changed_by_hand_are_not_paired(tmp_path):
    save_results(tmp_path / "a", task_result(scores=[1.0, 0.0, 1.0]))
    save_results(tmp_path / "b", task_result(scores=[1.0, 0.0]))
    with pytest.raises(UserError, match="fwe at 1,024 has other samples, though it says the same"):
        compare([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    ("result", "old", "new", "says"),
    [
        (task_result(), '"index": 1', '"index": 0', "one sample is there twice"),
        (perplexity_result(), "1.9,", "", "of different documents"),
        (perplexity_result(), '"first": 256', '"first": 300', "does not begin where the one before ends"),
    ],
)
def test_a_damaged_result_is_told(tmp_path, result, old, new, says):
    save_results(tmp_path / "a", result)
    (place,) = (tmp_path / "a" / "model").iterdir()
    text = re.sub(r"\s*".join(map(re.escape, old.split())), new, place.read_text(), count=1)
    assert text != place.read_text()
    place.write_text(text)
    with pytest.raises(UserError, match=rf"is damaged, or of another version \(.*{says}"):
        compare([tmp_path / "a"])


def test_another_model_is_not_measured_into_a_folder_that_holds_one(tmp_path):
    """Of tasks that the suite does not have, too: their scores would be averaged with its own."""
    save_results(tmp_path, task_result("cwe"), NotRun(task="qa_1", length=1024, checkpoint="model", not_run="no file"))
    check_one_model(tmp_path, "model", settings_of())
    check_one_model(tmp_path, "step-1", settings_of(weights="v"))
    for other in ({"weights": "v"}, {"dtype": "bfloat16"}, {"anchor": [1]}, {"engine": {"backend": "vllm"}}):
        with pytest.raises(UserError, match=rf"cwe-1024\.json'? was measured with other {next(iter(other))}"):
            check_one_model(tmp_path, "model", settings_of(**other))
