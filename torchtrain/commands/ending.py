"""How a command of many processes ends: which one prints the message, and with which exit code.

torchrun stops all processes when the first one leaves. Rank 0 prints its message at once. Another rank that found a
mistake waits, in case rank 0 found the same. A rank without a message leaves last.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from anchorline.command import INTERRUPTED, MISTAKE, Leave
from anchorline.errors import UserError, one_line, quoted
from torchtrain.errors import TERMINATED, OtherRankFailed, RankLost, TasksUnfinished, Terminated

_SECONDS_BEFORE_SPEAKING = 2.0
_SECONDS_BEFORE_LEAVING = 5.0


@contextmanager
def one_speaks() -> Iterator[None]:
    """Let one process of a run print why all of them end."""
    try:
        yield
    except UserError as error:
        rank, message = os.environ.get("RANK", "0"), str(error)
        if rank != "0":
            time.sleep(_SECONDS_BEFORE_SPEAKING)
            message = message if message.startswith("rank ") else f"rank {quoted(rank)[1:-1]}: {message}"
        raise Leave(message, MISTAKE) from None
    except OtherRankFailed as error:
        with _undisturbed():
            time.sleep(_SECONDS_BEFORE_LEAVING)
        raise Leave("", error.code) from None
    except (RankLost, TasksUnfinished) as error:
        raise Leave(str(error), 1) from None
    except Terminated as error:
        raise Leave(str(error), TERMINATED) from None
    except RuntimeError as error:
        if not _is_memory(error):
            raise
        raise MemoryError(one_line(str(error).partition("\n")[0])) from error
    except KeyboardInterrupt as error:
        rank = os.environ.get("RANK", "0")
        alone = "interrupted" if rank == "0" else f"rank {quoted(rank)[1:-1]}: interrupted"
        raise Leave(str(error) or alone, INTERRUPTED) from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGTERM: torchrun sends it to a process that is already ending, and would see another exit code."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory: it has a class for a GPU's, and only a text for the host's."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
