"""Signs of life between ranks: here each rank is a thread, and leaving is noted instead of done."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from anchorline.errors import UserError
from torchtrain.distributed import heartbeat as module
from torchtrain.distributed.heartbeat import heartbeat
from torchtrain.errors import OtherRankFailed, RankLost

DEFAULTS = module.PERIOD + module.PATIENCE
PERIOD, PATIENCE = 0.05, 1.0


class Ranks:
    """Runs a function as each rank; `left` has the exit code and `told` the line of those that the heartbeat ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(self.store.port))
        for name, seconds in {"GRACE": 0.3, "PERIOD": PERIOD, "PATIENCE": PATIENCE}.items():
            monkeypatch.setattr(module, name, seconds)
        self.left: dict[int, int] = {}
        self.told: list[str] = []
        self.raised: dict[int, BaseException] = {}
        self.ended = threading.Event()
        monkeypatch.setattr(module.os, "_exit", self._exit)
        real = module._HeartbeatThread.run

        def run(watch) -> None:
            with suppress(SystemExit):
                real(watch)

        monkeypatch.setattr(module._HeartbeatThread, "run", run)
        monkeypatch.setattr(module, "print", lambda line, **_: self.told.append(line), raising=False)

    def _exit(self, code: int) -> None:
        rank = threading.current_thread().rank  # type: ignore[attr-defined]
        self.left[rank] = code
        raise SystemExit  # ends the thread alone

    def run(self, size: int, work, lost: int | None = None) -> None:
        def one(rank: int) -> None:
            try:
                with heartbeat(rank, size):
                    work(rank)
            except BaseException as error:
                self.raised[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size) if rank != lost]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 20
        while time.monotonic() < until and len(self.left) + sum(not t.is_alive() for t in threads) < len(threads):
            time.sleep(PERIOD)
        self.ended.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_lost_rank_is_known_to_all_at_once_and_told_by_one(ranks, monkeypatch):
    """Not from neighbour to neighbour: with five ranks that would take four times as long."""
    times = {}

    def note(code):
        times[threading.current_thread().rank] = time.monotonic()  # type: ignore[attr-defined]
        ranks._exit(code)

    monkeypatch.setattr(module.os, "_exit", note)
    ranks.run(5, lambda rank: ranks.ended.wait(), lost=4)
    assert ranks.left == {0: 1, 1: 1, 2: 1, 3: 1}
    assert ranks.told == ["torchtrain: rank 3: stopped, because rank 4 has given no sign of life for 1 s"]
    assert max(times.values()) - min(times.values()) < 2 * PATIENCE
    assert DEFAULTS < 30, "the time that torchrun leaves the others when one has ended"


@pytest.mark.parametrize(("error", "code"), [(MemoryError("CUDA"), 1), (UserError("its disk is full"), 2)])
def test_a_rank_that_fails_is_no_rank_that_is_done(ranks, error, code):
    """The others wait for it in a collective; they leave in silence, for it speaks itself."""

    def work(rank):
        if rank == 2:
            raise error
        ranks.ended.wait()

    ranks.run(3, work)
    assert ranks.raised == {2: error}
    assert ranks.left == {0: code, 1: code}
    assert ranks.told == []


def test_a_loss_that_all_see_is_told_by_one(ranks):
    """A broken connection reaches many at once."""

    def work(rank):
        raise RankLost(f"rank {rank}: another is gone")

    ranks.run(4, work)
    assert sorted(type(error) is RankLost for error in ranks.raised.values()) == [False] * 3 + [True]
    assert sum(type(error) is OtherRankFailed for error in ranks.raised.values()) == 3
    assert ranks.left == {}


def test_ranks_that_end_well_leave_together_without_a_word(ranks):
    ranks.run(3, lambda rank: time.sleep(PERIOD * rank))
    assert (ranks.left, ranks.told, ranks.raised) == ({}, [], {})


def test_a_store_that_no_longer_answers(ranks, monkeypatch):
    """Its machine lost power: no connection breaks, and a question waits for ever."""

    class Silent:
        def __init__(self, *_, **__):
            pass

        def set(self, *_):
            pass

        def check(self, *_):
            ranks.ended.wait()
            return False

        def add(self, *_):
            return 1

        def get(self, *_):
            return b"0 1"

    monkeypatch.setattr(module.dist, "TCPStore", Silent)
    left = threading.Event()
    monkeypatch.setattr(module.os, "_exit", lambda code: left.set())
    thread = threading.Thread(target=lambda: ranks.run(2, lambda rank: ranks.ended.wait()), daemon=True)
    thread.start()
    assert left.wait(15)
    ranks.ended.set()
    thread.join()
    assert any(line.endswith("is gone (no answer)") for line in ranks.told)
