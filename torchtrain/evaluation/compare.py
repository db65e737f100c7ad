"""Runs side by side, paired by sample; what was not measured alike is refused.

A run's score of a sample is the mean over its checkpoints. An average over tasks weighs each task alike; it is drawn
again (bootstrap) by drawing the samples of each task again, the same ones for both runs of a difference.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.results import Found, NotRun, PerplexityResult, TaskResult, read_results
from torchtrain.evaluation.scoring import mean_interval
from torchtrain.evaluation.suite import NOT_IN_ELEVEN, TASKS
from torchtrain.evaluation.tables import ScoreCell, ScoreTable

DRAWS = 2000
_OLD = {"vt_2024_10": "vt"}
THIRTEEN = tuple(task for task in TASKS if task not in _OLD)
ELEVEN = tuple(task for task in THIRTEEN if task not in NOT_IN_ELEVEN)
Key = tuple[str, int]  # task, length


@dataclass
class Measured:
    """All results of a run, by task and length."""

    name: str
    found: dict[Key, list[TaskResult]] = field(default_factory=dict)
    not_run: dict[Key, str] = field(default_factory=dict)
    perplexity: dict[int, list[PerplexityResult]] = field(default_factory=dict)

    def add(self, results: Iterable[Found]) -> "Measured":
        """Add results."""
        for result in results:
            if isinstance(result, NotRun):
                self.not_run[result.task, result.length] = result.not_run
            elif isinstance(result, PerplexityResult):
                self.perplexity.setdefault(result.length, []).append(result)
            else:
                self.found.setdefault((result.task, result.length), []).append(result)
        return self

    @property
    def lengths(self) -> list[int]:
        """What it was measured at, ascending."""
        return sorted({length for _, length in [*self.found, *self.not_run]})

    @property
    def tasks(self) -> list[str]:
        """What was asked for, in RULER's order."""
        asked = {task for task, _ in [*self.found, *self.not_run]}
        return [task for task in TASKS if task in asked]

    def ran(self, length: int) -> list[str]:
        """Return the tasks that ran at a length."""
        return [task for task in self.tasks if (task, length) in self.found]

    def scores(self, key: Key) -> np.ndarray:
        """Return [samples]: of each its mean over the checkpoints."""
        return np.mean([result.scores for result in self.found[key]], axis=0)

    def spread(self, length: int, tasks: Sequence[str]) -> float | None:
        """Return the standard deviation over checkpoints of the average of tasks; None of one checkpoint."""
        each = [[np.mean(result.scores) for result in self.found[task, length]] for task in tasks]
        means = np.mean(each, axis=0)
        return float(np.std(means, ddof=1)) if len(means) > 1 else None


def tables_of_run(results: Iterable[Found], name: str = "score") -> list[ScoreTable]:
    """Return the tables of one run: tasks by length, and perplexity."""
    run = Measured(name).add(results)
    rows = []
    for task in run.tasks:
        rows.append((task, [_cell(run, (task, length)) for length in run.lengths]))
    for said, wanted in (("mean of the 13", THIRTEEN), ("mean of the paper's 11", ELEVEN)):
        rows.append((said, [_mean_cell(run, length, wanted) for length in run.lengths]))
    tables = [ScoreTable("RULER", ["task", *map(_length, run.lengths)], rows, _notes([run]))] if run.lengths else []
    return tables + _perplexity_tables([run])


def compare(folders: Sequence[Path]) -> tuple[list[ScoreTable], dict[str, str]]:
    """Return the tables of runs side by side, and what is said below them.

    Args:
        folders: runs that were evaluated, or folders of results.

    Raises:
        UserError: a folder holds no results or damaged ones; or runs were not measured alike.
    """
    runs = [_read(folder) for folder in folders]
    if len({run.name for run in runs}) != len(runs):
        raise UserError("RUN: two have one name, and a table could not tell them apart; rename a folder")
    for other in runs[1:]:
        _check_alike(runs[0], other)
    first, tables = runs[0], []
    for said, wanted in (("Average of the 13 tasks", THIRTEEN), ("Average of the paper's 11 tasks", ELEVEN)):
        tables += _average_table(said, runs, wanted)
    ran = [task for task in first.tasks if all((task, length) in first.found for length in first.lengths)]
    if ran and len(ran) < len(THIRTEEN):
        tables += _average_table(f"Average of those that ran ({len(ran)} of 13)", runs, [_OLD.get(t, t) for t in ran])
    for length in first.lengths:
        rows = [(task, _cells(runs, (task, length))) for task in first.tasks]
        tables.append(
            ScoreTable(f"Tasks at {length:,} tokens", ["task", *(run.name for run in runs)], rows, _notes(runs))
        )
    tables += _perplexity_tables(runs)
    facts = {run.name: _tell(run) for run in runs}
    return tables, facts


def paired_interval(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean over tasks of a - b, paired by sample, and its 95 per cent interval (bootstrap, seeded).

    Args:
        a, b: of each task the scores [samples], the same samples.
    """
    random = np.random.default_rng(0)
    draws = np.zeros(DRAWS)
    for x, y in zip(a, b, strict=True):
        difference = x - y
        draws += difference[random.integers(0, len(difference), (DRAWS, len(difference)))].mean(-1)
    low, high = np.quantile(draws / len(a), [0.025, 0.975])
    return float(np.mean([np.mean(x - y) for x, y in zip(a, b, strict=True)])), float(low), float(high)


def _read(folder: Path) -> Measured:
    beside = folder.with_name(f"{folder.name}-evaluation")
    for place in (folder, beside):
        run = Measured(folder.name.removesuffix("-evaluation")).add(read_results(place))
        if run.found or run.not_run or run.perplexity:
            break
    else:
        raise UserError(f"{quoted(folder)}: holds no results; first: torchtrain evaluate {folder}")
    for results in run.found.values():
        _check_same(run.name, run.name, results[0], results)
    return run


def _check_alike(a: Measured, b: Measured) -> None:
    """Refuse two runs of which one has what the other lacks, or whose samples are others.

    Raises:
        UserError: they are not alike: says in what.
    """
    for what, x, y in (
        ("lengths", [f"{length:,}" for length in a.lengths], [f"{length:,}" for length in b.lengths]),
        ("tasks", sorted(f"{t} at {n:,}" for t, n in a.found), sorted(f"{t} at {n:,}" for t, n in b.found)),
        ("lengths of perplexity", [f"{n:,}" for n in a.perplexity], [f"{n:,}" for n in b.perplexity]),
    ):
        if x != y:
            alone = sorted(set(x) ^ set(y))
            raise UserError(
                f"{a.name} and {b.name} were not measured alike: {what}: {alone[0]} stands in one alone; evaluate both"
            )
    for key, results in a.found.items():
        _check_same(a.name, b.name, results[0], b.found[key])
    for length, results in a.perplexity.items():
        _check_same(a.name, b.name, results[0], b.perplexity[length])


def _check_same(
    name: str, other: str, first: TaskResult | PerplexityResult, results: Sequence[TaskResult | PerplexityResult]
) -> None:
    for result in results:
        for what in ("samples", "dtype"):
            was, now = getattr(first.settings, what), getattr(result.settings, what)
            if was != now:
                raise UserError(
                    f"{name} and {other} were not measured alike: {first.task} at {first.length:,} has other {what} "
                    f"({was[:12]} and {now[:12]}); evaluate both with one suite and one tokenizer"
                )


def _average_table(title: str, runs: list[Measured], wanted: Sequence[str]) -> list[ScoreTable]:
    first = runs[0]
    lengths = [length for length in first.lengths if _names(first, length, wanted)]
    if not lengths:
        return []
    columns = []
    for length in lengths:
        tasks = _names(first, length, wanted)
        columns.append(_best(runs, [_mean_cell(run, length, wanted) for run in runs], [(t, length) for t in tasks]))
    rows = [(run.name, [column[i] for column in columns]) for i, run in enumerate(runs)]
    for run in runs[1:]:
        cells = []
        for length in lengths:
            keys = [(task, length) for task in _names(first, length, wanted)]
            mean, low, high = paired_interval([run.scores(key) for key in keys], [first.scores(key) for key in keys])
            cells.append(ScoreCell(f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"))
        rows.append((f"{run.name} - {first.name}, paired", cells))
    return [ScoreTable(title, ["", *map(_length, lengths)], rows, _notes(runs))]


def _names(run: Measured, length: int, wanted: Sequence[str]) -> list[str]:
    """Return the tasks of an average as this run names them; [] where one did not run."""
    ran = {_OLD.get(task, task): task for task in run.ran(length)}
    return [ran[task] for task in wanted] if set(wanted) <= ran.keys() else []


def _cells(runs: list[Measured], key: Key) -> list[ScoreCell]:
    cells = [_cell(run, key) for run in runs]
    return _best(runs, cells, [key]) if key in runs[0].found else cells


def _best(runs: list[Measured], cells: list[ScoreCell], keys: Sequence[Key]) -> list[ScoreCell]:
    """Make the best of a column bold where the paired interval from each other run leaves out zero."""
    scores = [[run.scores(key) for key in keys] for run in runs]
    best = max(range(len(runs)), key=lambda i: np.mean([of.mean() for of in scores[i]]))
    others = [i for i in range(len(runs)) if i != best]
    if others and all(paired_interval(scores[best], scores[i])[1] > 0 for i in others):
        cells[best] = ScoreCell(cells[best].text, bold=True)
    return cells


def _cell(run: Measured, key: Key) -> ScoreCell:
    if key not in run.found:
        return ScoreCell("not run")
    mean, low, high = mean_interval(list(run.scores(key)))
    return ScoreCell(f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]")


def _mean_cell(run: Measured, length: int, wanted: Sequence[str]) -> ScoreCell:
    """Return the average of tasks, its interval (half widths of independent means added as squares), its spread."""
    if not (tasks := _names(run, length, wanted)):
        ran = {_OLD.get(task, task) for task in run.ran(length)}
        return ScoreCell(f"none: {len(set(wanted) - ran)} did not run")
    each = [mean_interval(list(run.scores((task, length)))) for task in tasks]
    mean = sum(of[0] for of in each) / len(each)
    low = mean - math.sqrt(sum((of[0] - of[1]) ** 2 for of in each)) / len(each)
    high = mean + math.sqrt(sum((of[2] - of[0]) ** 2 for of in each)) / len(each)
    spread = run.spread(length, tasks)
    over = "" if spread is None else f" ±{100 * spread:.1f}"
    return ScoreCell(f"{100 * mean:.1f}{over} [{100 * low:.1f}, {100 * high:.1f}]")


def _perplexity_tables(runs: list[Measured]) -> list[ScoreTable]:
    tables = []
    for length in sorted(runs[0].perplexity):
        first = runs[0].perplexity[length][0]
        head = ["", *(f"{of.first:,} to {of.end - 1:,}" for of in first.buckets)]
        rows = []
        for run in runs:
            each = np.mean([[of.losses for of in result.buckets] for result in run.perplexity[length]], axis=0)
            rows.append((run.name, [ScoreCell(f"{math.exp(loss):.2f}") for loss in each.mean(-1)]))
        for run in runs[1:]:
            one, other = (
                np.mean([[of.losses for of in result.buckets] for result in of_run.perplexity[length]], axis=0)
                for of_run in (run, runs[0])
            )
            cells = []
            for i in range(len(first.buckets)):
                mean, low, high = paired_interval([one[i]], [other[i]])
                cells.append(ScoreCell(f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"))
            rows.append((f"loss: {run.name} - {runs[0].name}, paired", cells))
        count = len(first.buckets[0].losses)
        note = f"Of {first.text}, {count} documents; tokens of a position alike, with all that stands before them."
        tables.append(ScoreTable(f"Perplexity by position at {length:,} tokens", head, rows, [note]))
    return tables


def _notes(runs: list[Measured]) -> list[str]:
    first = runs[0]
    counts = sorted({len(results[0].answers) for results in first.found.values()})
    notes = []
    if counts:
        said = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        notes.append(f"n = {said} samples of each task and length; in brackets 95 per cent intervals (Wilson).")
    texts = {
        text for results in first.found.values() if (text := results[0].identity.get("materials", {}).get("haystack"))
    }
    notes += [f"Haystack: {text}." for text in sorted(texts)]
    missing = sorted({f"{task}: {why}" for run in runs for (task, _), why in run.not_run.items()})
    if missing:
        notes.append("Not run: " + "; ".join(missing) + ".")
    return notes


def _tell(run: Measured) -> str:
    some: Mapping[object, Sequence[TaskResult | PerplexityResult]] = {**run.found, **run.perplexity}
    results = next(iter(some.values()))
    names = ", ".join(result.checkpoint if result.step is None else f"step {result.step:,}" for result in results)
    anchor = f", anchor {results[0].settings.anchor} before each prompt" if results[0].settings.anchor else ""
    return (
        f"{results[0].source}: {names}; {results[0].settings.dtype} on {results[0].versions.get('torch', '')}{anchor}"
    )


def _length(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
