"""SIGTERM: what a scheduler sends before it kills. Between steps it is noted, everywhere else obeyed at once.

And Ctrl-C, which is answered at once, even while a long operation runs.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import FrameType
from typing import Any

from anchorline.command import INTERRUPTED
from torchtrain.distributed.signals import call_on_signal
from torchtrain.distributed.world import read_ranks
from torchtrain.errors import Terminated


class Termination:
    """Takes SIGTERM, and Ctrl-C unless the shell has switched it off, for as long as its block lasts.

    Outside `defer` the signal raises `Terminated` at once, and only once, because nothing is left to save. Each rank
    that gets the signal could print the message; the first one prints it (`torchtrain.distributed.heartbeat`).
    `advice` says how to continue.
    """

    advice = "there is no run yet: start it again"

    def __init__(self) -> None:
        self.asked = self.interrupted = False
        self._noting = self._raised = self._notes_interrupts = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Termination":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._take)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._take_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def defer(self, interrupts: bool = False) -> Iterator[None]:
        """Only set `asked` when the signal comes while the block lasts: the block ends when it suits it.

        Args:
            interrupts: do so when Ctrl-C comes, too, and set `interrupted`.
        """
        self._noting, self._notes_interrupts = True, interrupts
        try:
            yield
            self._noting = False  # not after an error: a save may still be written
        finally:
            self._notes_interrupts = False

    @property
    def deferred(self) -> bool:
        """Whether a signal is only noted now."""
        return self._noting

    def note(self) -> None:
        """Only set `asked` from here on."""
        self._noting = True

    def obey(self) -> None:
        """Obey the signal at once again, before the block of `defer` ends."""
        self._noting = False

    def _take_interrupt(self, _: int, __: FrameType | None) -> None:
        if not (self._noting and self._notes_interrupts):
            raise KeyboardInterrupt(f"{_own_rank()}interrupted; {self.advice}")
        self.asked = self.interrupted = True

    def _take(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        if not self._noting and not self._raised:
            self._raised = True
            raise Terminated(f"{_own_rank()}stopped by SIGTERM; {self.advice}")


def _own_rank() -> str:
    rank, _size, _local = read_ranks()
    return f"rank {rank}: " if rank else ""


def answer_interrupts(answer: Callable[[], None], end: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `answer` as soon as the first Ctrl-C comes in the block, and end the process at once at the second.

    Nothing happens outside of the main thread, or where the shell has switched Ctrl-C off.

    Args:
        answer: says what will happen.
        end: called before the process ends at once.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return nullcontext()
    interrupts = count(1)

    def handle(number: int) -> None:
        if number != signal.SIGINT:
            return
        if next(interrupts) == 1:
            answer()
        else:
            end()
            os._exit(INTERRUPTED)

    return call_on_signal(handle)
