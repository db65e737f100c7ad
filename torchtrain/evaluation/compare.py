"""Tables of runs next to each other, paired by sample, and by seed where there are several.

Bold means that a difference was shown, which takes seeds. One run of each method compares two models, not two methods:
the next runs of both would differ by more than the samples say.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

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
from torchtrain.evaluation.measured import Average, Measured, check_alike, format_length, read_measured, ruler_averages
from torchtrain.evaluation.results import Result
from torchtrain.evaluation.suite import LONGBENCH, LONGBENCH_E_PARTS, benchmark_of
from torchtrain.evaluation.tables import ScoreTable

_FEWEST_DOCUMENTS = 3  # for an interval
ONE_SEED = (
    "One run of each: intervals are over samples alone. They leave out how much another seed of the same method "
    "differs, so nothing is bold. NAME=RUN,RUN compares seeds."
)


def tables_of_run(results: Iterable[Result]) -> list[ScoreTable]:
    """Return the tables of one run."""
    return _tables([Measured("score").add(results)])


def compare(
    folders: Sequence[Path | str], last: int | None = None
) -> tuple[list[ScoreTable], dict[str, str], list[Measured]]:
    """Return the tables of runs, a line about each run, and their results.

    folders: runs that were evaluated, or folders of results; `NAME=RUN,RUN`: runs of several seeds as one.
    last: how many checkpoints of each run at most, the last ones; None: all.
    Raises UserError: a folder holds no results or damaged ones; or runs were not measured alike.
    """
    runs = [read_measured(str(folder), last) for folder in folders]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"RUN: two are called {quoted(twice)}, and a table could not tell them apart; rename a folder")
    for other in runs[1:]:
        check_alike(runs[0], other)
    return _tables(runs), {run.name: _describe(run) for run in runs}, runs


def _describe(run: Measured) -> str:
    if not (results := run.results()):
        return "nothing ran"
    first, steps = results[0], {result.checkpoint: result.step for result in results}
    names = ", ".join(name if step is None else f"step {step:,}" for name, step in steps.items())
    anchor = f", anchor {first.settings.anchor} before each prompt" if first.settings.anchor else ""
    return f"{first.source}: {names}; {first.settings.dtype} on {first.versions.get('torch', '')}{anchor}"


def _tables(runs: list[Measured]) -> list[ScoreTable]:
    first = runs[0]
    tables: list[tuple[str, str, dict[str, Average]]] = []  # title, what its rows are, rows
    for title, by_length in ruler_averages(first).items():
        tables.append((title, "length", {format_length(length): average for length, average in by_length.items()}))
    for length in sorted({length for task, length in first.asked if task != "perplexity"}):
        tables.append((f"Tasks at {length:,} tokens", "task", _task_rows(first, length)))
    for key in sorted(key for key in first.tasks if key[0] == "perplexity"):
        parts = dict.fromkeys(answer.part for answer in first.tasks[key][0].answers)
        rows = {part: Average([key], part=part) for part in parts}
        tables.append((f"Perplexity by position at {key[1]:,} tokens", "positions", rows))
    return [_table(*table, runs) for table in tables]


def _task_rows(run: Measured, length: int) -> dict[str, Average]:
    rows = {}
    for group, names in LONGBENCH.items():
        if keys := [key for name in names if (key := (f"longbench_{name}", length)) in run.asked]:
            rows[f"LongBench {group}, mean of {len(keys)}"] = Average(keys)
    at_length = {key: results[0] for key, results in run.tasks.items() if key[1] == length and key[0] != "perplexity"}
    for part in LONGBENCH_E_PARTS:
        if keys := [key for key, result in at_length.items() if result.scores(part)]:
            rows[f"LongBench-E {part}, mean of {len(keys)}"] = Average(keys, part=part)
    asked = {task for task, n in run.asked if n == length and task != "perplexity"}
    benchmarks = dict.fromkeys(["ruler", "longbench", *sorted({benchmark_of(task) for task in asked})])
    for task in [task for name in benchmarks if name != "mmlu" for task in run.names(name) if task in asked]:
        rows[task] = Average([(task, length)])
    if subjects := [(task, length) for task in run.names("mmlu") if task in asked]:
        rows[f"mmlu, {len(subjects)} of 57 subjects"] = Average(subjects, pooled=True)
    return rows


def _table(title: str, what: str, rows: dict[str, Average], runs: list[Measured]) -> ScoreTable:
    first, *others = runs
    head = [what, *(run.name for run in runs), *(f"{run.name} - {first.name}" for run in others)]
    body = {
        name: [*_cells(runs, average), *(_format_difference(run, first, average) for run in others)]
        for name, average in rows.items()
    }
    notes = (_notes_of_losses if what == "positions" else _notes)(runs, [*rows.values()])
    return ScoreTable(title, head, [*body.items()], notes)


def _cells(runs: list[Measured], average: Average) -> list[str]:
    """Return a cell for each run.

    The best is bold if, against each other run, the intervals over samples and over seeds leave out zero, and drawing
    the signs of the differences agrees: the bootstrap knows too little of few samples.
    """
    cells = [_format_mean(run, average) for run in runs]
    if len(runs) == 1 or average.is_loss or average.missing(runs[0]):
        return cells
    best = max(range(len(runs)), key=lambda i: average.mean(runs[i]))

    def is_above(other: Measured) -> bool:
        over_seeds = _over_seeds(runs[best], other, average)
        a, b = average.scores(runs[best]), average.scores(other)
        return over_seeds is not None and over_seeds[1] > 0 and paired_interval(a, b)[1] > 0 and sign_flip(a, b) < 0.05

    if all(is_above(run) for i, run in enumerate(runs) if i != best):
        cells[best] = f"**{cells[best]}**"
    return cells


def _format_mean(run: Measured, average: Average) -> str:
    if missing := average.missing(run):
        return "not run" if len(average.keys) == 1 else f"none: {len(missing)} did not run"
    scores, spread = average.scores(run), average.spread(run)
    if average.is_loss:
        return _format(_of_documents(scores[0]), format_perplexity)
    if not any(result.answers for key in average.keys for result in run.tasks[key]):
        return f"{average.mean(run):.3f}"
    interval = mean_interval(scores[0]) if len(scores) == 1 else interval_of(scores)
    deviation = "" if spread is None else f" ±{100 * spread:.1f}"
    return _format(interval, lambda number: f"{100 * number:.1f}", deviation)


def _format_difference(run: Measured, first: Measured, average: Average) -> str:
    """Return the difference of two runs paired by sample, and over seeds. One that is no share has no interval."""
    if average.missing(first):
        return ""
    a, b = average.scores(run), average.scores(first)
    show: Callable[[float], str] = "{:+.3f}".format
    if average.is_loss:
        interval = _of_documents(a[0] - b[0])
    elif all(0 <= scores.min() <= scores.max() <= 1 for scores in (*a, *b)):
        interval, show = paired_interval(a, b), lambda number: f"{100 * number:+.1f}"
    else:  # perplexity, BLEU
        mean = average.mean(run) - average.mean(first)
        interval = (mean, mean, mean)
    seeds = _over_seeds(run, first, average)
    return _format(interval, show) + ("" if seeds is None else f"; seeds [{show(seeds[1])}, {show(seeds[2])}]")


def _format(interval: Interval, show: Callable[[float], str], deviation: str = "") -> str:
    mean, low, high = interval
    return show(mean) + deviation + (f" [{show(low)}, {show(high)}]" if low < high else "")


def _of_documents(losses: np.ndarray) -> Interval:
    """Return the mean over documents, with its interval if there are enough documents, or else without width."""
    mean = float(losses.mean())
    interval = student_interval(losses) if len(losses) >= _FEWEST_DOCUMENTS else None
    return interval or (mean, mean, mean)


def _over_seeds(run: Measured, other: Measured, average: Average) -> Interval | None:
    """Return the interval of a difference over seeds; None if seeds do not pair, or all differences are equal."""
    if not _have_seeds([run, other]):
        return None
    return student_interval([average.mean(a) - average.mean(b) for a, b in zip(run.seeds, other.seeds, strict=True)])


def _have_seeds(runs: list[Measured]) -> bool:
    return all(len(run.seeds) > 1 and len(run.seeds) == len(runs[0].seeds) for run in runs)


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


def _notes_of_losses(runs: list[Measured], averages: Sequence[Average]) -> list[str]:
    result, count = runs[0].tasks[averages[0].keys[0]][0], len(averages[0].scores(runs[0])[0])
    source = result.identity.get("source", {})
    sources = [] if result.training is None else result.training.data.get("sources", [])
    known = ", which the run was trained on" if any(source.items() <= dict(of).items() for of in sources) else ""
    interval = "in brackets 95 per cent intervals over documents (Student's, of the mean loss or difference)"
    few = count < _FEWEST_DOCUMENTS
    return [
        f"Of {result.identity.get('text')}{known}; each token with all tokens of the document before it. Differences "
        "are of the loss.",
        f"n = {count}: too few documents for an interval." if few else f"n = {count} documents; {interval}.",
        *[ONE_SEED] * (len(runs) > 1 and not _have_seeds(runs)),
    ]
