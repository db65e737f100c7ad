"""The results of runs, read from their folders; those that were not measured alike are refused. A run's score is the
mean over its checkpoints; `NAME=RUN,RUN` is one row, the mean of several seeds.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.evaluation.results import NotRun, Result, TaskResult, different_setting, read_results
from torchtrain.evaluation.suite import ELEVEN, IN_2024, LONGBENCH, TASKS, benchmark_of

_ENDS = ("", "-evaluation", "-on-the-way")  # of a run's name: its folders of results; the first that holds any counts
Key = tuple[str, int]  # task, length


@dataclass
class Measured:
    """All results of a run, by task and length."""

    name: str
    tasks: dict[Key, list[TaskResult]] = field(default_factory=dict)
    not_run: dict[Key, str] = field(default_factory=dict)
    seeds: "list[Measured]" = field(default_factory=list)  # the runs that this one is the mean of

    def add(self, results: Iterable[Result]) -> "Measured":
        """Add results."""
        for result in results:
            if isinstance(result, NotRun):
                self.not_run[result.task, result.length] = result.not_run
            else:
                self.tasks.setdefault((result.task, result.length), []).append(result)
        return self

    @property
    def asked(self) -> list[Key]:
        """Every task and length that ran or could not run."""
        return [*dict.fromkeys([*self.tasks, *self.not_run])]

    def results(self) -> list[TaskResult]:
        """Return all results."""
        return [result for each in self.tasks.values() for result in each]

    def of_checkpoints(self, names: Sequence[str]) -> "Measured":
        """Return the results of some checkpoints."""
        own = (result for result in self.results() if result.checkpoint in names)
        return Measured(self.name, not_run=self.not_run).add(own)

    def of_step(self, step: int) -> "Measured":
        """Return the results of a step; of several seeds those of all."""
        return self.of_checkpoints([result.checkpoint for result in self.results() if result.step == step])

    @property
    def checkpoint_names(self) -> list[str]:
        """The checkpoints by step. One whose step is not known is the trained model, and the last."""
        steps = {result.checkpoint: (result.step is None, result.step or 0) for result in self.results()}
        return sorted(steps, key=lambda name: (steps[name], name))

    def names(self, benchmark: str = "ruler") -> list[str]:
        """Return the tasks of a benchmark that were asked for, in its own order."""
        asked = {task for task, _ in self.asked if benchmark_of(task) == benchmark}
        order = [*TASKS, *(f"longbench_{name}" for names in LONGBENCH.values() for name in names)]
        places = {task: place for place, task in enumerate(order)}
        return sorted(asked, key=lambda task: (places.get(IN_2024.get(task, task), len(places)), task))


@dataclass(frozen=True)
class Average:
    """A cell's number: the mean over tasks; `pooled`: over all their samples; `part`: over one part of these alone."""

    keys: list[Key]
    pooled: bool = False
    part: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether the number is a loss, which is shown as perplexity."""
        return self.keys[0][0] == "perplexity"

    def missing(self, run: Measured) -> list[str]:
        """Return the tasks that did not run."""
        return [key[0] for key in self.keys if key not in run.tasks]

    def scores(self, run: Measured) -> list[np.ndarray]:
        """Return the scores [samples] of each task, means over checkpoints; pooled: of all of them together."""
        each = [np.mean([result.scores(self.part) for result in run.tasks[key]], axis=0) for key in self.keys]
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


def ruler_averages(run: Measured) -> dict[str, dict[int, Average]]:
    """Return RULER's averages by title, then by the lengths at which all its tasks ran."""
    names = {IN_2024.get(task, task): task for task in run.names()}  # the run's own name of a task, by its name today
    lengths = sorted({length for task, length in run.asked if task in run.names()})
    wanted = {"Average of the 13 tasks": TASKS, "Average of the paper's 11 tasks": ELEVEN}
    known = {title: [names[task] for task in tasks] for title, tasks in wanted.items() if names.keys() >= {*tasks}}
    ran = [task for task in run.names() if all((task, length) in run.tasks for length in lengths)]
    if ran and len(ran) < len(TASKS):
        known[f"Average of those that ran ({len(ran)} of 13)"] = ran
    averages = {}
    for title, tasks in known.items():
        each = {n: Average([(task, n) for task in tasks]) for n in lengths}
        if whole := {length: average for length, average in each.items() if not average.missing(run)}:
            averages[title] = whole
    return averages


def read_measured(argument: str, last: int | None) -> Measured:
    """Read a run, or runs of several seeds as one.

    argument: a run's folder, a folder of results, or `NAME=RUN,RUN`.
    last: how many checkpoints of each run at most, the last ones; None: all.
    Raises UserError: a folder holds no results or damaged ones; or results were not measured alike.
    """
    name, equals, places = argument.partition("=")
    if not equals or os.path.lexists(argument):
        run = _read_run(argument)
        return run if last is None else run.of_checkpoints(run.checkpoint_names[-last:])
    seeds = [read_measured(place, last) for place in places.split(",") if place]
    if not name or len(seeds) < 2:
        raise UserError(f"RUN {quoted(argument)}: NAME=RUN,RUN names two runs or more; give a folder, or more of them")
    if len({seed.name for seed in seeds}) != len(seeds):
        raise UserError(f"RUN {quoted(argument)}: two have one name; rename a folder")
    whole = Measured(name, not_run=seeds[0].not_run, seeds=seeds)
    for seed in seeds:
        check_alike(seeds[0], seed, "anchor")
        whole.add(of.model_copy(update={"checkpoint": f"{seed.name}/{of.checkpoint}"}) for of in seed.results())
    return whole


def _read_run(argument: str) -> Measured:
    folder = Path(os.path.abspath(argument))  # `.` has no name
    if not folder.name:
        raise UserError(f"RUN {quoted(argument)}: is no run; give the folder of one")
    name = folder.name.removesuffix(_ENDS[1]).removesuffix(_ENDS[2])
    for place in (folder.with_name(folder.name + end) for end in _ENDS):
        run = Measured(name).add(read_results(place))
        if run.asked:
            _check_run(run, place)
            return run
    raise UserError(f"{quoted(argument)}: holds no results; first: torchtrain evaluate {argument}")


def _check_run(run: Measured, place: Path) -> None:
    """Refuse results of one checkpoint that are of several models, and checkpoints that were not measured alike."""
    for task, length in run.tasks:
        if (IN_2024.get(task, ""), length) in run.tasks:
            raise UserError(
                f"{quoted(place)}: holds {task} and {IN_2024[task]} at {length:,} tokens, two versions of one task; "
                "remove the results of one"
            )
    checkpoints = [run.of_checkpoints([name]) for name in run.checkpoint_names]
    for name, checkpoint in zip(run.checkpoint_names, checkpoints, strict=True):
        checkpoint.name = str(place / name)
        first, *others = sorted(checkpoint.results(), key=lambda result: result.task == "perplexity")
        for result in others:
            if setting := different_setting(result, first.settings):
                raise UserError(
                    f"{quoted(checkpoint.name)}: {first.task} and {result.task} were measured with other {setting}; "
                    "evaluate it in a new --out, or remove the results of one"
                )
        check_alike(checkpoints[0], checkpoint, "anchor")


def check_alike(a: Measured, b: Measured, *more: str) -> None:
    """Refuse runs, or checkpoints of one, not measured alike, `more` settings too. Raises UserError: says in what."""
    who = f"{quoted(a.name)} and {quoted(b.name)} were not measured alike"
    if alone := sorted(a.tasks.keys() ^ b.tasks.keys()):
        task, length = alone[0]
        raise UserError(f"{who}: {task} at {length:,} is in one alone; evaluate both, or remove the other's")
    if len(a.checkpoint_names) != len(b.checkpoint_names):
        raise UserError(
            f"{who}: one has {len(a.checkpoint_names)} checkpoints, the other {len(b.checkpoint_names)}, and means "
            "over different numbers of them are no pair; give --last"
        )
    for (task, length), (first, *_) in a.tasks.items():
        second = b.tasks[task, length][0]
        for name in ("samples", "dtype", "metric", "answered", *more):
            one, other = (getattr(of, name, getattr(of.settings, name, None)) for of in (first, second))
            if one != other:
                fix = "evaluate both with one suite and one tokenizer"
                if name == "dtype":
                    fix = f"evaluate the model of {quoted(b.name)} again, with dtype={one} and in a new --out"
                raise UserError(
                    f"{who}: {task} at {length:,} has other {name} ({quoted(one, 20)} and {quoted(other, 20)}); " + fix
                )


def format_length(length: int) -> str:
    """Return a length as the paper writes it: 4K."""
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
