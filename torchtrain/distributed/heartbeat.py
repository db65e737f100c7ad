"""Signs of life between the processes of a run: a collective alone would wait two hours for a lost process.

A thread of every rank writes a growing number into torchrun's store and watches that of the next rank. The first rank
that fails, or finds the next one lost, writes a fault that all ranks read within one period, and prints it alone.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from anchorline.errors import UserError, print
from torchtrain.distributed.signals import ignore_signals
from torchtrain.errors import OtherRankFailed, RankLost, Terminated

# Seconds between two signs of life, and without one until a rank counts as lost. torchrun kills the processes of a node
# 30 s after one of them ended; the message must come before.
PERIOD, PATIENCE = 2.0, 20.0
GRACE = 5.0  # seconds in which a failed rank prints its message, before the other ranks exit and torchrun stops all
_DONE = b"done"


@contextmanager
def heartbeat(rank: int, size: int) -> Iterator[None]:
    """Send signs of life from this rank, and watch the next rank, while the block runs.

    A rank that finds the next one lost prints a line and exits with code 1. A rank that another rank's fault stops
    exits in silence. A rank that ends by an exception reports it to the others first. Raises OtherRankFailed in place
    of `RankLost`, and Terminated without its message, where another rank prints the reason.
    """
    if size == 1:
        yield
        return
    thread = _HeartbeatThread(rank, size)
    thread.start()
    try:
        yield
    except BaseException as error:
        agreed = isinstance(error, Terminated) and error.agreed
        with ignore_signals():
            thread.stop(None if agreed else f"{rank} {_exit_code(error)}", wait=True)
        if thread.other_code is not None and not agreed:
            if isinstance(error, Terminated):
                raise Terminated("", error.code) from None
            if isinstance(error, RankLost):
                raise OtherRankFailed("another rank prints the reason", thread.other_code) from None
        raise
    thread.stop(None)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Terminated):
        return error.code
    return 2 if isinstance(error, UserError) else 1


class _HeartbeatThread(threading.Thread):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.size = rank, size
        self.other_code: int | None = None  # exit code of the rank whose fault came first, if it is another rank
        self._stopped = threading.Event()
        self._answered = time.monotonic()  # when the store last answered
        self._fault: str | None = None
        self._wait = False
        # The store outlives a restart by torchrun: each start has its own keys.
        self._prefix = f"anchorline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._fault_key = f"{self._prefix}/fault"

    def stop(self, fault: str | None, wait: bool = False) -> None:
        """Stop the thread, report a fault ("RANK EXIT-CODE") if there is one, and `wait` until the others read it."""
        self._fault, self._wait = fault, wait
        self._stopped.set()
        self.join(timeout=PATIENCE)

    def run(self) -> None:
        threading.Thread(target=self._watch_store, name="heartbeat of the store", daemon=True).start()
        try:
            # The process group's own connection may be blocked.
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=PATIENCE))
            self._watch_next(store)
            if self._fault is not None:
                self._report(store, self._fault)
            store.set(self._key(self.rank), _DONE.decode())
            if self._wait:
                self._wait_for_others(store)
        except (RuntimeError, OSError) as error:
            # At the end of a run the store's process may exit a moment before this one.
            if not self._stopped.wait(PERIOD):
                self._exit(f"stopped, because torchrun's store is gone ({str(error).partition(chr(10))[0]})")

    def _watch_next(self, store: dist.TCPStore) -> None:
        following = (self.rank + 1) % self.size
        count, last, changed = 0, b"", time.monotonic()
        while not self._stopped.wait(PERIOD if count else 0):
            count += 1
            self._answered = time.monotonic()
            store.set(self._key(self.rank), str(count))
            if store.check([self._fault_key]):
                self._exit_for_other(store)
                return
            now = store.get(self._key(following)) if store.check([self._key(following)]) else b""
            if now != last:
                last, changed = now, time.monotonic()
            if last != _DONE and time.monotonic() - changed > PATIENCE:
                if self._report(store, f"{following} 1"):
                    self._exit(f"stopped, because rank {following} has given no sign of life for {PATIENCE:.0f} s")
                self._exit_for_other(store)
                return

    def _watch_store(self) -> None:
        """Exit when the store's machine is gone: a request to it then gets neither an answer nor an error."""
        while not self._stopped.wait(PERIOD):
            if time.monotonic() - self._answered > PATIENCE + 2 * PERIOD + GRACE:
                self._exit("stopped, because torchrun's store is gone (no answer)")

    def _report(self, store: dist.TCPStore, fault: str) -> bool:
        """Report a fault to all ranks unless another was reported before; return whether this one is the first."""
        first = store.add(f"{self._fault_key}/count", 1) == 1
        if first:
            store.set(self._fault_key, fault)
        else:
            self._read_fault(store)
        return first

    def _read_fault(self, store: dist.TCPStore) -> int:
        self.other_code = int(store.get(self._fault_key).split()[1])
        return self.other_code

    def _exit_for_other(self, store: dist.TCPStore) -> None:
        """Stop watching after another rank's fault; exit in silence if the program has not ended after `GRACE`."""
        code = self._read_fault(store)
        store.set(self._key(self.rank), _DONE.decode())
        if not self._stopped.wait(GRACE):
            os._exit(code)

    def _wait_for_others(self, store: dist.TCPStore) -> None:
        """Wait until the others know of the fault: they would take the connections that this process closes for it."""
        until = time.monotonic() + 2 * PERIOD
        others = [self._key(rank) for rank in range(self.size) if rank != self.rank]
        while time.monotonic() < until:
            if store.check(others) and all(store.get(key) == _DONE for key in others):
                return
            time.sleep(PERIOD / 20)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"

    def _exit(self, message: str) -> None:
        print(f"torchtrain: rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(1)
