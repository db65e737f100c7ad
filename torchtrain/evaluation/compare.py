"""Tables of runs next to each other, paired by sample, and by seed where there are several.

Bold means that a difference was shown, which takes seeds. One run of each method tells two models apart, not two
methods: the next runs of both would differ by more than the samples say.
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
from torchtrain.evaluation.measured import (
    Average,
    Measured,
    check_alike,
    format_length,
    read_measured,
    ruler_averages,
)
from torchtrain.evaluation.published import UNSAID, UNSAID_OF_SPLITS, Column, Publication, published_scores
from torchtrain.evaluation.results import Result
from torchtrain.evaluation.suite import HELLASWAG, LONGBENCH, LONGBENCH_E_PARTS, benchmark_of
from torchtrain.evaluation.tables import ScoreCell, ScoreTable

_FEWEST_DOCUMENTS = 3  # for an interval
ONE_SEED = (
    "One run of each: intervals are over samples alone. They leave out how much another seed of the same method "
    "differs, so nothing is bold. NAME=RUN,RUN compares seeds."
)
_NO_COLUMN: Column = ("", None, "")  # a column that the paper does not have


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
    kinds = {"Average of the 13 tasks": "ruler_13", "Average of the paper's 11 tasks": "ruler_11"}
    for title, by_length in ruler_averages(first).items():
        columns = {format_length(length): average for length, average in by_length}
        keys: list[Column] = [(kinds.get(title, ""), None, length) for length, _ in by_length]
        tables += _side_by_side(title, runs, columns) + _with_published(title, runs, published, columns, keys)
    for length in first.lengths("longbench"):
        groups = _longbench_groups(first, length)
        tables += _side_by_side(f"LongBench at {length:,} tokens", runs, groups, ["The mean over each group's tasks."])
        parts = _longbench_e_parts(first, length)
        notes = ["The mean over the tasks, by the words of a sample's context."]
        tables += _side_by_side(f"LongBench-E at {length:,} tokens", runs, parts, notes)
    short, keys = _short_benchmarks(first)
    tables += _side_by_side("Short benchmarks", runs, short)
    tables += _with_published("Short benchmarks", runs, published, short, keys)
    for length in sorted({length for _, length in [*first.found, *first.not_run]}):
        columns = _tasks_at(first, length)
        title = f"Tasks at {length:,} tokens"
        tables += _by_task(title, runs, columns)
        keys = [("ruler_tasks", length, task) for task in columns]
        tables += _with_published(title, runs, published, columns, keys)
    return tables + [_perplexity_table(runs, length) for length in sorted(first.perplexity)]


def _longbench_groups(run: Measured, length: int) -> dict[str, Average]:
    asked = {task for task, n in [*run.found, *run.not_run] if n == length}
    groups = {
        group: [(task, length) for name in names if (task := f"longbench_{name}") in asked]
        for group, names in LONGBENCH.items()
    }
    return {group: Average(group, keys) for group, keys in groups.items() if keys}


def _longbench_e_parts(run: Measured, length: int) -> dict[str, Average]:
    """Return LongBench-E's averages by the length of the context."""
    tasks = [(task, length) for task in run.tasks("longbench") if task.endswith("_e") and (task, length) in run.found]
    parts = {part: [key for key in tasks if run.found[key][0].scores(part)] for part in LONGBENCH_E_PARTS}
    return {part: Average(part, keys, part=part) for part, keys in parts.items() if keys}


def _short_benchmarks(run: Measured) -> tuple[dict[str, Average], list[Column]]:
    """Return the columns of the paper's table of short benchmarks, and where the paper has each."""
    columns: dict[str, Average] = {}
    keys: list[Column] = []
    if (lengths := run.lengths("longbench")) and "ICL" in (groups := _longbench_groups(run, lengths[-1])):
        columns[f"LongBench ICL ({format_length(lengths[-1])})"] = groups["ICL"]
        keys.append(_NO_COLUMN)
    own = len(columns)
    if lengths := run.lengths(HELLASWAG):
        columns["HellaSwag"] = Average(HELLASWAG, [(HELLASWAG, lengths[-1])])
        keys.append(("short", None, "HellaSwag"))
    if lengths := run.lengths("mmlu"):
        subjects = [(task, lengths[-1]) for task in run.tasks("mmlu")]
        columns[f"MMLU ({len(subjects)} of 57 subjects)"] = Average("MMLU", subjects, pooled=True)
        keys.append(_NO_COLUMN)
    return (columns, keys) if len(columns) > own else ({}, [])


def _tasks_at(run: Measured, length: int) -> dict[str, Average]:
    """Return a column for each task at a length: RULER's first, then LongBench's; MMLU's subjects are one."""
    asked = {task for task, n in [*run.found, *run.not_run] if n == length}
    names = dict.fromkeys(["ruler", "longbench", *sorted({benchmark_of(task) for task in asked})])
    ordered = [task for name in names if name != "mmlu" for task in run.tasks(name) if task in asked]
    columns = {task: Average(task, [(task, length)]) for task in ordered}
    if subjects := [(task, length) for task in run.tasks("mmlu") if task in asked]:
        columns["mmlu"] = Average("mmlu", subjects, pooled=True)
    return columns


def _by_task(title: str, runs: list[Measured], columns: dict[str, Average]) -> list[ScoreTable]:
    """Return a table with a row for each task, a column for each run, and one for each difference from the first."""
    if not columns:
        return []
    first, others = runs[0], runs[1:]
    rows = [
        (task, [*_cells(runs, average), *(ScoreCell(_format_paired(run, first, average)) for run in others)])
        for task, average in columns.items()
    ]
    head = ["task", *(run.name for run in runs), *(f"{run.name} - {first.name}, paired" for run in others)]
    return [ScoreTable(title, head, rows, _notes(runs, [*columns.values()], seeds=False))]


def _side_by_side(
    title: str, runs: list[Measured], columns: dict[str, Average], notes: Sequence[str] = ()
) -> list[ScoreTable]:
    """Return a table with a row for each run, and below them the differences from the first, paired by sample."""
    if not columns:
        return []
    first, cells = runs[0], [_cells(runs, average) for average in columns.values()]
    rows = [(run.name, [column[i] for column in cells]) for i, run in enumerate(runs)]
    for run in runs[1:]:
        paired, over_seeds = [], []
        for average in columns.values():
            paired.append(ScoreCell(_format_paired(run, first, average)))
            difference = None if average.missing(first) else _over_seeds(run, first, average.mean)
            over_seeds.append(ScoreCell(_format(difference, "[{1:+.1f}, {2:+.1f}]", 100)))
        rows.append((f"{run.name} - {first.name}, paired", paired))
        if any(cell.text for cell in over_seeds):
            rows.append((f"{run.name} - {first.name}, over {len(run.seeds)} seeds", over_seeds))
    return [ScoreTable(title, ["", *columns], rows, [*notes, *_notes(runs, [*columns.values()])])]


def _format_paired(run: Measured, other: Measured, average: Average) -> str:
    """Return the difference of two runs in points, with its interval; "" where the tasks did not run.

    A metric that is not a share (perplexity, BLEU) has its difference alone.
    """
    if average.missing(other):
        return ""
    a, b = average.scores(run), average.scores(other)
    if not all(0 <= scores.min() <= scores.max() <= 1 for scores in (*a, *b)):
        return f"{average.mean(run) - average.mean(other):+.3f}"
    return _format(paired_interval(a, b), "{:+.1f} [{:+.1f}, {:+.1f}]", 100)


def _format(interval: Interval | None, text: str, scale: float = 1) -> str:
    return "" if interval is None else text.format(*(scale * number for number in interval))


def _cells(runs: list[Measured], average: Average) -> list[ScoreCell]:
    """Return a cell for each run.

    The best is bold if, against each other run, the intervals over samples and over seeds leave out zero, and drawing
    the signs of the differences agrees: the bootstrap knows too little of few samples.
    """
    cells = [ScoreCell(_format_mean(run, average)) for run in runs]
    if len(runs) == 1 or average.missing(runs[0]):
        return cells
    best = max(range(len(runs)), key=lambda i: average.mean(runs[i]))

    def is_above(other: Measured) -> bool:
        over_seeds = _over_seeds(runs[best], other, average.mean)
        a, b = average.scores(runs[best]), average.scores(other)
        return over_seeds is not None and over_seeds[1] > 0 and paired_interval(a, b)[1] > 0 and sign_flip(a, b) < 0.05

    if all(is_above(run) for i, run in enumerate(runs) if i != best):
        cells[best] = ScoreCell(cells[best].text, bold=True)
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


def _with_published(
    title: str, runs: list[Measured], published: Publication | None, columns: dict[str, Average], keys: Sequence[Column]
) -> list[ScoreTable]:
    """Return a table of the runs that the paper has numbers of, each with the paper's below it; [] if there are none.

    Args:
        title: of what.
        runs: measured alike.
        published: the paper's tables, if they are at hand.
        columns: averages by their heads.
        keys: of each column, where the paper has it.
    """
    if published is None:
        return []
    scores = {run.name: published_scores(run, published) for run in runs}
    shown = [
        (name, average, key)
        for (name, average), key in zip(columns.items(), keys, strict=True)
        if any(key in of for of in scores.values()) and not average.missing(runs[0])
    ]
    rows, splits = [], []
    for run in runs:
        own, theirs = scores[run.name], [scores[run.name].get(key) for _, _, key in shown]
        if any(theirs):
            cells = [ScoreCell(_format_mean(run, average) if key in own else "") for _, average, key in shown]
            tables = ", ".join(sorted({str(of[1]) for of in theirs if of is not None}))
            published_cells = [ScoreCell("" if of is None else f"{of[0]:g}") for of in theirs]
            rows += [(run.name, cells), (f"{run.name}, published (table {tables})", published_cells)]
            training = next(iter(run.found.values()))[0].training
            splits += [UNSAID_OF_SPLITS] * (training is not None and "interleave" in training.variant)
    if not rows:
        return []
    notes = [
        f"Published: arXiv {published.arxiv}v{published.version}, by transcriptions, of the same model, data, variant "
        "and length. It is in no mean and no interval.",
        UNSAID,
        *splits[:1],
        *_notes(runs[:1], [average for _, average, _ in shown]),
    ]
    return [ScoreTable(f"{title}, beside what is published", ["", *(name for name, _, _ in shown)], rows, notes)]


def _perplexity_table(runs: list[Measured], length: int) -> ScoreTable:
    first, example = runs[0], runs[0].perplexity[length][0]
    losses = {run.name: _losses(run, length) for run in runs}
    rows = [(run.name, [_format_documents(of, format_perplexity) for of in losses[run.name]]) for run in runs]
    for run in runs[1:]:
        differences = losses[run.name] - losses[first.name]
        title = f"loss: {run.name} - {first.name}"
        rows.append((f"{title}, paired", [_format_documents(of, "{:+.3f}".format) for of in differences]))
        over_seeds = [
            _over_seeds(run, first, lambda seed, i=i: float(_losses(seed, length)[i].mean()))
            for i in range(len(differences))
        ]
        if all(over_seeds):
            rows.append(
                (f"{title}, over {len(run.seeds)} seeds", [_format(of, "[{1:+.3f}, {2:+.3f}]") for of in over_seeds])
            )
    count = len(example.buckets[0].losses)
    how = "in brackets 95 per cent intervals over documents (Student's, of the mean loss or difference)"
    notes = [
        f"Of {example.text}; each token with all tokens of the document before it.",
        f"n = {count} documents; {how}."
        if count >= _FEWEST_DOCUMENTS
        else f"n = {count}: too few documents for an interval.",
        *[ONE_SEED] * (len(runs) > 1 and not _have_seeds(runs)),
    ]
    head = ["perplexity", *(f"{of.first:,} to {of.end - 1:,}" for of in example.buckets)]
    table = [(name, [ScoreCell(text) for text in cells]) for name, cells in rows]
    return ScoreTable(f"Perplexity by position at {length:,} tokens", head, table, notes)


def _losses(run: Measured, length: int) -> np.ndarray:
    """Return [buckets, documents]: the mean loss over checkpoints."""
    return np.mean([[of.losses for of in result.buckets] for result in run.perplexity[length]], axis=0)


def _format_documents(losses: np.ndarray, number: Callable[[float], str]) -> str:
    """Return the mean of documents' losses, or of differences, with its interval where there are enough documents."""
    interval = student_interval(losses) if len(losses) >= _FEWEST_DOCUMENTS else None
    return number(float(losses.mean())) if interval is None else "{} [{}, {}]".format(*map(number, interval))


def _have_seeds(runs: list[Measured]) -> bool:
    return all(len(run.seeds) > 1 and len(run.seeds) == len(runs[0].seeds) for run in runs)


def _notes(runs: list[Measured], averages: Sequence[Average], seeds: bool = True) -> list[str]:
    """Return the notes below a table: samples, intervals, metrics, haystack, what was cut, what did not run."""
    keys = [key for average in averages for key in average.keys]
    results = [result for key in keys for result in runs[0].found.get(key, [])]
    notes = []
    if counts := sorted({len(result.answers) for result in results if result.answers}):
        said = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        how = "Wilson's for a row of one run"
        if len(runs) > 1:
            how += ", by bootstrap for a paired difference" + ", Student's over seeds" * (seeds and _have_seeds(runs))
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
