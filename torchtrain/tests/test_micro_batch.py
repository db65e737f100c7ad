"""Micro-batches are made ahead of their steps, in a thread, and are the same."""

import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from torchtrain.distributed import gradient_sums
from torchtrain.distributed.gradient_sums import GradientSums
from torchtrain.training.micro_batch import make_ahead

CPU = torch.device("cpu")


def test_the_next_is_made_while_one_is_used():
    began = {number: threading.Event() for number in range(4)}
    threads = set()

    def make(number: int) -> int:
        threads.add(threading.current_thread())
        began[number].set()
        return 10 * number

    for place, made in enumerate(make_ahead(make, range(4), CPU)):
        assert made == 10 * place
        if place < 3:
            assert began[place + 1].wait(timeout=300), "it would only begin when it is asked for"
        assert not any(began[number].is_set() for number in range(place + 2, 4)), "one ahead, no more: they take memory"
    assert threads != {threading.main_thread()}
    assert not any(thread.is_alive() for thread in threads)


def test_a_fault_comes_where_its_batch_would_have_come():
    def make(number: int) -> int:
        if number == 2:
            raise OSError("the disk is gone")
        return number

    ahead = make_ahead(make, range(5), CPU)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


def test_who_stops_early_leaves_no_thread():
    threads = []

    def make(number: int) -> int:
        threads.append(threading.current_thread())
        return number

    ahead = make_ahead(make, range(100), CPU)
    assert next(ahead) == 0
    ahead.close()
    assert not any(thread.is_alive() for thread in threads)
    assert len(threads) <= 2


# --- gradients are sent as they come ----------------------------------------------------------------------------------


SIZES = (3, 50, 2, 4, 1)  # of which 50 is large


class Wire:
    """What is sent, and a second rank that has the same."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, async_op: bool) -> "Wire":
        assert async_op
        self.sent.append(tensor.numel())
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        pass


@pytest.fixture
def wire(monkeypatch):
    monkeypatch.setattr(gradient_sums, "SMALL", 6)
    wire = Wire()
    with patch.object(dist, "all_reduce", wire.all_reduce):
        yield wire


def make(*dtypes):
    return [torch.zeros(n, dtype=dtype) for n, dtype in zip(SIZES, dtypes or [torch.float32] * 5, strict=True)]


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (0, 1, 2, 3, 4), (2, 4, 0, 3, 1)])
def test_the_order_is_one_whatever_comes_first(wire, order):
    owners = make()
    sums = GradientSums(owners)
    sums.begin()
    for number in order:
        owners[number].grad = torch.full_like(owners[number], float(number))
        sums.note(owners[number])
    sums.finish()
    assert wire.sent == [1 + 4, 50, 2 + 3], "the last first; what is small together, up to SMALL"
    for number, owner in enumerate(owners):
        assert owner.grad.tolist() == [2.0 * number] * SIZES[number]


def test_what_is_whole_is_sent_before_the_rest_comes(wire):
    owners = make()
    sums = GradientSums(owners)
    sums.begin()
    seen = []
    for number in (4, 1, 3, 2, 0):
        owners[number].grad = torch.ones_like(owners[number])
        sums.note(owners[number])
        seen.append(list(wire.sent))
    assert seen == [[], [], [5, 50], [5, 50], [5, 50, 5]]
    sums.finish()
    assert wire.sent == [5, 50, 5]
