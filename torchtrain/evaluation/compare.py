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
from torchtrain.evaluation.suite import HELLASWAG, LONGBENCH, LONGBENCH_E_PARTS, benchmark_of, is_longbench_e
from torchtrain.evaluation.tables import ScoreTable

_FEWEST_DOCUMENTS = 3  # for an interval
ONE_SEED = (
    "One run of each: intervals are over samples alone. They leave out how much another seed of the same method "
    "differs, so nothing is bold. NAME=RUN,RUN compares seeds."
)
_Row = TypeVar("_Row")


def tables_of_run(results: Iterable[Result]) -> list[ScoreTable]:
    """Return the tables of one run."""
    return _tables([Measured("score").add(results)], None)


def compare(
    folders: Sequence[Path | str], last: int | None = None, published: Publication | None = None
) -> tuple[list[ScoreTable], dict[str, str], list[Measured]]:
    """Return the tables of runs, a line about each run, and what was measured of them.

    Args:
        folders: runs that were evaluated, or folders of results; `NAME=RUN,RUN`: runs of several seeds as one.
        last: how many checkpoints of each run at most, the last ones; None: all.
        published: the paper's numbers; a row of them is shown below a run that was trained and measured alike.

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


def _tables(runs: list[Measured], published: Publication | None) -> list[ScoreTable]:
    first, tables = runs[0], []
    paper = {run.name: {} if published is None else published_scores(run, published) for run in runs}
    for title, by_length in ruler_averages(first).items():
        rows = {format_length(length): average for length, average in by_length.items()}
        tables.append(_score_table(title, "length", runs, rows, paper, published))
    for length in sorted({length for _, length in first.asked}):
        rows = {**_longbench_rows(first, length), **_task_rows(first, length)}
        tables.append(_score_table(f"Tasks at {length:,} tokens", "task", runs, rows, paper, published))
    return tables + [_perplexity_table(runs, length) for length in sorted(first.perplexity)]


def _longbench_rows(run: Measured, length: int) -> dict[str, Average]:
    """Return LongBench's averages: of its groups, and of LongBench-E by the words of a context."""
    rows = {}
    for group, names in LONGBENCH.items():
        if keys := [key for name in names if (key := (f"longbench_{name}", length)) in run.asked]:
            rows[f"LongBench {group}, mean of {len(keys)}"] = Average(keys)
    extended = [key for key in run.found if key[1] == length and is_longbench_e(key[0])]
    for part in LONGBENCH_E_PARTS:
        if keys := [key for key in extended if run.found[key][0].scores(part)]:
            rows[f"LongBench-E {part}, mean of {len(keys)}"] = Average(keys, part=part)
    return rows


def _task_rows(run: Measured, length: int) -> dict[str, Average]:
    """Return a row for each task at a length: RULER's first, then LongBench's; MMLU's subjects are one."""
    asked = {task for task, n in run.asked if n == length}
    names = dict.fromkeys(["ruler", "longbench", *sorted({benchmark_of(task) for task in asked})])
    ordered = [task for name in names if name != "mmlu" for task in run.tasks(name) if task in asked]
    rows = {task: Average([(task, length)], published=("ruler_tasks", length, task)) for task in ordered}
    if HELLASWAG in rows:
        rows[HELLASWAG] = Average([(HELLASWAG, length)], published=("short", None, "HellaSwag"))
    if subjects := [(task, length) for task in run.tasks("mmlu") if task in asked]:
        rows[f"mmlu, {len(subjects)} of 57 subjects"] = Average(subjects, pooled=True)
    return rows


def _score_table(
    title: str,
    what: str,
    runs: list[Measured],
    rows: dict[str, Average],
    paper: dict[str, dict[Column, tuple[float, int]]],
    published: Publication | None,
) -> ScoreTable:
    def cell_of_paper(run: Measured, average: Average) -> str:
        key = average.published
        found = None if key is None or average.missing(run) else paper[run.name].get(key)
        return "" if found is None else f"{found[0]:g} (table {found[1]})"

    def difference(run: Measured, average: Average) -> str:
        if average.missing(runs[0]):
            return ""
        over_seeds = _format(_over_seeds(run, runs[0], average.mean), "; seeds [{1:+.1f}, {2:+.1f}]", 100)
        return _format_paired(run, runs[0], average) + over_seeds

    beside = {f"{run.name}, published": [cell_of_paper(run, of) for of in rows.values()] for run in runs}
    notes = _notes(runs, [*rows.values()])
    shown = [run for run in runs if any(beside[f"{run.name}, published"])]
    if shown and published is not None:
        notes += [
            f"Published: arXiv {published.arxiv}v{published.version}, by transcriptions, of the same model, data, "
            "variant and length. It is in no mean and no interval.",
            UNSAID,
        ]
        trainings = [next(iter(run.found.values()))[0].training for run in shown]
        notes += [UNSAID_OF_SPLITS] * any(of is not None and "interleave" in of.variant for of in trainings)
    return _table(title, what, runs, rows, _cells, difference, beside, notes)


def _table(
    title: str,
    what: str,
    runs: list[Measured],
    rows: dict[str, _Row],
    cells: Callable[[list[Measured], _Row], list[str]],
    difference: Callable[[Measured, _Row], str],
    more: dict[str, list[str]],
    notes: list[str],
) -> ScoreTable:
    """Return a table with a column for each run, then one for each difference from the first run.

    Args:
        title, notes: of the table.
        what: the head of the rows' names.
        runs: measured alike.
        rows: by their names.
        cells: from runs and a row to a cell of each.
        difference: from a run and a row to its difference from the first run.
        more: further columns.
    """
    each = [cells(runs, row) for row in rows.values()]
    columns = {run.name: [row[i] for row in each] for i, run in enumerate(runs)}
    for run in runs[1:]:
        columns[f"{run.name} - {runs[0].name}"] = [difference(run, row) for row in rows.values()]
    columns |= {name: column for name, column in more.items() if any(column)}
    body = [(name, [column[i] for column in columns.values()]) for i, name in enumerate(rows)]
    return ScoreTable(title, [what, *columns], body, notes)


def _format_paired(run: Measured, other: Measured, average: Average) -> str:
    """Return the difference of two runs in points, with its interval.

    A metric that is not a share (perplexity, BLEU) has its difference alone.
    """
    a, b = average.scores(run), average.scores(other)
    if not all(0 <= scores.min() <= scores.max() <= 1 for scores in (*a, *b)):
        return f"{average.mean(run) - average.mean(other):+.3f}"
    return _format(paired_interval(a, b), "{:+.1f} [{:+.1f}, {:+.1f}]", 100)


def _format(interval: Interval | None, text: str, scale: float = 1) -> str:
    return "" if interval is None else text.format(*(scale * number for number in interval))


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
    """Return an average with its interval and its spread over checkpoints."""
    if missing := average.missing(run):
        return "not run" if len(average.keys) == 1 else f"none: {len(missing)} did not run"
    scores = average.scores(run)
    if not any(result.answers for key in average.keys for result in run.found[key]):
        return f"{average.mean(run):.3f}"
    interval = mean_interval(scores[0]) if len(scores) == 1 else interval_of(scores)
    spread = average.spread(run)
    deviation = "" if spread is None else f" ±{100 * spread:.1f}"
    return _format(interval, f"{{:.1f}}{deviation} [{{:.1f}}, {{:.1f}}]", 100)


def _over_seeds(run: Measured, other: Measured, mean: Callable[[Measured], float]) -> Interval | None:
    """Return the interval of a difference over seeds; None where seeds do not pair, or where all differ alike."""
    if len(run.seeds) < 2 or len(run.seeds) != len(other.seeds):
        return None
    return student_interval([mean(a) - mean(b) for a, b in zip(run.seeds, other.seeds, strict=True)])


def _perplexity_table(runs: list[Measured], length: int) -> ScoreTable:
    first, example = runs[0], runs[0].perplexity[length][0]
    losses = {run.name: _losses(run, length) for run in runs}

    def cells(runs: list[Measured], bucket: int) -> list[str]:
        return [_format_documents(losses[run.name][bucket], format_perplexity) for run in runs]

    def difference(run: Measured, bucket: int) -> str:
        paired = _format_documents(losses[run.name][bucket] - losses[first.name][bucket], "{:+.3f}".format)
        over_seeds = _over_seeds(run, first, lambda seed: float(_losses(seed, length)[bucket].mean()))
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
    title = f"Perplexity by position at {length:,} tokens"
    return _table(title, "positions", runs, rows, cells, difference, {}, notes)


def _losses(run: Measured, length: int) -> np.ndarray:
    """Return [buckets, documents]: the mean loss over checkpoints."""
    return np.mean([[of.losses for of in result.buckets] for result in run.perplexity[length]], axis=0)


def _format_documents(losses: np.ndarray, number: Callable[[float], str]) -> str:
    """Return the mean of documents' losses, or of differences, with its interval where there are enough documents."""
    interval = student_interval(losses) if len(losses) >= _FEWEST_DOCUMENTS else None
    return number(float(losses.mean())) if interval is None else "{} [{}, {}]".format(*map(number, interval))


def _have_seeds(runs: list[Measured]) -> bool:
    return all(len(run.seeds) > 1 and len(run.seeds) == len(runs[0].seeds) for run in runs)


def _notes(runs: list[Measured], averages: Sequence[Average]) -> list[str]:
    """Return the notes below a table: samples, intervals, metrics, haystack, what was cut, what did not run."""
    keys = [key for average in averages for key in average.keys]
    results = [result for key in keys for result in runs[0].found.get(key, [])]
    notes = []
    if counts := sorted({len(result.answers) for result in results if result.answers}):
        said = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        how = "Wilson's for a row of one run"
        if len(runs) > 1:
            how += ", by bootstrap for a difference paired by sample" + ", Student's over seeds" * _have_seeds(runs)
        notes.append(f"n = {said} samples of each task and length; in brackets 95 per cent intervals: {how}.")
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


def _describe(run: Measured) -> str:
    """Return the source, checkpoints, dtype and anchor of a run on one line."""
    results = run.results()
    if not results:
        return "nothing ran"
    steps = {result.checkpoint: result.step for result in results}
    names = ", ".join(name if step is None else f"step {step:,}" for name, step in steps.items())
    first = results[0]
    anchor = f", anchor {first.settings.anchor} before each prompt" if first.settings.anchor else ""
    return f"{first.source}: {names}; {first.settings.dtype} on {first.versions.get('torch', '')}{anchor}"
