"""Runs side by side, paired by sample, and by seed where there are several: the tables of it.

Bold says that a difference is shown: it needs seeds. One run of each method tells these two models apart, and not the
methods, whose next runs differ by more than the samples say.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.intervals import (
    are_equal,
    documents_interval,
    format_perplexity,
    interval_of,
    mcnemar,
    mean_interval,
    paired_interval,
    seeds_interval,
    sign_flip,
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
from torchtrain.evaluation.results import Found
from torchtrain.evaluation.suite import HELLASWAG, LONGBENCH, benchmark_of
from torchtrain.evaluation.tables import ScoreCell, ScoreTable

_FEW = 3  # documents: of fewer an interval says nothing
ONE_SEED = (
    "One run of each: intervals are over samples alone. They leave out how much another seed of the same method "
    "differs, so nothing is bold. NAME=RUN,RUN compares seeds."
)
Columns = Sequence[tuple[str, Average]]


def tables_of_run(results: Iterable[Found]) -> list[ScoreTable]:
    """Return the tables of one run."""
    return _tables([Measured("score").add(results)], None)


def compare(
    folders: Sequence[Path | str], last: int | None = None, published: Publication | None = None
) -> tuple[list[ScoreTable], dict[str, str], list[Measured]]:
    """Return the tables of runs side by side, what is said below them, and what they are of.

    Args:
        folders: runs that were evaluated, or folders of results; `NAME=RUN,RUN`: runs of several seeds as one.
        last: of each run, how many checkpoints at most, the last ones; default: all that were evaluated.
        published: a paper's tables; a row of it is shown below a run of the same model, data, variant and length.

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
    for said, by_length in ruler_averages(first):
        columns = [(format_length(n), of) for n, of in zip(first.lengths(), by_length, strict=True) if of is not None]
        kinds = {"Average of the 13 tasks": "ruler_13", "Average of the paper's 11 tasks": "ruler_11"}
        keys: list[Column] = [(kinds.get(said, ""), None, of.keys[0][1]) for _, of in columns]
        tables += _side_by_side(said, runs, columns) + _beside_published(said, runs, published, columns, keys)
    for length in first.lengths():
        columns = [(task, Average(task, [(task, length)])) for task in first.tasks()]
        title = f"Tasks at {length:,} tokens"
        tables.append(_by_task(title, runs, columns))
        tables += _beside_published(title, runs, published, columns, [("ruler_tasks", length, t) for t, _ in columns])
    tables += _other_tables(runs, published)
    return tables + _right_and_wrong(runs) + _perplexity_tables(runs)


def _other_tables(runs: list[Measured], published: Publication | None) -> list[ScoreTable]:
    """Return LongBench by group, the short benchmarks as the paper has them, and all other tasks."""
    first, tables = runs[0], []
    short: list[tuple[str, Average]] = []
    of_group = {
        group: [task for name in names if (task := f"longbench_{name}") in first.tasks("longbench")]
        for group, names in LONGBENCH.items()
    }
    for length in first.lengths("longbench"):
        columns = [(g, Average(g, [(task, length) for task in tasks])) for g, tasks in of_group.items() if tasks]
        tables += _side_by_side(f"LongBench at {length:,} tokens", runs, columns, ["The mean over each group's tasks."])
        tables.append(_by_task(f"LongBench's tasks at {length:,} tokens", runs, _singles(first, "longbench", length)))
        short = [(f"LongBench ICL ({format_length(length)})", of) for name, of in columns if name == "ICL"]
    keys: list[Column] = [("", None, "")] * len(short)  # lm-eval's LongBench is not the paper's
    notes = []
    if lengths := first.lengths(HELLASWAG):
        short.append(("HellaSwag", Average(HELLASWAG, [(HELLASWAG, lengths[-1])])))
        keys.append(("short", None, "HellaSwag"))
    if lengths := first.lengths("mmlu"):
        subjects = [(task, lengths[-1]) for task in first.tasks("mmlu")]
        short.append((f"MMLU ({len(subjects)} of 57 subjects)", Average("MMLU", subjects, pooled=True)))
        keys.append(("", None, ""))  # lm-eval's prompts are not the paper's
        notes.append("MMLU: of all questions, whatever their subject.")
    if len(short) > bool(of_group["ICL"]):
        tables += _side_by_side("Short benchmarks", runs, short, notes)
        tables += _beside_published("Short benchmarks", runs, published, short, keys)
    others = {benchmark_of(task) for task, _ in [*first.found, *first.not_run]} - {
        "ruler",
        "longbench",
        "mmlu",
        HELLASWAG,
    }
    columns = [of for name in sorted(others) for of in _singles(first, name, first.lengths(name)[-1])]
    return tables + ([_by_task("Other tasks", runs, columns)] if columns else [])


def _singles(run: Measured, benchmark: str, length: int) -> list[tuple[str, Average]]:
    return [(task, Average(task, [(task, length)])) for task in run.tasks(benchmark)]


def _by_task(title: str, runs: list[Measured], columns: Columns) -> ScoreTable:
    """Return a table with a row for each task, and a column for each run."""
    rows = [(name, _cells(runs, average)) for name, average in columns]
    return ScoreTable(
        title, ["task", *(run.name for run in runs)], rows, _notes(runs, [of for _, of in columns], paired=False)
    )


def _side_by_side(title: str, runs: list[Measured], columns: Columns, notes: Sequence[str] = ()) -> list[ScoreTable]:
    """Return a table of averages: a row a run, and below them the differences from the first, paired by sample."""
    if not columns:
        return []
    first, cells = runs[0], [_cells(runs, average) for _, average in columns]
    rows = [(run.name, [column[i] for column in cells]) for i, run in enumerate(runs)]
    for run in runs[1:]:
        paired, over = [], []
        for _, average in columns:
            if average.missing(first):
                paired.append(ScoreCell(""))
                over.append(ScoreCell(""))
                continue
            found = paired_interval(average.scores(run), average.scores(first))
            paired.append(ScoreCell("{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * of for of in found))))
            seeds = _over_seeds(run, first, average.mean)
            over.append(ScoreCell("" if seeds is None else f"[{100 * seeds[0]:+.1f}, {100 * seeds[1]:+.1f}]"))
        rows.append((f"{run.name} - {first.name}, paired", paired))
        if any(cell.text for cell in over):
            rows.append((f"{run.name} - {first.name}, over {len(run.seeds)} seeds", over))
    held = [*notes, *_notes(runs, [of for _, of in columns])]
    return [ScoreTable(title, ["", *(name for name, _ in columns)], rows, held)]


def _cells(runs: list[Measured], average: Average) -> list[ScoreCell]:
    """Return a cell a run. The best is bold where the intervals from each other run leave out zero, that over samples
    and that over seeds, and where drawing signs agrees: of few samples the bootstrap knows too little.
    """
    cells = [ScoreCell(_format_mean(run, average)) for run in runs]
    if average.missing(runs[0]):
        return cells
    best = max(range(len(runs)), key=lambda i: average.mean(runs[i]))

    def is_above(other: Measured) -> bool:
        over = _over_seeds(runs[best], other, average.mean)
        a, b = average.scores(runs[best]), average.scores(other)
        return over is not None and over[0] > 0 and paired_interval(a, b)[1] > 0 and sign_flip(a, b) < 0.05

    if len(runs) > 1 and all(is_above(run) for i, run in enumerate(runs) if i != best):
        cells[best] = ScoreCell(cells[best].text, bold=True)
    return cells


def _format_mean(run: Measured, average: Average) -> str:
    """Return an average with its interval and its spread over steps; of a task alone what it has."""
    if missing := average.missing(run):
        return "not run" if len(average.keys) == 1 else f"none: {len(missing)} did not run"
    scores = average.scores(run)
    if not any(result.answers for key in average.keys for result in run.found[key]):
        return f"{average.mean(run):.3f}"
    mean, low, high = mean_interval(list(scores[0])) if len(scores) == 1 else interval_of(scores)
    spread = average.spread(run)
    over = "" if spread is None else f" ±{100 * spread:.1f}"
    return f"{100 * mean:.1f}{over} [{100 * low:.1f}, {100 * high:.1f}]"


def _over_seeds(run: Measured, other: Measured, of: Callable[[Measured], float]) -> tuple[float, float] | None:
    """Return the interval of a difference over seeds; None where none pair, or where all differ alike: equal numbers
    say nothing of the next seed.
    """
    if len(run.seeds) < 2 or len(run.seeds) != len(other.seeds):
        return None
    a, b = list(map(of, run.seeds)), list(map(of, other.seeds))
    return None if are_equal(np.subtract(a, b)) else seeds_interval(a, b)


def _beside_published(
    title: str, runs: list[Measured], published: Publication | None, columns: Columns, keys: Sequence[Column]
) -> list[ScoreTable]:
    """Return a table of the runs that the paper has numbers of, each with the paper's below it; [] if there are none.

    Args:
        title: of what.
        runs: measured alike.
        published: the paper's tables, if they are at hand.
        columns: of each its head and average.
        keys: of each, where the paper has it.
    """
    if published is None:
        return []
    scores = {run.name: published_scores(run, published) for run in runs}
    shown = [
        (name, average, key)
        for (name, average), key in zip(columns, keys, strict=True)
        if any(key in of for of in scores.values()) and not average.missing(runs[0])
    ]
    rows, notes = [], []
    for run in runs:
        own, theirs = scores[run.name], [scores[run.name].get(key) for _, _, key in shown]
        if any(theirs):
            cells = [ScoreCell(_format_mean(run, average) if key in own else "") for _, average, key in shown]
            tables = ", ".join(sorted({str(of[1]) for of in theirs if of is not None}))
            rows.append((run.name, cells))
            rows.append(
                (
                    f"{run.name}, published (table {tables})",
                    [ScoreCell("" if of is None else f"{of[0]:g}") for of in theirs],
                )
            )
            training = next(iter(run.found.values()))[0].training
            notes += [UNSAID_OF_SPLITS] * (training is not None and "interleave" in training.variant)
    if not rows:
        return []
    where = (
        f"Published: arXiv {published.arxiv}v{published.version}, by transcriptions, of the same model, data, variant"
    )
    notes = [f"{where} and length. It is in no mean and no interval.", UNSAID, *dict.fromkeys(notes)]
    notes += _notes(runs[:1], [average for _, average, _ in shown])
    return [ScoreTable(f"{title}, beside what is published", ["", *(name for name, _, _ in shown)], rows, notes)]


def _right_and_wrong(runs: list[Measured]) -> list[ScoreTable]:
    """Return how many samples one of two runs alone gets right, and McNemar's p, of the last checkpoint of each."""
    if len(runs) < 2:
        return []
    ones = [(run.seeds[0] if run.seeds else run).keep_last(1) for run in runs]
    first, tables = ones[0], []
    for length in sorted({length for _, length in first.found}):
        of_tasks = [
            Average(task, [(task, n)]) for task, n in first.found if n == length and benchmark_of(task) != "mmlu"
        ]
        subjects = [(task, length) for task in first.tasks("mmlu") if (task, length) in first.found]
        of_tasks += [Average("mmlu", subjects, pooled=True)] if subjects else []
        rows = []
        for of_task in of_tasks:
            if any(of_task.missing(run) for run in ones):
                continue
            scores = [of_task.scores(run)[0] for run in ones]
            if all(np.isin(of, (0.0, 1.0)).all() and len(of) > 1 for of in scores):
                found = [(run.name, mcnemar(of, scores[0])) for run, of in zip(runs[1:], scores[1:], strict=True)]
                if not any(alone or other for _, (alone, other, _) in found):
                    continue  # of equal answers the test says nothing
                said = [f"{name} {alone}, {runs[0].name} {other}, p {p:.2g}" for name, (alone, other, p) in found]
                rows.append((of_task.name, list(map(ScoreCell, said))))
        which = ", ".join(
            f"{run.name}: {f'{one.name}/' if run.seeds else ''}{one.checkpoint_names[0]}"
            for run, one in zip(runs, ones, strict=True)
        )
        if rows:
            notes = [
                f"McNemar's exact test of one checkpoint each ({which}), two-sided, of each task alone: of many tasks, "
                "some p are small by chance. It compares two models, not two methods."
            ]
            heads = ["task", *(f"{run.name} against {runs[0].name}" for run in runs[1:])]
            tables.append(ScoreTable(f"Right in one run alone, at {length:,} tokens", heads, rows, notes))
    return tables


def _perplexity_tables(runs: list[Measured]) -> list[ScoreTable]:
    first, tables = runs[0], []
    for length, results in sorted(first.perplexity.items()):
        strided = results[0].strided is not None
        head = ["perplexity", *(f"{of.first:,} to {of.end - 1:,}" for of in results[0].buckets)]
        head += [f"in windows of {max(length // 2, 2):,}"] * strided
        losses = {run.name: _losses(run, length) for run in runs}
        rows = []
        for run in runs:
            windows = [of.strided for of in run.perplexity[length] if of.strided is not None]
            cells = [_format_level(of) for of in losses[run.name]]
            cells += [format_perplexity(float(np.mean(windows))) if windows else ""] * strided
            rows.append((run.name, list(map(ScoreCell, cells))))
        for run in runs[1:]:
            differences = losses[run.name] - losses[first.name]
            cells = [_format_difference(of) for of in differences] + [""] * strided  # windows have one loss
            rows.append((f"loss: {run.name} - {first.name}, paired", list(map(ScoreCell, cells))))
            over = [
                _over_seeds(run, first, lambda seed, i=i, n=length: float(_losses(seed, n)[i].mean()))
                for i in range(len(differences))
            ]
            if all(over):
                cells = [f"[{of[0]:+.3f}, {of[1]:+.3f}]" for of in over if of is not None] + [""] * strided
                rows.append(
                    (f"loss: {run.name} - {first.name}, over {len(run.seeds)} seeds", list(map(ScoreCell, cells)))
                )
        count = len(results[0].buckets[0].losses)
        notes = [f"Of {results[0].text}; each token with all tokens of the document before it."]
        if count >= _FEW:
            said = "in brackets 95 per cent intervals over documents (Student's, of the mean loss or difference)"
            notes.append(f"n = {count} documents; {said}.")
        else:
            notes.append(f"n = {count}: too few documents for an interval.")
        notes += [ONE_SEED] * (len(runs) > 1 and not _has_seeds(runs))
        tables.append(ScoreTable(f"Perplexity by position at {length:,} tokens", head, rows, notes))
    return tables


def _losses(run: Measured, length: int) -> np.ndarray:
    """Return the mean over checkpoints of each document's loss: [buckets, documents]."""
    return np.mean([[of.losses for of in result.buckets] for result in run.perplexity[length]], axis=0)


def _format_level(losses: np.ndarray) -> str:
    """Return the perplexity of documents' losses, with its interval where there are enough."""
    found = documents_interval(losses) if len(losses) >= _FEW else None
    if found is None:
        return format_perplexity(float(losses.mean()))
    mean, low, high = map(format_perplexity, found)
    return f"{mean} [{low}, {high}]"


def _format_difference(losses: np.ndarray) -> str:
    """Return the mean of documents' differences of losses, with its interval where there are enough."""
    found = documents_interval(losses) if len(losses) >= _FEW else None
    return f"{losses.mean():+.3f}" if found is None else f"{found[0]:+.3f} [{found[1]:+.3f}, {found[2]:+.3f}]"


def _has_seeds(runs: list[Measured]) -> bool:
    return all(len(run.seeds) > 1 and len(run.seeds) == len(runs[0].seeds) for run in runs)


def _notes(runs: list[Measured], averages: Sequence[Average], paired: bool = True) -> list[str]:
    """Return what is said below a table: samples, how intervals are made, what did not run."""
    first, keys = runs[0], [key for average in averages for key in average.keys]
    results = [result for key in keys for result in first.found.get(key, [])]
    counts = sorted({len(result.answers) for result in results if result.answers})
    notes = []
    if counts:
        said = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        how = "Wilson's for a row of one run"
        if paired and len(runs) > 1:
            how += ", by bootstrap for a paired difference" + ", Student's over seeds" * _has_seeds(runs)
        notes.append(f"n = {said} samples of each task and length; in brackets 95 per cent intervals: {how}.")
    metrics = {result.task: result.metric for result in results if result.metric != "score"}
    notes += [f"Metrics: {', '.join(f'{task} {metric}' for task, metric in metrics.items())}."] * (0 < len(metrics) < 6)
    haystacks = {of.identity.get("materials", {}).get("haystack") for of in results} - {None}
    notes += [f"Haystack: {text}." for text in sorted(haystacks)]
    cut = sum(result.cut_prompts for result in results)
    notes += [f"{cut} prompts were longer than the length and were cut."] * bool(cut)
    notes += [ONE_SEED] * (len(runs) > 1 and not _has_seeds(runs))
    why = {f"{task}: {run.not_run[task, n]}" for run in runs for task, n in keys if (task, n) in run.not_run}
    return notes + ([f"Not run: {'; '.join(sorted(why))}."] if why else [])


def _describe(run: Measured) -> str:
    results = run.results()
    if not results:
        return "nothing ran"
    steps = {of.checkpoint: of.step for of in results}
    names = ", ".join(name if step is None else f"step {step:,}" for name, step in steps.items())
    first = results[0]
    anchor = f", anchor {first.settings.anchor} before each prompt" if first.settings.anchor else ""
    return f"{first.source}: {names}; {first.settings.dtype} on {first.versions.get('torch', '')}{anchor}"
