"""What was measured of runs, read from their folders; what was not measured alike is refused.

A run's score of a sample is the mean over its checkpoints. Runs of several seeds are one, `NAME=RUN,RUN`, with the mean
over them. An average over tasks weighs each task alike.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.results import Found, NotRun, PerplexityResult, TaskResult, alike_in, read_results
from torchtrain.evaluation.suite import LONGBENCH, NOT_IN_ELEVEN, TASKS, benchmark_of

AFTERWARDS, ON_THE_WAY = "-evaluation", "-on-the-way"  # folders of results, beside the run's
_OLD = {"vt_2024_10": "vt"}
THIRTEEN = tuple(task for task in TASKS if task not in _OLD)
ELEVEN = tuple(task for task in THIRTEEN if task not in NOT_IN_ELEVEN)
Key = tuple[str, int]  # task, length
ALIKE = ("samples", "dtype", "engine", "scoring")  # of `Settings`: in which runs agree that stand side by side


@dataclass
class Measured:
    """All results of a run, by task and length."""

    name: str
    found: dict[Key, list[TaskResult]] = field(default_factory=dict)
    not_run: dict[Key, str] = field(default_factory=dict)
    perplexity: dict[int, list[PerplexityResult]] = field(default_factory=dict)
    whole: "Measured | None" = None  # all checkpoints, where this holds the last ones
    seeds: "list[Measured]" = field(default_factory=list)  # the runs that this one is the mean of

    def keep_last(self, last: int) -> "Measured":
        """Return the run with its last checkpoints alone, by step; one whose step is not known is the trained model."""
        results = self.results()
        steps = sorted({(of.step is None, of.step or 0, of.checkpoint) for of in results})
        names = {name for _, _, name in steps[-last:]}
        kept = Measured(self.name, not_run=self.not_run, whole=self)
        return kept.add(of for of in results if of.checkpoint in names)

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

    def lengths(self, benchmark: str = "ruler") -> list[int]:
        """Return what a benchmark was measured at, ascending."""
        return sorted({length for task, length in [*self.found, *self.not_run] if benchmark_of(task) == benchmark})

    def tasks(self, benchmark: str = "ruler") -> list[str]:
        """Return what was asked for of a benchmark, in its own order."""
        asked = {task for task, _ in [*self.found, *self.not_run] if benchmark_of(task) == benchmark}
        order = [*TASKS, *(f"longbench_{name}" for names in LONGBENCH.values() for name in names)]
        return [task for task in order if task in asked] + sorted(asked - {*order})

    def ran(self, length: int) -> list[str]:
        """Return RULER's tasks that ran at a length."""
        return [task for task in self.tasks() if (task, length) in self.found]

    def scores(self, key: Key) -> np.ndarray:
        """Return [samples]: of each its mean over the checkpoints."""
        return np.mean([result.scores for result in self.found[key]], axis=0)

    def by_step(self, keys: Sequence[Key]) -> list[tuple[int, list[list[float]]]]:
        """Return (step, of each task its scores [samples]) by checkpoint whose step is known, ascending."""
        steps = sorted({of.step for of in self.found[keys[0]] if of.step is not None})
        return [
            (step, [np.mean([of.scores for of in self.found[key] if of.step == step], axis=0).tolist() for key in keys])
            for step in steps
        ]

    @property
    def checkpoints(self) -> int:
        """How many were measured."""
        return len({of.checkpoint for of in self.results()})

    def results(self) -> list[TaskResult | PerplexityResult]:
        """Return all that was measured."""
        return [of for each in (self.found, self.perplexity) for of_key in each.values() for of in of_key]

    def check_whole(self, place: Path) -> None:
        """Check that each checkpoint has every task, and all of one kind: a mean over checkpoints is of the same ones.

        Args:
            place: the folder of the results.

        Raises:
            UserError: one lacks a task that another has, or was measured otherwise; or vt stands there twice.
        """
        of_all = {result.checkpoint for result in self.results()}
        for name in sorted(of_all):
            _check_one_model(self.name, [result for result in self.results() if result.checkpoint == name])
        perplexity = {("perplexity", length): results for length, results in self.perplexity.items()}
        for (task, length), results in {**self.found, **perplexity}.items():
            _check_same(self.name, self.name, results[0], results, (*ALIKE, "anchor"))
            if task in _OLD and (_OLD[task], length) in self.found:
                raise UserError(
                    f"{quoted(place)}: holds {task} and {_OLD[task]} at {length:,} tokens, two versions of one task; "
                    "remove the results of one"
                )
            if lacking := sorted(of_all - {result.checkpoint for result in results}):
                mend = "evaluate it again, which goes on where it stopped"
                if place.name.endswith(ON_THE_WAY):  # of a step whose weights may be gone
                    mend = f"remove {quoted(place / lacking[0])}, or evaluate the run's models"
                raise UserError(
                    f"{self.name}: {quoted(lacking[0])} has no result of {task} at {length:,}, and others have; {mend}"
                )


@dataclass(frozen=True)
class Average:
    """What a column shows of a run: the mean over tasks of one weight each; `pooled`: of all their samples instead."""

    name: str
    keys: list[Key]
    pooled: bool = False

    def missing(self, run: Measured) -> int:
        """Return how many of its tasks a run did not do."""
        return sum(key not in run.found for key in self.keys)

    def scores(self, run: Measured) -> list[np.ndarray]:
        """Return of each task the scores [samples]; of all of them together where they are pooled."""
        each = [run.scores(key) for key in self.keys]
        return [np.concatenate(each)] if self.pooled else each

    def mean(self, run: Measured) -> float:
        """Return the average of a run."""
        return float(np.mean([of.mean() for of in self.scores(run)]))

    def spread(self, run: Measured) -> float | None:
        """Return the standard deviation of the average over checkpoints; None of one checkpoint."""
        each = [[np.asarray(of.scores) for of in run.found[key]] for key in self.keys]
        together = [np.concatenate(of) for of in zip(*each, strict=True)] if self.pooled else None
        means = [of.mean() for of in together] if together else np.mean([[x.mean() for x in of] for of in each], axis=0)
        return float(np.std(means, ddof=1)) if len(means) > 1 else None


def averages(run: Measured) -> list[tuple[str, Sequence[str]]]:
    """Return the averages of RULER that a run has at some length: what it is called, and its tasks."""
    found: list[tuple[str, Sequence[str]]] = [
        (said, wanted)
        for said, wanted in (("Average of the 13 tasks", THIRTEEN), ("Average of the paper's 11 tasks", ELEVEN))
        if any(not average_named(run, length, wanted).missing(run) for length in run.lengths())
    ]
    ran = [task for task in run.tasks() if all((task, length) in run.found for length in run.lengths())]
    if ran and len(ran) < len(THIRTEEN):
        found.append((f"Average of those that ran ({len(ran)} of 13)", [_OLD.get(task, task) for task in ran]))
    return found


def average_of(run: Measured, length: int, wanted: Sequence[str]) -> list[Key] | None:
    """Return the tasks of an average as this run names them, at a length; None where one did not run."""
    found = average_named(run, length, wanted)
    return None if found.missing(run) else found.keys


def average_named(run: Measured, length: int, wanted: Sequence[str]) -> Average:
    """Return an average of RULER's tasks as this run names them."""
    asked = {_OLD.get(task, task): task for task in run.ran(length)}
    return Average("", [(asked.get(task, task), length) for task in wanted])


def read_measured(said: str, last: int | None) -> Measured:
    """Read a run, or runs of several seeds as one.

    Raises:
        UserError: a folder holds no results or damaged ones; or seeds were not measured alike.
    """

    def read(folder: str) -> Measured:
        run = _read(folder)
        return run if last is None else run.keep_last(last)

    name, equals, places = said.partition("=")
    if not equals or os.path.lexists(said):
        return read(said)
    seeds = [read(place) for place in places.split(",") if place]
    if not name or len(seeds) < 2:
        raise UserError(f"RUN {quoted(said)}: NAME=RUN,RUN names two runs or more; give a folder, or more of them")
    if len({seed.name for seed in seeds}) != len(seeds):
        raise UserError(f"RUN {quoted(said)}: two have one name; rename a folder")
    whole = Measured(name, not_run=seeds[0].not_run, seeds=seeds)
    for seed in seeds:
        check_alike(seeds[0], seed, (*ALIKE, "anchor"))
        if seed.checkpoints != seeds[0].checkpoints:
            raise UserError(f"{seeds[0].name} and {seed.name}: one has more checkpoints than the other; give --last")
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
            break
    else:
        raise UserError(f"{quoted(said)}: holds no results; first: torchtrain evaluate {said}")
    run.check_whole(place)
    return run


def check_alike(a: Measured, b: Measured, settings: Sequence[str] = ALIKE) -> None:
    """Refuse two runs of which one has what the other lacks, or that were measured otherwise.

    Args:
        a, b: runs.
        settings: in which of them they must agree.

    Raises:
        UserError: they are not alike: says in what.
    """
    for what, x, y in (
        ("lengths", [f"{length:,}" for length in a.lengths()], [f"{length:,}" for length in b.lengths()]),
        ("tasks", sorted(f"{t} at {n:,}" for t, n in a.found), sorted(f"{t} at {n:,}" for t, n in b.found)),
        ("lengths of perplexity", [f"{n:,}" for n in a.perplexity], [f"{n:,}" for n in b.perplexity]),
    ):
        if x != y:
            alone = sorted(set(x) ^ set(y))
            raise UserError(
                f"{a.name} and {b.name} were not measured alike: {what}: {alone[0]} stands in one alone; evaluate both"
            )
    for key, results in a.found.items():
        _check_same(a.name, b.name, results[0], b.found[key], settings)
    for length, results in a.perplexity.items():
        _check_same(a.name, b.name, results[0], b.perplexity[length], settings)


def _check_one_model(name: str, results: Sequence[TaskResult | PerplexityResult]) -> None:
    """Refuse results of one checkpoint that are of several models, or were asked with several anchors or engines.

    Raises:
        UserError: an average over tasks would be over two of them: says of which.
    """
    first = results[0]  # of a task, where there is one: of perplexity less is alike
    for result in results[1:]:
        for what in alike_in(result):
            was, now = getattr(first.settings, what), getattr(result.settings, what)
            if was != now:
                raise UserError(
                    f"{name}: {first.task} and {result.task} of {quoted(result.checkpoint)} were measured with other "
                    f"{what} ({quoted(was, 20)} and {quoted(now, 20)}); evaluate it in a new --out, or remove the "
                    "results of one"
                )


def _check_same(
    name: str,
    other: str,
    first: TaskResult | PerplexityResult,
    results: Sequence[TaskResult | PerplexityResult],
    settings: Sequence[str],
) -> None:
    for result in results:
        names, which = f"{name} and {other}", f"{first.task} at {first.length:,}"
        if name == other:
            names, which = name, f"{which} of {quoted(first.checkpoint)} and of {quoted(result.checkpoint)}"
        for what in settings:
            was, now = getattr(first.settings, what), getattr(result.settings, what)
            if was != now:
                raise UserError(
                    f"{names} were not measured alike: {which} has other {what} ({quoted(was, 20)} and "
                    f"{quoted(now, 20)}); evaluate both with one suite and one tokenizer"
                )
        if _of(result) != _of(first):
            raise UserError(
                f"{names} were not measured alike: {which} has other samples, though it says the same; evaluate again "
                "what was changed by hand"
            )


def _of(result: TaskResult | PerplexityResult) -> object:
    """Return what of a result must be alike where the samples are: which there are."""
    if isinstance(result, TaskResult):
        return result.indices
    return [(bucket.first, bucket.end, len(bucket.losses)) for bucket in result.buckets]


def tell_length(length: int) -> str:
    """Return a length as the paper writes it: 4K."""
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
