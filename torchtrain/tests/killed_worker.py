"""Readers for the tests of `prepare`, in a module of their own, because workers import it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from torchtrain.data import tasks
from torchtrain.data.tasks import MakeShard

TASK = 3


class KilledOnce(MakeShard):
    """As its base, but who reads task 3 first is killed in the middle of it."""

    def records(self, task: Any) -> Any:
        mark = Path(self.data.sources[0].files or "").parent.with_name("killed")
        for number, document in enumerate(super().records(task)):
            if task == self.tasks[TASK] and number == 20 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield document


class Waiting(MakeShard):
    """Writes its process ids and waits, in every task."""

    def records(self, task: Any) -> Any:
        folder = Path(self.data.sources[0].files or "").parent.with_name("waiting")
        folder.mkdir(exist_ok=True)
        (folder / f"{os.getpid()}-{os.getppid()}").touch()
        time.sleep(600)
        yield from super().records(task)


def prepare_waiting(*given: Any) -> None:
    """Begin `prepare_store` with readers that wait."""
    tasks.MakeShard = Waiting  # type: ignore[misc]
    tasks.prepare_store(*given)
