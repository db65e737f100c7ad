"""Filters for the tests of `prepare`, in a module of their own, because workers import it."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class KillOnce:
    """Whoever reads the place first is killed in the middle of its task."""

    def __init__(self, place: str, mark: str) -> None:
        self.place, self.mark = place, Path(mark)

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        for document in data:
            if document.id == self.place and not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield document


class Wait:
    """Writes its process ids at its first document, and waits."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        Path(self.folder, f"{os.getpid()}-{os.getppid()}").touch()
        time.sleep(600)
        yield from data


class LimitFiles:
    """From the first document on no file of this process may grow beyond some bytes, as on a disk that is full."""

    def __init__(self, unless: str) -> None:
        self.unless = Path(unless)

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        if not self.unless.exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        yield from data
