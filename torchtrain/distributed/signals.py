"""Signals during a call that lasts: Python runs its own handlers only between two of its operations."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

# What a run obeys, by one rule: its name, how the run ended, and the exit code, 128 + the signal, as shells have it.
SIGNALS = {signal.SIGTERM: ("SIGTERM", "stopped by SIGTERM", 143), signal.SIGINT: ("Ctrl-C", "interrupted", 130)}
_STOP = b"\0"  # stops the thread; no signal has this number


@contextmanager
def call_on_signal(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle(number)` in a thread as soon as a signal comes in the block.

    A backward pass may be one operation of a minute, and a wait for other processes one of two hours. The system writes
    each signal into a pipe at once, and the thread reads the pipe. Outside of the main thread nothing happens, because
    Python takes signals there alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (number := os.read(reader, 1)) != _STOP:
            handle(number[0])

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, _STOP)
        thread.join()
        os.close(writer)
        os.close(reader)


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore `SIGNALS` while the block runs: torchrun sends SIGTERM to processes that are ending already."""
    with ExitStack() as before:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        yield


def exit_on_signal(rank: int, address: str) -> AbstractContextManager[None]:
    """Exit at once, with one line that names rank and address, when SIGTERM or Ctrl-C comes while processes connect."""

    def handle(number: int) -> None:
        if number in SIGNALS:
            _, how, code = SIGNALS[signal.Signals(number)]
            sys.stderr.write(f"torchtrain: rank {rank}: {how} while it waited for the other processes at {address}\n")
            sys.stderr.flush()
            os._exit(code)

    return call_on_signal(handle)
