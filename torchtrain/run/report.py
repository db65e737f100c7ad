"""What a run reports: `metrics.jsonl`, `timing.jsonl`, progress, services such as TensorBoard, `loss.png`."""

import hashlib
import io
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.terminal import Console
from torchtrain import data
from torchtrain.config import LogConfig
from torchtrain.distributed.world import World
from torchtrain.run.folder import RunFolder
from torchtrain.run.steps import Step
from torchtrain.training.events import MetricsFile, read_metrics, step_status
from torchtrain.training.held_out import BLOCK, HeldOut
from torchtrain.training.losses import Mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SECONDS_BETWEEN_LINES = 5.0
_LEAST_CONTEXT = 256  # that has a line of its own; `metrics.jsonl` has shorter ones, too
_SECONDS_WITHOUT_A_LINE = 30.0  # in which a log says nothing while a step runs
_NOT_IN_NAMES = re.compile(r"[^\w. :-]")  # of MLflow's metrics; a domain may have any character


def make_progress_printer(
    console: Console, spinner: Status, log: Callable[[str], None]
) -> Callable[[data.PreparationProgress], None]:
    """Return what shows the progress of tokenising: by a spinner, or lines when the state or some seconds pass."""
    if console.is_terminal:
        return lambda progress: spinner.update(Text(str(progress)))
    state, printed = "", 0.0

    def report_progress(progress: data.PreparationProgress) -> None:
        nonlocal state, printed
        now = time.monotonic()
        if progress.state != state or now - printed >= _SECONDS_BETWEEN_LINES:
            log(str(progress))
            state, printed = progress.state, now

    return report_progress


class Display:
    """A run's progress, a context manager: bars on a terminal, else a line a step, and one every half minute within."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._running: tuple[str, float] | None = None  # what runs now, and since when
        self._part = ""  # how far it is
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._bars.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bars.stop()

    def task(self, name: str, total: int, first: int = 0) -> Callable[[str], None]:
        """Begin a task of `total` steps, `first` of them done; return what takes a status when one more is done."""
        task, outer = self._bars.add_task(name, total=total, completed=first, status=""), self._running
        began, done = time.monotonic(), itertools.count(first + 1)
        self._begin(name, first, total)

        def advance(status: str) -> None:
            self._bars.update(task, advance=1, status=status)
            now = next(done)
            self._begin(name, now, total)
            if now == total:  # what it interrupted goes on
                self._running = outer and (outer[0], time.monotonic())
            if not self._console.is_terminal:
                left = (time.monotonic() - began) / (now - first) * (total - now)
                self._console.print(
                    f"{name} {now}/{total} · {status} · {timedelta(seconds=round(left))} left", soft_wrap=True
                )

        return advance

    def note_part(self, part: str) -> None:
        """Note how far the step is that runs now."""
        self._part = f" · {part}"
        for task in [task for task in self._bars.tasks if not task.finished][:1]:
            self._bars.update(task.id, status=part)

    def _begin(self, name: str, done: int, total: int) -> None:
        self._part = ""
        self._running = (f"{name} {done + 1}/{total}", time.monotonic()) if done < total else None

    def _tick(self) -> None:
        while not self._ended.wait(_SECONDS_WITHOUT_A_LINE):
            if self._running is not None and not self._console.is_terminal:
                what, since = self._running
                self._console.print(f"{what}{self._part} · {time.monotonic() - since:.0f} s so far", soft_wrap=True)


def final_table(before: HeldOut, after: HeldOut, tokens_seen: int, tokens_per_second: float) -> Table:
    """Return the held-out loss of each domain, before and after, in nats per token, and what the training did."""
    caption = f"{tokens_seen:,} tokens seen, {tokens_per_second:,.0f} tokens/s"
    if len(before.blocks) == len(after.blocks):  # not so in a run that began before checkpoints kept them
        from torchtrain.evaluation.intervals import student_interval

        interval = student_interval([b - a for a, b in zip(before.blocks, after.blocks, strict=True)])
        if interval is not None:
            caption += f"\nchange {interval[1]:+.4f} to {interval[2]:+.4f} (95% interval over blocks of {BLOCK} tokens)"
    table = Table(title="Held-out loss (nats per token)", caption=caption)
    table.add_column("documents")
    for name in ("tokens", "before", "after", "change"):
        table.add_column(name, justify="right")
    for domain, mean in before.by_domain.items():
        _add(table, domain, mean, after.by_domain[domain])
    table.add_section()
    _add(table, "all", before.overall, after.overall)
    _add(table, f"positions beyond {before.own_positions:,}", before.new_positions, after.new_positions)
    for start, mean in before.by_context.items():
        if start >= _LEAST_CONTEXT:
            _add(table, f"context {start:,} to {2 * start - 1:,}", mean, after.by_context[start])
    return table


def _add(table: Table, name: str, before: Mean, after: Mean) -> None:
    old, new = before.value, after.value
    if old is not None and new is not None:  # a domain may be called [x], which is markup
        table.add_row(escape(name), f"{before.tokens:,}", f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}")


def plot(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return `draw` of the events of `metrics.jsonl` as a PNG."""
    drawn = io.BytesIO()
    draw(events).savefig(drawn, dpi=120, format="png")
    return drawn.getvalue()


def draw(events: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw training loss (all, and per domain trained on) over tokens seen, and held-out losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluation"]

    def line(key: Callable[[Mapping[str, Any]], Any], name: str, color: str, width: float) -> None:
        if there := [e for e in steps if key(e)]:
            tokens, losses = [e["tokens_seen"] for e in there], [key(e)["loss"] for e in there]
            axes.plot(tokens, losses, color=color, linewidth=width, marker=".", alpha=0.7, label=f"training, {name}")
        if not evaluations:
            return
        tokens, losses = [e["tokens_seen"] for e in evaluations], [key(e)["loss"] for e in evaluations]
        style = {"linestyle": ":", "marker": "D", "markersize": 7, "markeredgecolor": "white"}
        axes.plot(tokens, losses, color=color, label=f"held out, {name}", **style)

    domains = list(dict.fromkeys(domain for event in (evaluations or steps) for domain in event["domains"]))
    line(lambda e: e, "all" if len(domains) > 1 else domains[0], "black", 2)
    for index, domain in enumerate(domains if len(domains) > 1 else ()):
        line(lambda e, domain=domain: e["domains"].get(domain), domain, f"C{index}", 1)

    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training and held-out loss")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    return figure


def _start_tracker(
    name: str, project: str, about: dict[str, Any], folder: Path, first: int, opened: ExitStack
) -> Callable[[dict[str, float], int], None]:
    """Start one of accelerate's trackers, after `first` steps of a run with the config `about`; return what sends it
    numbers of a step.
    """
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # A folder is one run there, however often it is resumed. trackio knows a run by its name.
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    own = f"{folder.name}-{identity}"
    given: dict[str, Any] = {
        # It replaces later steps that it has from before an interruption.
        "tensorboard": {"logging_dir": str(folder), "purge_step": first + 1 if first else None},
        "wandb": {"name": folder.name, "dir": str(folder), "config": about, "id": identity, "resume": "allow"},
        "trackio": {"name": own, "config": about, "resume": "allow"},
        "mlflow": {"run_name": own},
    }[name]
    try:
        with patch.dict(os.environ):  # The trackers ask it which process they are in: it must make no group of its own.
            os.environ.pop("LOCAL_RANK", None)
            PartialState()
        if name == "mlflow":
            import mlflow  # pyright: ignore[reportMissingImports]

            of = f"attributes.run_name LIKE '%-{identity}'"
            found = mlflow.search_runs(experiment_names=[project], filter_string=of, output_format="list")
            given["run_id"] = found[0].info.run_id if found else None
        tracker = LOGGER_TYPE_TO_CLASS[name](name if name == "tensorboard" else project, **given)
        tracker.start()
        if given.get("run_id", "") is None:  # a parameter is written once, and holds a text of 6,000 characters
            tracker.store_init_configuration({section: json.dumps(values) for section, values in about.items()})
    except Exception as error:  # no login, no network, no such project: each service has classes of its own
        raise _tracker_error(name, project, error, "correct that, or take it out of the list") from error

    def finish(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and name == "wandb":
            tracker.tracker.finish(exit_code=1)
        elif kind is not None and name == "mlflow":
            mlflow.end_run("FAILED")
        else:
            tracker.finish()

    def send(numbers: dict[str, float], step: int) -> None:
        try:
            tracker.log(numbers, step=step)
        except Exception as error:  # as above
            raise _tracker_error(name, project, error, f"correct that, then: torchtrain resume {folder}") from error

    opened.push(finish)
    return send


def _tracker_error(name: str, project: str, error: Exception, advice: str) -> UserError:
    return UserError(f"log.report_to {name}, log.project {quoted(project)}: {quoted_reason(error)}; {advice}")


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        place = f"{prefix}/{_NOT_IN_NAMES.sub('_', key)}"
        if isinstance(value, Mapping):
            yield from _numbers(value, place)
        elif isinstance(value, int | float) and key != "step":
            yield place, value


class Journal:
    """The files and the console of a run at work, a context manager.

    All ranks make one and call it alike; only rank 0's writes.

    log: the services that get its numbers.
    folder: the run's, which is there.
    console: takes the progress.
    """

    def __init__(self, log: LogConfig, folder: RunFolder, world: World, console: Console) -> None:
        self._log, self._folder, self._world = log, folder, world
        self._leads = world.rank == 0
        self._open = ExitStack()
        self._senders: list[Callable[[dict[str, float], int], None]] = []
        self._beginning: tuple[float, bool] | None = None
        self._advance: Callable[[str], None] = lambda status: None
        self.metrics = MetricsFile(folder.metrics if self._leads else None)
        self.timing = MetricsFile(folder.timing if self._leads else None)
        self.display = Display(console)

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            with self._world.together():
                opened.enter_context(self.metrics)
                opened.enter_context(self.timing)
            opened.enter_context(self.display)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def open_writers(self, first: int, about: dict[str, Any]) -> None:
        """Start the services that `log` names.

        first: steps done so far.
        about: the run's config as JSON, which they show.
        Raises UserError, OtherRankFailed: one of them does not start.
        """
        with self._world.together():
            for name in dict.fromkeys(self._log.report_to if self._leads else []):
                self._senders.append(
                    _start_tracker(name, self._log.project, about, self._folder.path, first, self._open)
                )

    def begin_steps(self, first: int, last: int, started: float, resumed: bool) -> None:
        """Show the training from step `first` to `last`. started: by `time.perf_counter`; the first step has the time
        since. resumed: whether the run was, which the first step says, too.
        """
        self._advance = self.display.task("training", last, first)
        self._beginning = started, resumed

    def write_step(self, step: Step) -> None:
        """Write a step into the files, show it, and forward it. Raises UserError: the disk does not take it."""
        event, speed = step.event(), step.speed()
        self.metrics.write("step", event)
        if self._beginning is not None:
            started, resumed = self._beginning
            speed |= {"since_start": time.perf_counter() - started, "resumed": resumed}
            self._beginning = None
        self.timing.write("step", {"step": step.number, **speed})
        self._advance(step_status(event | speed))
        self.forward("step", step.number, event)
        self.forward("speed", step.number, speed)

    def has_held_out(self, step: int) -> bool:
        """Whether `metrics.jsonl` has the held-out loss after its last step. Raises UserError, OtherRankFailed."""
        found = False
        with self._world.together():
            if self._leads:
                events = read_metrics(self._folder.metrics, 1)
                found = any(event["event"] == "evaluation" and event["step"] == step for event in events)
        return self._world.from_first(found)

    def forward(self, name: str, step: int, event: Mapping[str, Any]) -> None:
        """Send an event to the services that `log` names."""
        for send in self._senders:
            send(dict(_numbers(event, name)), step)

    def finish(self, step: int) -> None:
        """Plot the losses; note that the run is finished. Raises UserError, OtherRankFailed: the disk takes nothing."""
        with self._world.together():
            if self._leads:
                self._folder.finish(step, plot(read_metrics(self._folder.metrics)))
