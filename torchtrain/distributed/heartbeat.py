"""Whether the other processes still live, for those that wait for them: a collective alone would wait for half an hour or for ever.

Every rank writes a number that grows into the store that torchrun keeps, and watches that of the next rank: so each is watched,
and the store is asked as often however many there are. A thread does it. It goes on while the program waits in a collective.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

PERIOD, PATIENCE = 5.0, 45.0  # seconds
_DONE = b"done"


@contextmanager
def heartbeat(rank: int, size: int, period: float | None = None, patience: float | None = None) -> Iterator[None]:
    """Show that this rank lives, and watch the next one, for as long as the block lasts.

    Args:
        rank: this one's.
        size: how many there are; alone there is nothing to do.
        period: seconds between two signs of life; default: `PERIOD`.
        patience: seconds without one, by a clock that nobody sets, after which the next rank counts as lost: this one prints a
            line and leaves with exit code 1. Default: `PATIENCE`.
    """
    if size == 1:
        yield
        return
    period, patience = period or PERIOD, patience or PATIENCE
    ended = threading.Event()
    beat = threading.Thread(target=_watch, args=(rank, size, period, patience, ended), name="heartbeat", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join(timeout=period + 1)


def _watch(rank: int, size: int, period: float, patience: float, ended: threading.Event) -> None:
    following = (rank + 1) % size
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart by torchrun
    mine, theirs = (f"anchorline/{start}/beat/{number}" for number in (rank, following))
    try:
        # A connection of its own: the one of the process group may be waiting.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=patience),
        )
        count, last, changed = 0, b"", time.monotonic()
        while not ended.wait(period if count else 0):
            count += 1
            store.set(mine, str(count))
            now = store.get(theirs) if store.check([theirs]) else b""
            if now != last:
                last, changed = now, time.monotonic()
            if last != _DONE and time.monotonic() - changed > patience:
                _leave(f"rank {rank}: stopped, because rank {following} has given no sign of life for {patience:.0f} s")
        store.set(mine, _DONE.decode())
    except (RuntimeError, OSError) as error:
        if not ended.is_set():
            reason = str(error).partition("\n")[0]
            _leave(f"rank {rank}: stopped, because the process that keeps the others together is gone ({reason})")


def _leave(message: str) -> None:
    print(f"torchtrain: {message}", file=sys.stderr, flush=True)
    os._exit(1)
