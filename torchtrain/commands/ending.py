"""How a command of many processes ends: one process prints the message, and all use its exit code.

torchrun stops all processes when one exits. So another rank than 0 waits with a message that rank 0 may print, too.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from anchorline.command import INTERRUPTED, MISTAKE, Leave
from anchorline.errors import UserError, one_line, quoted
from torchtrain.distributed.signals import ignore_signals
from torchtrain.errors import OtherRankFailed, RankLost, TasksUnfinished, Terminated

_SECONDS_BEFORE_MESSAGE = 2.0
_SECONDS_BEFORE_EXIT = 5.0


@contextmanager
def report_once() -> Iterator[None]:
    """Turn the error that ends a run into a message of one process, and an exit code of all."""
    try:
        yield
    except UserError as error:
        rank, message = os.environ.get("RANK", "0"), str(error)
        if rank != "0":
            time.sleep(_SECONDS_BEFORE_MESSAGE)
            message = message if message.startswith("rank ") else f"rank {quoted(rank)[1:-1]}: {message}"
        raise Leave(message, MISTAKE) from None
    except OtherRankFailed as error:
        # torchrun sends SIGTERM, which would change the exit code.
        with ignore_signals():
            time.sleep(_SECONDS_BEFORE_EXIT)
        raise Leave("", error.code) from None
    except (RankLost, TasksUnfinished) as error:
        raise Leave(str(error), 1) from None
    except Terminated as error:
        raise Leave(str(error), error.code) from None
    except RuntimeError as error:
        # torch has an error class for a GPU's memory, and only a text for the host's.
        if type(error).__name__ != "OutOfMemoryError" and "DefaultCPUAllocator" not in str(error):
            raise
        raise MemoryError(one_line(str(error).partition("\n")[0])) from error
    except KeyboardInterrupt as error:
        rank = os.environ.get("RANK", "0")
        alone = "interrupted" if rank == "0" else f"rank {quoted(rank)[1:-1]}: interrupted"
        raise Leave(str(error) or alone, INTERRUPTED) from None
