"""Signals while the processes of a run meet: the call that waits is not Python's, and lasts as long as
`world.PATIENCE` says.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ENDS = {signal.SIGTERM: (143, "stopped by SIGTERM"), signal.SIGINT: (130, "interrupted")}


@contextmanager
def obey_signals(rank: int, place: str) -> Iterator[None]:
    """End the process at once, with a line, when SIGTERM or Ctrl-C comes in the block. Nothing has to be saved.

    Args:
        rank: of this process.
        place: where the processes meet, for the line.
    """
    if threading.current_thread() is not threading.main_thread():  # elsewhere Python takes no signals
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in _ENDS:
                code, how = _ENDS[signal.Signals(number[0])]
                sys.stderr.write(f"torchtrain: rank {rank}: {how} while it waited for the other processes at {place}\n")
                sys.stderr.flush()
                os._exit(code)

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)
