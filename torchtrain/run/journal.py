"""What a run tells as it goes: `metrics.jsonl`, `timing.jsonl`, the console's progress, and whom `log` names."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from rich.console import Console

from torchtrain.config import Config
from torchtrain.distributed.world import World
from torchtrain.run.folder import RunFolder
from torchtrain.run.report import Display
from torchtrain.run.steps import Step
from torchtrain.run.writers import Writers
from torchtrain.training.events import MetricsFile, step_status


class Journal:
    """The files and the console of a run at work, a context manager.

    All ranks make one and call it alike; only rank 0's writes.

    Args:
        config: the run's.
        folder: the run's, which is there.
        world: this rank's place.
        console: takes the progress.
    """

    def __init__(self, config: Config, folder: RunFolder, world: World, console: Console) -> None:
        self._config, self._folder, self._world = config, folder, world
        self._leads = world.rank == 0
        self._open = ExitStack()
        self._writers: Writers | None = None
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

    def open_writers(self, first: int) -> None:
        """Begin to tell whom `log` names.

        Args:
            first: steps done so far.

        Raises:
            UserError, OtherRankFailed: one of them does not begin.
        """
        with self._world.together():
            if self._leads:
                self._writers = self._open.enter_context(Writers(self._config, self._folder.path, first))

    def begin_steps(self, first: int, started: float, resumed: bool) -> None:
        """Show the training.

        Args:
            first: steps done so far.
            started: when the process began, by `time.perf_counter`: the first step says how long it took to come to its
                end.
            resumed: said beside it.
        """
        self._advance = self.display.task("training", self._config.train.steps, first)
        self._beginning = started, resumed

    def write_step(self, step: Step) -> None:
        """Write a step down, show it and tell it.

        Raises:
            UserError: the disk does not take it.
        """
        event, speed = step.event(), step.speed()
        self.metrics.write("step", event)
        if self._beginning is not None:
            started, resumed = self._beginning
            speed |= {"since_start": time.perf_counter() - started, "resumed": resumed}
            self._beginning = None
        self.timing.write("step", {"step": step.number, **speed})
        self._advance(step_status(event | speed))
        self.tell("step", step.number, event)
        self.tell("speed", step.number, speed)

    def tell(self, name: str, step: int, event: Mapping[str, Any]) -> None:
        """Pass an event on to whom `log` names."""
        if self._writers is not None:
            self._writers.write(name, step, event)
