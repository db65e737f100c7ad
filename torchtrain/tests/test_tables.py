"""The tables and figures of what was measured."""

import numpy as np
import pytest
import scipy.stats

from torchtrain.evaluation import tables
from torchtrain.evaluation.compare import compare, tables_of_run
from torchtrain.evaluation.results import NotRun, Training
from torchtrain.evaluation.suite import TASKS
from torchtrain.evaluation.tables import figures_of
from torchtrain.tests.measured_results import perplexity_result, save_results, save_seeds, task_result


def _cell(found, title, row, column) -> str:
    (table,) = [table for table in found if table.title == title]
    return dict(table.rows)[row][table.head.index(column) - 1]


def _bold(found) -> list[str]:
    return [cell for table in found for _, cells in table.rows for cell in cells if cell.startswith("**")]


def test_without_seeds_nothing_is_bold_and_a_line_says_what_the_interval_leaves_out(tmp_path):
    """Two runs of one method, each a little off: one run each cannot show which method is better."""
    ties, wins = [1.0] * 10 + [0.0] * 20, [1.0] * 20 + [0.0] * 10
    save_results(tmp_path / "a", task_result(scores=ties), perplexity_result(0.5))
    save_results(tmp_path / "b", task_result(scores=wins), perplexity_result())
    found, facts, runs = compare([tmp_path / "a", tmp_path / "b"])
    assert _bold(found) == []
    assert facts.keys() == {"a", "b"}
    by_title = {table.title: table for table in found}
    assert len(by_title) == 3
    for table in found:
        assert any("They leave out how much another seed of the same method differs" in note for note in table.notes)
    assert _cell(found, "Average of those that ran (1 of 13)", "1K", "b - a").startswith("+33.3 [+")
    perplexity = by_title["Perplexity by position at 1,024 tokens"]
    assert perplexity.head == ["positions", "a", "b", "b - a"]
    assert [*dict(perplexity.rows)] == ["1 to 255", "256 to 1,023", "1 to 1,023"]
    assert dict(perplexity.rows)["1 to 255"][2] == "-0.500"
    tables.write_tables(found, facts, tmp_path / "out", figures_of(runs))
    assert not list((tmp_path / "out").glob("*.svg")), "of one length and one checkpoint the table says as much"


def test_seeds_are_one_row_with_an_interval_over_them(tmp_path):
    """Bold needs both intervals: of 200 samples the first is surely above, of three seeds it is not."""
    base = [0.0] * 200
    a = save_seeds(tmp_path, "a", [base, base, base])
    steady = save_seeds(tmp_path, "steady", [[1.0] * n + [0.0] * (200 - n) for n in (50, 52, 54)])
    shaky = save_seeds(tmp_path, "shaky", [[1.0] * n + [0.0] * (200 - n) for n in (5, 20, 131)])
    found, _, runs = compare([a, steady])
    assert [(run.name, len(run.checkpoint_names)) for run in runs] == [("a", 3), ("steady", 3)]
    average = "Average of those that ran (1 of 13)"
    assert _bold(found) == [_cell(found, average, "1K", "steady")] * 2
    paired = _cell(found, average, "1K", "steady - a")
    assert paired.startswith("+26.0 [")
    assert paired == _cell(found, "Tasks at 1,024 tokens", "fwe", "steady - a")
    low, high = scipy.stats.ttest_1samp([25, 26, 27], 0).confidence_interval()
    assert paired.endswith(f"; seeds [{low:+.1f}, {high:+.1f}]")
    perplexity = next(table for table in found if table.title.startswith("Perplexity"))
    # All differ alike, which says nothing of the next.
    assert not any("seeds" in cell for _, cells in perplexity.rows for cell in cells)
    assert _bold(compare([a, shaky])[0]) == []


def test_longbench_and_mmlu_have_rows_of_their_own(tmp_path):
    def short(value: float, **more):
        names = [
            ("longbench_lcc", [value, 1.0]),
            ("longbench_repobench-p", [value, 0.0]),
            ("longbench_trec", [value, 1.0]),
        ]
        return [
            *(task_result(name, scores) for name, scores in names),
            task_result("mmlu_anatomy", [value]),
            task_result("mmlu_virology", [1.0, 1.0, 1.0]),
            task_result("hellaswag", [1.0, value], metric="acc_norm"),
        ]

    save_results(
        tmp_path / "a", *short(0.0), NotRun(task="longbench_samsum", length=1024, checkpoint="model", not_run="no file")
    )
    save_results(tmp_path / "b", *short(1.0))
    found, _, runs = compare([tmp_path / "a", tmp_path / "b"])
    (table,) = found
    assert (table.title, table.head) == ("Tasks at 1,024 tokens", ["task", "a", "b", "b - a"])
    rows = dict(table.rows)
    assert rows["LongBench Code Completion, mean of 2"][0].startswith("25.0 [")
    assert rows["LongBench Code Completion, mean of 2"][2].startswith("+50.0 [")
    assert rows["LongBench ICL, mean of 2"][0] == "none: 1 did not run"  # samsum: never an average of trec alone
    assert rows["mmlu, 2 of 57 subjects"][0].startswith("75.0 [")  # three of four questions, not the mean of 0 and 100
    assert rows["longbench_samsum"] == ["not run", "not run", ""]
    assert rows["hellaswag"][2].startswith("+50.0 [")
    assert any("Not run: longbench_samsum: no file." in note for note in table.notes)
    assert figures_of(runs) == []


def test_figures_show_runs_by_length_and_by_step(tmp_path):
    for name, shift in (("a", 0.0), ("b", 0.5)):
        for step, right in ((10, 3), (20, 6), (30, 5)):
            scores = [1.0] * right + [0.0] * (10 - right)
            for length in (1024, 2048):
                result = task_result(scores=scores, length=length, checkpoint=f"step-{step}")
                save_results(tmp_path / name, result.model_copy(update={"step": step}))
            save_results(
                tmp_path / name,
                perplexity_result(shift).model_copy(update={"step": step, "checkpoint": f"step-{step}"}),
            )
    found, facts, runs = compare([tmp_path / "a", tmp_path / "b"])
    figures = figures_of(runs)
    assert [figure.name for figure in figures] == ["score-by-length", "score-by-step", "perplexity-by-step"]
    assert all(
        f">{name}<" in figure.svg for figure in figures for name in ("a", "b", "1K")[: 2 + ("length" in figure.name)]
    )
    tables.write_tables(found, facts, tmp_path / "out", figures)
    assert len(list((tmp_path / "out").glob("*.svg"))) == 3
    document = tmp_path / "page.md"
    document.write_text(f"# Mine\n\n{tables.TABLES.begin}\n{tables.TABLES.end}\nmine\n")
    for _ in range(2):
        tables.write_document(found, facts, document, figures)
    text = document.read_text()
    assert text.startswith("# Mine\n\n<!--")
    assert text.endswith("-->\nmine\n")
    assert (tmp_path / "out" / "results.md").read_text().strip() in text
    assert text.count("](figures/page-") == len(list((tmp_path / "figures").iterdir())) == 3
    for last, mean in ((None, "46.7 "), (2, "55.0 "), (1, "50.0 [")):  # 3, 6 and 5 of 10
        found = compare([tmp_path / "a", tmp_path / "b"], last)[0]
        (table,) = [table for table in found if table.title.startswith("Average of those")]
        assert dict(table.rows)["1K"][0].startswith(mean)


def test_averages_are_of_thirteen_and_of_eleven_or_none():
    every = [task_result(task, [1.0, 1.0]) for task in TASKS]
    lost = [of for of in every if of.task not in ("niah_multikey_3", "cwe")]
    zeros = [task_result(task, [0.0, 0.0]) for task in ("niah_multikey_3", "cwe")]
    by_title = {table.title: table.rows[0][1][0] for table in tables_of_run([*lost, *zeros])}
    assert by_title["Average of the 13 tasks"].startswith("84.6 [")  # 11 of 13
    assert by_title["Average of the paper's 11 tasks"].startswith("100.0 [")
    missing = NotRun(task="qa_1", length=1024, checkpoint="model", not_run="squad is not set")
    found = {table.title: table for table in tables_of_run([*(of for of in every if of.task != "qa_1"), missing])}
    assert found.keys() == {"Average of those that ran (12 of 13)", "Tasks at 1,024 tokens"}
    assert dict(found["Tasks at 1,024 tokens"].rows)["qa_1"][0] == "not run"
    assert "Not run: qa_1: squad is not set." in found["Tasks at 1,024 tokens"].notes


def test_spread_is_over_steps_and_never_over_seeds(tmp_path):
    def step(value, number, samples="s"):
        return task_result(scores=[value] * 4, checkpoint=f"step-{number}", step=number, samples=samples)

    for seed, shift in ((0, 0.0), (1, 0.25)):
        save_results(tmp_path / f"a-{seed}", step(0.25 + shift, 1), step(0.75 + shift, 2))
    (average, _) = compare([tmp_path / "a-0"])[0]
    assert average.rows[0][1][0].startswith("50.0 ±35.4 [")  # .25 and .75: a standard deviation of .5 / sqrt 2
    seeds = f"a={tmp_path / 'a-0'},{tmp_path / 'a-1'}"
    assert "±" not in compare([seeds])[0][0].rows[0][1][0]


def test_any_other_task_has_a_row_and_one_without_samples_no_interval(tmp_path):
    bleu = task_result("wmt", [0.0], metric="bleu").model_copy(update={"answers": [], "values": {"bleu": 31.25}})
    (table,) = tables_of_run([task_result("arc_easy", [1.0, 1.0], metric="acc_norm"), bleu])
    assert table.rows == [("arc_easy", ["100.0 [34.2, 100.0]"]), ("wmt", ["31.250"])]
    assert "Metrics: arc_easy acc_norm, wmt bleu." in table.notes
    save_results(tmp_path / "a", bleu)
    save_results(tmp_path / "b", bleu.model_copy(update={"values": {"bleu": 30.0}}))
    (table,) = compare([tmp_path / "a", tmp_path / "b"])[0]
    assert table.rows[0][1] == ["31.250", "30.000", "-1.250"]
    for name, value in (("a-1", 31.25), ("a-2", 30.25), ("b-1", 33.25), ("b-2", 33.25)):
        save_results(tmp_path / name, bleu.model_copy(update={"values": {"bleu": value}}))
    (table,) = compare([f"{of}={tmp_path / of}-1,{tmp_path / of}-2" for of in "ab"])[0]
    low, high = scipy.stats.ttest_1samp([2.0, 3.0], 0).confidence_interval()
    assert table.rows[0][1][2] == f"+2.500; seeds [{low:+.3f}, {high:+.3f}]"


@pytest.mark.parametrize("losses", [[2.0, 2.2, 1.9], [2.0], [1.0, 9.0]])
def test_perplexity_has_an_interval_over_three_documents_or_more(losses):
    """Over the documents' means over checkpoints: two checkpoints are no more documents."""
    one = perplexity_result(losses=[losses, losses])
    for results in ([one], [one, one.model_copy(update={"checkpoint": "step-1"})]):
        (table,) = tables_of_run(results)
        text = f"{np.exp(np.mean(losses)):.2f}"
        if len(losses) >= 3:
            low, high = np.exp(scipy.stats.t.interval(0.95, 2, np.mean(losses), scipy.stats.sem(losses)))
            text += f" [{low:.2f}, {high:.2f}]"
        assert table.rows[0][1][0] == text
        assert table.notes[1].startswith("n = 3 documents;" if len(losses) >= 3 else f"n = {len(losses)}: too few")


def test_perplexity_says_whether_the_run_was_trained_on_the_text():
    facts = {"model": "m", "variant": "full", "sequence_length": 1024, "rope": {}, "steps": 1, "sequences_per_step": 1}
    for demo, known in (("speeches", True), ("code", False)):
        training = Training(**facts, data={"sources": [{"demo": demo, "split": "train"}]})
        identity = {"text": "speeches", "source": {"demo": "speeches"}}
        (table,) = tables_of_run([perplexity_result(training=training, identity=identity)])
        assert table.notes[0].startswith(f"Of speeches{', which the run was trained on' * known}; ")
