"""Work in a thread that nobody waits for when the program is interrupted."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Made = TypeVar("_Made")


def in_background(work: Callable[[], _Made], name: str) -> Callable[[], _Made]:
    """Begin work in a daemon thread of this name; return what waits for its result, or raises what it raised."""
    made: Future[_Made] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made.result
