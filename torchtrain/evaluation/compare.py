"""Tables of runs next to each other, paired by sample, and by seed where there are several.

Bold means that a difference was shown, which takes seeds. One run of each method compares two models, not two methods:
the next runs of both would differ by more than the samples say.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.intervals import (
    Interval,
    format_perplexity,
    interval_of,
    mean_interval,
    paired_interval,
    sign_flip,
    student_interval,
)
from torchtrain.evaluation.measured import (
    Average,
    Column,
    Measured,
    check_alike,
    format_length,
    read_measured,
    ruler_averages,
)
from torchtrain.evaluation.published import UNSAID, UNSAID_OF_SPLITS, Publication, published_scores
from torchtrain.evaluation.results import Result
from torchtrain.evaluation.suite import HELLASWAG, LONGBENCH, LONGBENCH_E_PARTS, benchmark_of
from torchtrain.evaluation.tables import ScoreTable

_FEWEST_DOCUMENTS = 3  # for an interval
ONE_SEED = (
    "One run of each: intervals are over samples alone. They leave out how much another seed of the same method "
    "differs, so nothing is bold. NAME=RUN,RUN compares seeds."
)
_Row = TypeVar("_Row")
_Published = dict[str, dict[Column, tuple[float, int]]]  # by runs' names


def tables_of_run(results: Iterable[Result]) -> list[ScoreTable]:
    """Return the tables of one run."""
    return _tables([Measured("score").add(results)], None)


def compare(
    folders: Sequence[Path | str], last: int | None = None, published: Publication | None = None
) -> tuple[list[ScoreTable], dict[str, str], list[Measured]]:
    """Return the tables of runs, a line about each run, and their results.

    Args:
        folders: runs that were evaluated, or folders of results; `NAME=RUN,RUN`: runs of several seeds as one.
        last: how many checkpoints of each run at most, the last ones; None: all.
        published: the paper's numbers; they are shown next to a run that was trained and measured alike.

    Raises:
        UserError: a folder holds no results or damaged ones; or runs were not measured alike.
    """
    runs = [read_measured(str(folder), last) for folder in folders]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"RUN: two are called {quoted(twice)}, and a table could not tell them apart; rename a folder")
    for other in runs[1:]:
        check_alike(runs[0], other)
    return _tables(runs, published), {run.name: _describe(run) for run in runs}, runs


def _describe(run: Measured) -> str:
    if not (results := run.results()):
        return "nothing ran"
    first, steps = results[0], {result.checkpoint: result.step for result in results}
    names = ", ".join(name if step is None else f"step {step:,}" for name, step in steps.items())
    anchor = f", anchor {first.settings.anchor} before each prompt" if first.settings.anchor else ""
    return f"{first.source}: {names}; {first.settings.dtype} on {first.versions.get('torch', '')}{anchor}"


def _tables(runs: list[Measured], published: Publication | None) -> list[ScoreTable]:
    first, tables = runs[0], []
    paper = {} if published is None else {run.name: published_scores(run, published) for run in runs}
    for title, by_length in ruler_averages(first).items():
        rows = {format_length(length): average for length, average in by_length.items()}
        tables.append(_score_table(title, "length", runs, rows, paper, published))
    for length in sorted({length for _, length in first.asked}):
        rows = _task_rows(first, length)
        tables.append(_score_table(f"Tasks at {length:,} tokens", "task", runs, rows, paper, published))
    return tables + [_perplexity_table(runs, length) for length in sorted(first.perplexity)]


def _task_rows(run: Measured, length: int) -> dict[str, Average]:
    """Return the rows of a length: LongBench's averages, then a row for each task, MMLU's subjects as one."""
    rows = {}
    for group, names in LONGBENCH.items():
        if keys := [key for name in names if (key := (f"longbench_{name}", length)) in run.asked]:
            rows[f"LongBench {group}, mean of {len(keys)}"] = Average(keys)
    for part in LONGBENCH_E_PARTS:
        if keys := [key for key, (first, *_) in run.tasks.items() if key[1] == length and first.scores(part)]:
            rows[f"LongBench-E {part}, mean of {len(keys)}"] = Average(keys, part=part)
    asked = {task for task, n in run.asked if n == length}
    benchmarks = dict.fromkeys(["ruler", "longbench", *sorted({benchmark_of(task) for task in asked})])
    for task in [task for name in benchmarks if name != "mmlu" for task in run.names(name) if task in asked]:
        rows[task] = Average([(task, length)], published=("ruler_tasks", length, task))
    if HELLASWAG in rows:
        rows[HELLASWAG] = Average([(HELLASWAG, length)], published=("short", None, "HellaSwag"))
    if subjects := [(task, length) for task in run.names("mmlu") if task in asked]:
        rows[f"mmlu, {len(subjects)} of 57 subjects"] = Average(subjects, pooled=True)
    return rows


def _table(
    title: str,
    what: str,
    runs: list[Measured],
    rows: dict[str, _Row],
    cells: Callable[[_Row], list[str]],
    difference: Callable[[Measured, _Row], str],
    more: dict[str, list[str]],
    notes: list[str],
) -> ScoreTable:
    """Return a table with a column for each run (`cells` of a row), then one for each run's difference from the first,
    then `more` columns that are not empty. `what` heads the rows' names.
    """
    each = [cells(row) for row in rows.values()]
    columns = {run.name: [row[i] for row in each] for i, run in enumerate(runs)}
    for run in runs[1:]:
        columns[f"{run.name} - {runs[0].name}"] = [difference(run, row) for row in rows.values()]
    columns |= {name: column for name, column in more.items() if any(column)}
    body = [(name, [column[i] for column in columns.values()]) for i, name in enumerate(rows)]
    return ScoreTable(title, [what, *columns], body, notes)


def _score_table(
    title: str,
    what: str,
    runs: list[Measured],
    rows: dict[str, Average],
    paper: _Published,
    published: Publication | None,
) -> ScoreTable:
    def cell_of_paper(run: Measured, average: Average) -> str:
        scores = paper.get(run.name, {})
        if average.published not in scores or average.missing(run):
            return ""
        return "{:g} (table {})".format(*scores[average.published])

    def difference(run: Measured, average: Average) -> str:
        if average.missing(runs[0]):
            return ""
        a, b = average.scores(run), average.scores(runs[0])
        if all(0 <= scores.min() <= scores.max() <= 1 for scores in (*a, *b)):
            paired = _format(paired_interval(a, b), "{:+.1f} [{:+.1f}, {:+.1f}]", 100)
        else:  # a metric that is not a share (perplexity, BLEU)
            paired = f"{average.mean(run) - average.mean(runs[0]):+.3f}"
        return paired + _format(_over_seeds(run, runs[0], average.mean), "; seeds [{1:+.1f}, {2:+.1f}]", 100)

    columns = {f"{run.name}, published": [cell_of_paper(run, of) for of in rows.values()] for run in runs}
    notes = _notes(runs, [*rows.values()])
    shown = [run for run in runs if any(columns[f"{run.name}, published"])]
    if shown and published is not None:
        notes += [
            f"Published: arXiv {published.arxiv}v{published.version}, by transcriptions, of the same model, data, "
            "variant and length. It is in no mean and no interval.",
            UNSAID,
        ]
        trainings = [next(iter(run.tasks.values()))[0].training for run in shown]
        notes += [UNSAID_OF_SPLITS] * any(of is not None and "interleave" in of.variant for of in trainings)
    return _table(title, what, runs, rows, lambda average: _cells(runs, average), difference, columns, notes)


def _cells(runs: list[Measured], average: Average) -> list[str]:
    """Return a cell for each run.

    The best is bold if, against each other run, the intervals over samples and over seeds leave out zero, and drawing
    the signs of the differences agrees: the bootstrap knows too little of few samples.
    """
    cells = [_format_mean(run, average) for run in runs]
    if len(runs) == 1 or average.missing(runs[0]):
        return cells
    best = max(range(len(runs)), key=lambda i: average.mean(runs[i]))

    def is_above(other: Measured) -> bool:
        over_seeds = _over_seeds(runs[best], other, average.mean)
        a, b = average.scores(runs[best]), average.scores(other)
        return over_seeds is not None and over_seeds[1] > 0 and paired_interval(a, b)[1] > 0 and sign_flip(a, b) < 0.05

    if all(is_above(run) for i, run in enumerate(runs) if i != best):
        cells[best] = f"**{cells[best]}**"
    return cells


def _format_mean(run: Measured, average: Average) -> str:
    if missing := average.missing(run):
        return "not run" if len(average.keys) == 1 else f"none: {len(missing)} did not run"
    if not any(result.answers for key in average.keys for result in run.tasks[key]):
        return f"{average.mean(run):.3f}"
    scores, spread = average.scores(run), average.spread(run)
    interval = mean_interval(scores[0]) if len(scores) == 1 else interval_of(scores)
    deviation = "" if spread is None else f" ±{100 * spread:.1f}"
    return _format(interval, f"{{:.1f}}{deviation} [{{:.1f}}, {{:.1f}}]", 100)


def _format(interval: Interval | None, text: str, scale: float = 1) -> str:
    return "" if interval is None else text.format(*(scale * number for number in interval))


def _over_seeds(run: Measured, other: Measured, mean: Callable[[Measured], float]) -> Interval | None:
    """Return the interval of a difference over seeds; None if seeds do not pair, or all differences are equal."""
    if len(run.seeds) < 2 or len(run.seeds) != len(other.seeds):
        return None
    return student_interval([mean(a) - mean(b) for a, b in zip(run.seeds, other.seeds, strict=True)])


def _notes(runs: list[Measured], averages: Sequence[Average]) -> list[str]:
    keys = [key for average in averages for key in average.keys]
    results = [result for key in keys for result in runs[0].tasks.get(key, [])]
    notes = []
    if counts := sorted({len(result.answers) for result in results if result.answers}):
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        how = "Wilson's for a row of one run"
        if len(runs) > 1:
            how += ", by bootstrap for a difference paired by sample" + ", Student's over seeds" * _have_seeds(runs)
        notes.append(f"n = {number} samples of each task and length; in brackets 95 per cent intervals: {how}.")
    metrics = {result.task: result.metric for result in results if result.metric != "score"}
    notes += [f"Metrics: {', '.join(f'{task} {metric}' for task, metric in metrics.items())}."] * (0 < len(metrics) < 6)
    haystacks = {result.identity.get("materials", {}).get("haystack") for result in results} - {None}
    notes += [f"Haystack: {name}." for name in sorted(haystacks)]
    cut = sum(result.cut_prompts for result in results)
    notes += [f"{cut} prompts were longer than the length and were cut."] * bool(cut)
    notes += ["MMLU: of all questions, whatever their subject."] * any(average.pooled for average in averages)
    notes += [ONE_SEED] * (len(runs) > 1 and not _have_seeds(runs))
    why = {f"{task}: {run.not_run[task, n]}" for run in runs for task, n in keys if (task, n) in run.not_run}
    return notes + ([f"Not run: {'; '.join(sorted(why))}."] if why else [])


def _have_seeds(runs: list[Measured]) -> bool:
    return all(len(run.seeds) > 1 and len(run.seeds) == len(runs[0].seeds) for run in runs)


def _perplexity_table(runs: list[Measured], length: int) -> ScoreTable:
    first, example = runs[0], runs[0].perplexity[length][0]

    def losses(run: Measured, bucket: int) -> np.ndarray:
        """Return [documents]: the mean loss over checkpoints."""
        return np.mean([result.buckets[bucket].losses for result in run.perplexity[length]], axis=0)

    def cells(bucket: int) -> list[str]:
        return [_format_documents(losses(run, bucket), format_perplexity) for run in runs]

    def difference(run: Measured, bucket: int) -> str:
        paired = _format_documents(losses(run, bucket) - losses(first, bucket), "{:+.3f}".format)
        over_seeds = _over_seeds(run, first, lambda seed: float(losses(seed, bucket).mean()))
        return paired + _format(over_seeds, "; seeds [{1:+.3f}, {2:+.3f}]")

    count = len(example.buckets[0].losses)
    interval = "in brackets 95 per cent intervals over documents (Student's, of the mean loss or difference)."
    notes = [
        f"Of {example.text}; each token with all tokens of the document before it. Differences are of the loss.",
        f"n = {count} documents; {interval}"
        if count >= _FEWEST_DOCUMENTS
        else f"n = {count}: too few documents for an interval.",
        *[ONE_SEED] * (len(runs) > 1 and not _have_seeds(runs)),
    ]
    rows = {f"{of.first:,} to {of.end - 1:,}": bucket for bucket, of in enumerate(example.buckets)}
    return _table(f"Perplexity by position at {length:,} tokens", "positions", runs, rows, cells, difference, {}, notes)


def _format_documents(losses: np.ndarray, number: Callable[[float], str]) -> str:
    """Return the mean over documents, with its interval if there are enough documents."""
    interval = student_interval(losses) if len(losses) >= _FEWEST_DOCUMENTS else None
    return number(float(losses.mean())) if interval is None else "{} [{}, {}]".format(*map(number, interval))
