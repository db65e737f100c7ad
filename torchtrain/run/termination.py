"""SIGTERM, which a scheduler sends before it kills, and Ctrl-C: one rule for both.

The first one is answered at once. Between steps it is noted, everywhere else obeyed. The second one ends the process.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Self

from torchtrain.distributed.signals import SIGNALS, call_on_signal
from torchtrain.distributed.world import read_ranks
from torchtrain.errors import Terminated

# Seconds in which a signal that comes again is still the first: torchrun, Slurm and timeout(1) hand it on besides.
_RELAYED = 2.0


class Termination:
    """Takes SIGTERM, and Ctrl-C unless the shell has switched it off, for as long as its block lasts.

    Outside `defer` the first signal raises `Terminated` at once. Each rank that gets it could print the message; the
    first one prints it (`torchtrain.distributed.heartbeat`).

    `advice` says how to continue. `answer` is called with the signal's name as soon as the first one comes, even while
    an operation of many minutes runs; `leave` before the second one ends the process.
    """

    advice = "there is no run yet: start it again"

    def __init__(self) -> None:
        self.answer: Callable[[str], object] = lambda name: None
        self.leave: Callable[[], object] = lambda: None
        self.asked: signal.Signals | None = None  # the first signal that came
        self._since: float | None = None  # when that was
        self.noting = False  # whether a signal is only noted now
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            for number in SIGNALS:
                if number == signal.SIGTERM or signal.getsignal(number) is signal.default_int_handler:
                    self._open.callback(signal.signal, number, signal.signal(number, self._take))
            self._open.enter_context(call_on_signal(self._answer))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Only set `asked` on a signal in the block. Raises Terminated: one came before, and a library kept it back."""
        self.obey()
        self.noting = True
        yield
        self.noting = False  # not after an error: a save may still be written

    def note(self) -> None:
        """Only set `asked` from here on."""
        self.noting = True

    def obey(self) -> None:
        """Obey signals at once again, before the block of `defer` ends. Raises Terminated: one has come."""
        self.noting = False
        if self.asked is not None:
            rank, _size, _local = read_ranks()
            _, how, code = SIGNALS[self.asked]
            raise Terminated(f"{f'rank {rank}: ' if rank else ''}{how}; {self.advice}", code)

    def _take(self, number: int, _: FrameType | None) -> None:
        first, self.asked = self.asked is None, self.asked or signal.Signals(number)
        if first and not self.noting:
            self.obey()

    def _answer(self, number: int) -> None:
        if number not in SIGNALS:
            return
        name, _, code = SIGNALS[signal.Signals(number)]
        if self._since is None:
            self._since = time.monotonic()
            self.answer(name)
        elif time.monotonic() - self._since > _RELAYED:
            self.leave()
            os._exit(code)
