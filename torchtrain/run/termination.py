"""SIGTERM: what a scheduler sends before it kills. Between steps it is noted, everywhere else obeyed at once.

And Ctrl-C, which is answered at once, even while a long operation runs.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from anchorline.command import INTERRUPTED
from torchtrain.distributed.world import here
from torchtrain.errors import Terminated

LEAVE = b"\0"  # for the thread that listens; no signal has this number


class Termination:
    """Takes SIGTERM for as long as its block lasts.

    Outside `defer` the signal raises `Terminated` where the program stands, once: there is nothing to save that is not
    saved. Every rank that it comes to can say so; the first one does (`torchtrain.distributed.heartbeat`). `advice`
    says how to go on.
    """

    advice = "there is no run yet: start it again"

    def __init__(self) -> None:
        self.asked = False
        self._noting = self._raised = False
        self._before: Any = None

    def __enter__(self) -> "Termination":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            self._before = signal.signal(signal.SIGTERM, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Only set `asked` when the signal comes while the block lasts: the block ends when it suits it."""
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def note(self) -> None:
        """Only set `asked` from here on."""
        self._noting = True

    def obey(self) -> None:
        """Obey the signal at once again, before the block of `defer` ends."""
        self._noting = False

    def _take(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        if not self._noting and not self._raised:
            self._raised = True
            rank, _size, _local = here()
            raise Terminated(f"{f'rank {rank}: ' if rank else ''}stopped by SIGTERM; {self.advice}")


@contextmanager
def answer_interrupts(answer: Callable[[], None], end: Callable[[], object]) -> Iterator[None]:
    """Call `answer` as soon as the first Ctrl-C comes in the block, and end the process at once at the second.

    Python raises KeyboardInterrupt only between two of its own operations, and a backward pass may be one operation of
    a minute. The system writes each signal into a pipe at once, and a thread reads it. Nothing happens outside of the
    main thread, or where the shell has switched Ctrl-C off.

    Args:
        answer: says what will happen.
        end: called before the process ends at once.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        count = 0
        while (number := os.read(reading, 1)) != LEAVE:
            count += number[0] == signal.SIGINT
            if number[0] == signal.SIGINT and count == 1:
                answer()
            elif number[0] == signal.SIGINT:
                end()
                os._exit(INTERRUPTED)

    thread = threading.Thread(target=listen, name="interrupts", daemon=True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, LEAVE)
        thread.join()
        os.close(writing)
        os.close(reading)
