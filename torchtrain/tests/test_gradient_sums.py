"""Gradients are sent as they come, in one order on every rank, and come back where they were."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from torchtrain.distributed import gradient_sums
from torchtrain.distributed.gradient_sums import GradientSums

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


def test_norms_of_all_layers_hold_nothing_up(wire):
    layers = 6
    owners = [torch.zeros(n) for _ in range(layers) for n in (50, 1)]  # a matrix and a norm each
    sums = GradientSums(owners)
    sums.begin()
    for come, owner in enumerate(reversed(owners), 1):
        owner.grad = torch.ones_like(owner)
        sums.note(owner)
        assert wire.sent.count(50) == come // 2, "each matrix is sent as soon as it is there"
    sums.finish()
    assert sorted(wire.sent) == [layers] + [50] * layers


def test_what_has_no_gradient_here_is_sent_as_zeros(wire):
    owners = make()
    sums = GradientSums(owners)
    sums.begin()
    owners[3].grad = torch.ones(4)
    sums.note(owners[3])
    assert wire.sent == []
    sums.finish()
    assert wire.sent == [5, 50, 5]
    assert [owner.grad.sum().item() for owner in owners] == [0, 0, 0, 8, 0]


def test_two_dtypes_are_not_sent_together(wire):
    owners = make(torch.float64, torch.float32, torch.float64, torch.float32, torch.float32)
    sums = GradientSums(owners)
    sums.begin()
    sums.finish()
    assert wire.sent == [5, 50, 5]
    assert [owner.grad.dtype for owner in owners] == [owner.dtype for owner in owners]


def test_micro_batches_before_the_last_send_nothing(wire):
    owners = make()
    sums = GradientSums(owners)
    for owner in owners:
        owner.grad = torch.ones_like(owner)
        sums.note(owner)
    assert wire.sent == []
    sums.begin()
    for owner in owners:
        sums.note(owner)
    sums.finish()
    assert all((owner.grad == 2).all() for owner in owners)
