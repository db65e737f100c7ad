"""Readers for the tests of `prepare`, in a module of their own, because workers import it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from torchtrain.data import blocks, prepare_store
from torchtrain.data.blocks import ReadRecords

TASK = 3


class KilledOnce(ReadRecords):
    """As its base, but who reads task 3 first is killed in the middle of it."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        mark = Path(self.sources[0].files or "").parent.with_name("killed")
        for number, document in enumerate(super().run(data, rank, world_size)):
            if rank == TASK and number == 20 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield document


class Waiting(ReadRecords):
    """Writes its process ids and waits, in every task."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        folder = Path(self.sources[0].files or "").parent.with_name("waiting")
        folder.mkdir(exist_ok=True)
        (folder / f"{os.getpid()}-{os.getppid()}").touch()
        time.sleep(600)
        yield from super().run(data, rank, world_size)


def prepare_waiting(*given: Any) -> None:
    """Begin `prepare_store` with readers that wait."""
    blocks.ReadRecords = Waiting  # type: ignore[misc]
    prepare_store(*given)
