"""The results of runs, read from their folders. Results that were not measured alike are refused.

A run's score of a sample is the mean over its checkpoints. `NAME=RUN,RUN` is one row of several seeds, with the mean
over them.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.results import (
    Measurement,
    NotRun,
    PerplexityResult,
    Result,
    TaskResult,
    different_setting,
    read_results,
)
from torchtrain.evaluation.suite import IN_2024, LONGBENCH, NOT_IN_ELEVEN, TASKS, benchmark_of

AFTERWARDS, ON_THE_WAY = "-evaluation", "-on-the-way"  # ends of the names of folders of results
ELEVEN = tuple(task for task in TASKS if task not in NOT_IN_ELEVEN)
Key = tuple[str, int]  # task, length
ALIKE = ("samples", "dtype", "engine", "metric")  # what results must share to be compared


@dataclass
class Measured:
    """All results of a run, by task and length."""

    name: str
    found: dict[Key, list[TaskResult]] = field(default_factory=dict)
    perplexity: dict[int, list[PerplexityResult]] = field(default_factory=dict)
    not_run: dict[Key, str] = field(default_factory=dict)
    seeds: "list[Measured]" = field(default_factory=list)  # the runs that this one is the mean of

    def add(self, results: Iterable[Result]) -> "Measured":
        """Add results."""
        for result in results:
            if isinstance(result, NotRun):
                self.not_run[result.task, result.length] = result.not_run
            elif isinstance(result, PerplexityResult):
                self.perplexity.setdefault(result.length, []).append(result)
            else:
                self.found.setdefault((result.task, result.length), []).append(result)
        return self

    def by_key(self) -> dict[Key, Sequence[Measurement]]:
        """Return what was measured by task and length, perplexity included."""
        return {**self.found, **{("perplexity", length): of for length, of in self.perplexity.items()}}

    def results(self) -> list[Measurement]:
        """Return all that was measured."""
        return [result for each in self.by_key().values() for result in each]

    def of_checkpoints(self, names: Sequence[str]) -> "Measured":
        """Return the results of some checkpoints."""
        own = (result for result in self.results() if result.checkpoint in names)
        return Measured(self.name, not_run=self.not_run).add(own)

    @property
    def checkpoint_names(self) -> list[str]:
        """The checkpoints by step. One whose step is not known is the trained model, and the last."""
        steps = {result.checkpoint: (result.step is None, result.step or 0) for result in self.results()}
        return sorted(steps, key=lambda name: (steps[name], name))

    def lengths(self, benchmark: str = "ruler") -> list[int]:
        """Return the lengths that a benchmark was measured at, ascending."""
        return sorted({length for task, length in [*self.found, *self.not_run] if benchmark_of(task) == benchmark})

    def tasks(self, benchmark: str = "ruler") -> list[str]:
        """Return the tasks of a benchmark that were asked for, in its own order."""
        asked = {task for task, _ in [*self.found, *self.not_run] if benchmark_of(task) == benchmark}
        order = [*TASKS, *(f"longbench_{name}" for names in LONGBENCH.values() for name in names)]
        places = {task: place for place, task in enumerate(order)}
        return sorted(asked, key=lambda task: (places.get(IN_2024.get(task, task), len(places)), task))

    def scores(self, key: Key, part: str = "") -> np.ndarray:
        """Return [samples]: the mean over checkpoints of each sample's score; of one part of them, if it is named."""
        return np.mean([result.scores(part) for result in self.found[key]], axis=0)


@dataclass(frozen=True)
class Average:
    """What a column shows of a run: the mean over tasks, each with one weight.

    `pooled`: the mean over all their samples. `part`: of one part of their samples alone.
    """

    name: str
    keys: list[Key]
    pooled: bool = False
    part: str = ""

    def missing(self, run: Measured) -> list[str]:
        """Return the tasks that did not run."""
        return [key[0] for key in self.keys if key not in run.found]

    def scores(self, run: Measured) -> list[np.ndarray]:
        """Return the scores [samples] of each task; pooled: of all of them together."""
        each = [run.scores(key, self.part) for key in self.keys]
        return [np.concatenate(each)] if self.pooled else each

    def mean(self, run: Measured) -> float:
        """Return the average of a run."""
        return float(np.mean([scores.mean() for scores in self.scores(run)]))

    def spread(self, run: Measured) -> float | None:
        """Return the standard deviation over a run's checkpoints; None for one checkpoint, and for several seeds."""
        names = run.checkpoint_names
        if run.seeds or len(names) < 2:
            return None
        return float(np.std([self.mean(run.of_checkpoints([name])) for name in names], ddof=1))


def ruler_averages(run: Measured) -> dict[str, list[tuple[int, Average]]]:
    """Return RULER's averages by title, each with the lengths at which all its tasks ran."""
    ran = [task for task in run.tasks() if all((task, length) in run.found for length in run.lengths())]
    names = {IN_2024.get(task, task): task for task in run.tasks()}  # the run's own name of a task, by its name today
    wanted = {"Average of the 13 tasks": [*TASKS], "Average of the paper's 11 tasks": [*ELEVEN]}
    known = {title: [names[task] for task in tasks] for title, tasks in wanted.items() if names.keys() >= {*tasks}}
    if ran and len(ran) < len(TASKS):
        known[f"Average of those that ran ({len(ran)} of 13)"] = ran
    averages = {
        title: [
            (length, average)
            for length in run.lengths()
            if not (average := Average(title, [(task, length) for task in tasks])).missing(run)
        ]
        for title, tasks in known.items()
    }
    return {title: by_length for title, by_length in averages.items() if by_length}


def read_measured(said: str, last: int | None) -> Measured:
    """Read a run, or runs of several seeds as one.

    Args:
        said: a run's folder, a folder of results, or `NAME=RUN,RUN`.
        last: how many checkpoints of each run at most, the last ones; None: all.

    Raises:
        UserError: a folder holds no results or damaged ones; or results were not measured alike.
    """
    name, equals, places = said.partition("=")
    if not equals or os.path.lexists(said):
        run = _read_run(said)
        return run if last is None else run.of_checkpoints(run.checkpoint_names[-last:])
    seeds = [read_measured(place, last) for place in places.split(",") if place]
    if not name or len(seeds) < 2:
        raise UserError(f"RUN {quoted(said)}: NAME=RUN,RUN names two runs or more; give a folder, or more of them")
    if len({seed.name for seed in seeds}) != len(seeds):
        raise UserError(f"RUN {quoted(said)}: two have one name; rename a folder")
    whole = Measured(name, not_run=seeds[0].not_run, seeds=seeds)
    for seed in seeds:
        check_alike(seeds[0], seed, (*ALIKE, "anchor"))
        whole.add(of.model_copy(update={"checkpoint": f"{seed.name}/{of.checkpoint}"}) for of in seed.results())
    return whole


def _read_run(said: str) -> Measured:
    folder = Path(os.path.abspath(said))  # `.` has no name
    if not folder.name:
        raise UserError(f"RUN {quoted(said)}: is no run; give the folder of one")
    name = folder.name.removesuffix(AFTERWARDS).removesuffix(ON_THE_WAY)
    # What was measured on the way is taken only where nothing was measured afterwards.
    for place in (folder, *(folder.with_name(folder.name + end) for end in (AFTERWARDS, ON_THE_WAY))):
        run = Measured(name).add(read_results(place))
        if run.by_key() or run.not_run:
            _check_whole(run, place)
            return run
    raise UserError(f"{quoted(said)}: holds no results; first: torchtrain evaluate {said}")


def _check_whole(run: Measured, place: Path) -> None:
    """Check that every checkpoint has every task, and that its results are of one model, asked in one way.

    Raises:
        UserError: one lacks a task, or was measured in another way; or a task is there in two versions.
    """
    for name in run.checkpoint_names:
        first, *others = (result for result in run.results() if result.checkpoint == name)
        for result in others:
            if what := different_setting(result, first.settings):
                raise UserError(
                    f"{run.name}: {first.task} and {result.task} of {quoted(name)} were measured with other {what}; "
                    "evaluate it in a new --out, or remove the results of one"
                )
    for (task, length), results in run.by_key().items():
        for result in results[1:]:
            _check_same(run.name, run.name, results[0], result, (*ALIKE, "anchor"))
        if (IN_2024.get(task, ""), length) in run.found:
            raise UserError(
                f"{quoted(place)}: holds {task} and {IN_2024[task]} at {length:,} tokens, two versions of one task; "
                "remove the results of one"
            )
        if missing := [name for name in run.checkpoint_names if name not in {of.checkpoint for of in results}]:
            mend = "evaluate it again: it continues where it stopped"
            if place.name.endswith(ON_THE_WAY):  # the weights of that step may be gone
                mend = f"remove {quoted(place / missing[0])}, or evaluate the run's models"
            raise UserError(f"{run.name}: {quoted(missing[0])} has no result of {task} at {length:,}; {mend}")


def check_alike(a: Measured, b: Measured, settings: Sequence[str] = ALIKE) -> None:
    """Refuse two runs that were not measured alike.

    Args:
        a, b: runs.
        settings: what their results must share.

    Raises:
        UserError: they differ; the message says in what.
    """
    ours, theirs = a.by_key(), b.by_key()
    if alone := sorted(ours.keys() ^ theirs.keys()):
        task, length = alone[0]
        raise UserError(
            f"{a.name} and {b.name} were not measured alike: {task} at {length:,} is in one alone; evaluate both"
        )
    if len(a.checkpoint_names) != len(b.checkpoint_names):
        raise UserError(
            f"{a.name} has {len(a.checkpoint_names)} checkpoints, {b.name} {len(b.checkpoint_names)}, and means over "
            "different numbers of them are no pair; give --last"
        )
    for key, results in ours.items():
        _check_same(a.name, b.name, results[0], theirs[key][0], settings)


def _check_same(name: str, other: str, first: Measurement, second: Measurement, names: Sequence[str]) -> None:
    which = f"{first.task} at {first.length:,}"
    if name == other:
        which += f" of {quoted(first.checkpoint)} and of {quoted(second.checkpoint)}"
    who = name if name == other else f"{name} and {other}"
    for what in names:
        was, now = (getattr(of, what, getattr(of.settings, what, None)) for of in (first, second))
        if was != now:
            raise UserError(
                f"{who} were not measured alike: {which} has other {what} ({quoted(was, 20)} and {quoted(now, 20)}); "
                "evaluate both with one suite and one tokenizer"
            )
    if first.parts != second.parts:
        raise UserError(f"{who} were not measured alike: {which} has other samples, though it says the same")


def format_length(length: int) -> str:
    """Return a length as the paper writes it: 4K."""
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
