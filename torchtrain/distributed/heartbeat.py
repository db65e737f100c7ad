"""Whether the other processes still live: a collective alone would wait for them for `world.PATIENCE`,
which are as many as an export of a large model takes, or for ever.

Every rank writes a number that grows into the store that torchrun keeps, and watches that of the next rank: so each is
watched, and the store is asked as often however many there are. Who finds one lost, or ends by a fault of its own,
writes that under a name that all look at; so it is known everywhere after one more look, on whichever node it happened,
and is told by one rank alone. A thread does it. It goes on while the program waits in a collective.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from anchorline.command import INTERRUPTED
from anchorline.errors import UserError
from torchtrain.errors import TERMINATED, OtherRankFailed, RankLost, Terminated

# Seconds. torchrun kills what is left of a node 30 s after one of its processes ended: a lost rank is told of before.
PERIOD, PATIENCE = 2.0, 20.0
# What a rank that fails has for its message before the others leave, and torchrun stops what is left.
GRACE = 5.0
_DONE = b"done"


@contextmanager
def heartbeat(rank: int, size: int, period: float | None = None, patience: float | None = None) -> Iterator[None]:
    """Show that this rank lives, and watch the next one, for as long as the block lasts.

    A rank whose next one is lost prints a line and leaves with exit code 1. One that another rank's end stops leaves in
    silence. One that ends by an exception lets the others know of it first.

    Args:
        rank: this one's.
        size: how many there are; alone there is nothing to do.
        period: seconds between two signs of life; default: `PERIOD`.
        patience: seconds without one, by a clock that nobody sets, after which the next rank counts as lost; default:
            `PATIENCE`.

    Raises:
        OtherRankFailed: in place of `RankLost`, where another rank has said what happened.
        Terminated: as the block raised it, without its message where another rank says why all end.
    """
    if size == 1:
        yield
        return
    watch = _Watch(rank, size, period or PERIOD, patience or PATIENCE)
    watch.start()
    try:
        yield
    except BaseException as error:
        terminated = isinstance(error, Terminated)
        agreed = isinstance(error, Terminated) and error.agreed
        with _deaf():
            code = 2 if isinstance(error, UserError) else 1
            code = TERMINATED if terminated else INTERRUPTED if isinstance(error, KeyboardInterrupt) else code
            watch.end(None if agreed else f"{rank} {code}", wait=True)
        if terminated and not agreed and watch.code_of_another is not None:
            raise Terminated("") from None
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches every rank: the first one says so
            if watch.code_of_another is not None:
                raise OtherRankFailed("another rank says why", watch.code_of_another) from None
            raise KeyboardInterrupt(f"rank {rank}: interrupted") from None
        if isinstance(error, RankLost) and watch.code_of_another is not None:
            raise OtherRankFailed("another rank says why", watch.code_of_another) from None
        raise
    watch.end(None)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to those left when one has ended: this one knows better why it stops."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Watch(threading.Thread):
    def __init__(self, rank: int, size: int, period: float, patience: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.size, self.period, self.patience = rank, size, period, patience
        self.code_of_another: int | None = None  # known once another rank's fault is
        self._ended = threading.Event()
        self._answered = time.monotonic()
        self._fault: str | None = None
        self._waits = False
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart by torchrun
        self._place = f"anchorline/{start}"

    def end(self, fault: str | None, wait: bool = False) -> None:
        """Stop watching: the block has ended, by a fault ("RANK EXIT-CODE") or not; `wait` until the others know."""
        self._fault, self._waits = fault, wait
        self._ended.set()
        self.join(timeout=self.patience)

    def run(self) -> None:
        threading.Thread(target=self._watch_store, name="heartbeat of the store", daemon=True).start()
        try:
            # A connection of its own: the one of the process group may be waiting.
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=self.patience))
            self._watch(store)
            if self._fault is not None:
                self._tell_fault(store, self._fault)
            store.set(self._sign(self.rank), _DONE.decode())
            if self._waits:
                self._wait_for_others(store)
        except (RuntimeError, OSError) as error:
            # It may be the end: whoever keeps the store leaves an instant before the others.
            if not self._ended.wait(self.period):
                reason = str(error).partition("\n")[0]
                self._leave(f"stopped, because the process that keeps the others together is gone ({reason})")

    def _watch(self, store: dist.TCPStore) -> None:
        following = (self.rank + 1) % self.size
        count, last, changed = 0, b"", time.monotonic()
        while not self._ended.wait(self.period if count else 0):
            count += 1
            self._answered = time.monotonic()
            store.set(self._sign(self.rank), str(count))
            if store.check([self._faulty]):
                self._leave_for_another(store)
                return
            now = store.get(self._sign(following)) if store.check([self._sign(following)]) else b""
            if now != last:
                last, changed = now, time.monotonic()
            if last != _DONE and time.monotonic() - changed > self.patience:
                if self._tell_fault(store, f"{following} 1"):
                    self._leave(
                        f"stopped, because rank {following} has given no sign of life for {self.patience:.0f} s"
                    )
                self._leave_for_another(store)
                return

    def _watch_store(self) -> None:
        """Where the store's machine is gone, a question to it gets no answer and no error."""
        while not self._ended.wait(self.period):
            if time.monotonic() - self._answered > self.patience + 2 * self.period + GRACE:
                self._leave("stopped, because the process that keeps the others together is gone (no answer)")

    def _tell_fault(self, store: dist.TCPStore, fault: str) -> bool:
        """Let all know of a fault, unless there is one already; return whether this rank was the first."""
        first = store.add(f"{self._faulty}/tellers", 1) == 1
        if first:
            store.set(self._faulty, fault)
        else:
            self.code_of_another = self._code(store)
        return first

    def _code(self, store: dist.TCPStore) -> int:
        return int(store.get(self._faulty).split()[1])

    def _leave_for_another(self, store: dist.TCPStore) -> None:
        """Another rank failed, and says so: leave in silence, at once if the program sees it, else after `GRACE`."""
        self.code_of_another = code = self._code(store)
        store.set(self._sign(self.rank), _DONE.decode())
        if not self._ended.wait(GRACE):
            os._exit(code)

    def _wait_for_others(self, store: dist.TCPStore) -> None:
        """Give the others the time to know: what this process closes when it ends would look to them like its loss."""
        until = time.monotonic() + 2 * self.period
        others = [self._sign(rank) for rank in range(self.size) if rank != self.rank]
        while time.monotonic() < until:
            if store.check(others) and all(store.get(sign) == _DONE for sign in others):
                return
            time.sleep(self.period / 20)

    @property
    def _faulty(self) -> str:
        return f"{self._place}/fault"

    def _sign(self, rank: int) -> str:
        return f"{self._place}/beat/{rank}"

    def _leave(self, message: str) -> None:
        print(f"torchtrain: rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(1)
