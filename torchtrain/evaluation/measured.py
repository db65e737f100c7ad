"""What was measured of runs, read from their folders; what was not measured alike is refused.

A run's score of a sample is the mean over its checkpoints. Runs of several seeds are one row, `NAME=RUN,RUN`, with the
mean over them.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.results import (
    Found,
    Measurement,
    NotRun,
    PerplexityResult,
    TaskResult,
    alike_in,
    read_results,
)
from torchtrain.evaluation.suite import IN_2024, LONGBENCH, NOT_IN_ELEVEN, TASKS, benchmark_of

AFTERWARDS, ON_THE_WAY = "-evaluation", "-on-the-way"  # ends of the names of folders of results
ELEVEN = tuple(task for task in TASKS if task not in NOT_IN_ELEVEN)
Key = tuple[str, int]  # task, length
ALIKE = ("samples", "dtype", "engine", "metric")  # in which runs agree that are compared


@dataclass
class Measured:
    """All results of a run, by task and length."""

    name: str
    found: dict[Key, list[TaskResult]] = field(default_factory=dict)
    not_run: dict[Key, str] = field(default_factory=dict)
    perplexity: dict[int, list[PerplexityResult]] = field(default_factory=dict)
    whole: "Measured | None" = None  # all checkpoints, where this holds the last ones
    seeds: "list[Measured]" = field(default_factory=list)  # the runs that this one is the mean of

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

    def keep_last(self, last: int) -> "Measured":
        """Return the run with its last checkpoints alone, by step; one whose step is not known is the trained model."""
        return Measured(self.name, not_run=self.not_run, whole=self).add(
            of for of in self.results() if of.checkpoint in self.checkpoint_names[-last:]
        )

    def results(self) -> list[Measurement]:
        """Return all that was measured."""
        return [of for each in (self.found, self.perplexity) for of_key in each.values() for of in of_key]

    @property
    def checkpoint_names(self) -> list[str]:
        """Its checkpoints, by step."""
        steps = {of.checkpoint: (of.step is None, of.step or 0) for of in self.results()}
        return sorted(steps, key=lambda name: (steps[name], name))

    def lengths(self, benchmark: str = "ruler") -> list[int]:
        """Return the lengths that a benchmark was measured at, ascending."""
        return sorted({length for task, length in [*self.found, *self.not_run] if benchmark_of(task) == benchmark})

    def tasks(self, benchmark: str = "ruler") -> list[str]:
        """Return what was asked for of a benchmark, in its own order."""
        asked = {task for task, _ in [*self.found, *self.not_run] if benchmark_of(task) == benchmark}
        order = [of for task in TASKS for of in (task, *(old for old, new in IN_2024.items() if new == task))]
        order += [f"longbench_{name}" for names in LONGBENCH.values() for name in names]
        return [task for task in order if task in asked] + sorted(asked - {*order})

    def scores(self, key: Key) -> np.ndarray:
        """Return [samples]: of each its mean over the checkpoints."""
        return np.mean([result.scores for result in self.found[key]], axis=0)

    def check_whole(self, place: Path) -> None:
        """Check that each checkpoint has every task, and all of one kind: a mean over checkpoints is of the same ones.

        Args:
            place: the folder of the results.

        Raises:
            UserError: one lacks a task that another has, or was measured otherwise; or a task is there in two versions.
        """
        names = self.checkpoint_names
        for name in names:
            results = [of for of in self.results() if of.checkpoint == name]
            for result in results[1:]:
                for what in alike_in(result):
                    if getattr(results[0].settings, what) != getattr(result.settings, what):
                        raise UserError(
                            f"{self.name}: {results[0].task} and {result.task} of {quoted(name)} were measured with "
                            f"other {what}; evaluate it in a new --out, or remove the results of one"
                        )
        for (task, length), results in {**self.found, **_by_key(self.perplexity)}.items():
            for result in results[1:]:
                _check_same(self.name, self.name, results[0], result, (*ALIKE, "anchor"))
            if (IN_2024.get(task, ""), length) in self.found:
                raise UserError(
                    f"{quoted(place)}: holds {task} and {IN_2024[task]} at {length:,} tokens, two versions of one "
                    "task; remove the results of one"
                )
            if lacking := [name for name in names if name not in {of.checkpoint for of in results}]:
                mend = "evaluate it again, which goes on where it stopped"
                if place.name.endswith(ON_THE_WAY):  # of a step whose weights may be gone
                    mend = f"remove {quoted(place / lacking[0])}, or evaluate the run's models"
                raise UserError(
                    f"{self.name}: {quoted(lacking[0])} has no result of {task} at {length:,}, and others have; {mend}"
                )


def _by_key(perplexity: dict[int, list[PerplexityResult]]) -> dict[Key, list[PerplexityResult]]:
    return {("perplexity", length): results for length, results in perplexity.items()}


@dataclass(frozen=True)
class Average:
    """What a column shows of a run: the mean over tasks of one weight each; `pooled`: over all their samples."""

    name: str
    keys: list[Key]
    pooled: bool = False

    def missing(self, run: Measured) -> list[str]:
        """Return which of its tasks a run did not do."""
        return [key[0] for key in self.keys if key not in run.found]

    def scores(self, run: Measured) -> list[np.ndarray]:
        """Return of each task the scores [samples]; of all of them together where they are pooled."""
        each = [run.scores(key) for key in self.keys]
        return [np.concatenate(each)] if self.pooled else each

    def mean(self, run: Measured) -> float:
        """Return the average of a run."""
        return float(np.mean([of.mean() for of in self.scores(run)]))

    def spread(self, run: Measured) -> float | None:
        """Return the standard deviation of the average over a run's steps; None of one step, and of several seeds,
        whose spread is the table's row over seeds.
        """
        if run.seeds or len(run.checkpoint_names) < 2:
            return None
        steps = (Measured("").add(of for of in run.results() if of.checkpoint == name) for name in run.checkpoint_names)
        return float(np.std([self.mean(step) for step in steps], ddof=1))


def ruler_averages(run: Measured) -> list[tuple[str, list[Average | None]]]:
    """Return the averages of RULER that a run has at some length: what each is called, and by length what it is of."""
    ran = [task for task in run.tasks() if all((task, length) in run.found for length in run.lengths())]
    now = {IN_2024.get(task, task): task for task in run.tasks()}  # from a task's name now to what this run calls it
    known: list[tuple[str, list[str]]] = [
        (said, [now[task] for task in wanted])
        for said, wanted in (("Average of the 13 tasks", TASKS), ("Average of the paper's 11 tasks", ELEVEN))
        if {*wanted} <= now.keys()
    ]
    if ran and len(ran) < len(TASKS):
        known.append((f"Average of those that ran ({len(ran)} of 13)", ran))
    made = []
    for said, tasks in known:
        of_lengths = [Average(said, [(task, length) for task in tasks]) for length in run.lengths()]
        whole = [None if of.missing(run) else of for of in of_lengths]
        made += [(said, whole)] if any(whole) else []
    return made


def read_measured(said: str, last: int | None) -> Measured:
    """Read a run, or runs of several seeds as one.

    Raises:
        UserError: a folder holds no results or damaged ones; or seeds were not measured alike.
    """
    name, equals, places = said.partition("=")
    if not equals or os.path.lexists(said):
        run = _read(said)
        return run if last is None else run.keep_last(last)
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


def _read(said: str) -> Measured:
    folder = Path(os.path.abspath(said))  # `.` has no name
    if not folder.name:
        raise UserError(f"RUN {quoted(said)}: is no run; give the folder of one")
    # What was measured on the way is taken where nothing was measured afterwards, never both.
    for place in (folder, *(folder.with_name(folder.name + kind) for kind in (AFTERWARDS, ON_THE_WAY))):
        run = Measured(folder.name.removesuffix(AFTERWARDS).removesuffix(ON_THE_WAY)).add(read_results(place))
        if run.found or run.not_run or run.perplexity:
            run.check_whole(place)
            return run
    raise UserError(f"{quoted(said)}: holds no results; first: torchtrain evaluate {said}")


def check_alike(a: Measured, b: Measured, settings: Sequence[str] = ALIKE) -> None:
    """Refuse two runs of which one has what the other lacks, or that were measured otherwise.

    Args:
        a, b: runs.
        settings: in which of them they must agree.

    Raises:
        UserError: they are not alike: says in what.
    """
    for what, x, y in (
        ("tasks", {f"{t} at {n:,}" for t, n in a.found}, {f"{t} at {n:,}" for t, n in b.found}),
        ("lengths of perplexity", {f"{n:,}" for n in a.perplexity}, {f"{n:,}" for n in b.perplexity}),
    ):
        if x != y:
            raise UserError(
                f"{a.name} and {b.name} were not measured alike: {what}: {min(x ^ y)} is in one alone; evaluate both"
            )
    if len(a.checkpoint_names) != len(b.checkpoint_names):
        raise UserError(
            f"{a.name} has {len(a.checkpoint_names)} checkpoints, {b.name} {len(b.checkpoint_names)}, and a mean over "
            "more of them is another; give --last"
        )
    ours, theirs = ({**of.found, **_by_key(of.perplexity)} for of in (a, b))
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
    if _of(first) != _of(second):
        raise UserError(f"{who} were not measured alike: {which} has other samples, though it says the same")


def _of(result: Measurement) -> object:
    """Return what of a result must be alike where the samples are: which there are."""
    if isinstance(result, TaskResult):
        return result.indices
    return [(bucket.first, bucket.end, len(bucket.losses)) for bucket in result.buckets]


def format_length(length: int) -> str:
    """Return a length as the paper writes it: 4K."""
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
