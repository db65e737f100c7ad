"""The device of shapes counts what is alive, refuses what a GPU refuses, and sees every wait."""

import pytest
import torch

from torchtrain.tests.shapes_only.device import DEVICE, ShapesOnly


def test_blocks_of_memory_count_while_they_live():
    with ShapesOnly() as watch:
        a = torch.zeros(100, device=DEVICE)
        b = a.double()
        view = a[10:].view(9, 10)
        torch.zeros(1000)  # on the host
        assert (watch.now, watch.peak) == (1200, 1200)
        del b
        c = torch.empty(50, device=DEVICE)
        assert (watch.now, watch.peak) == (600, 1200)
        assert sorted(held.size for held in watch.at_peak()) == [400, 800]
        watch.reset()
        assert watch.peak == 600
        del a
        assert watch.now == 600, "the view keeps it"
        del view, c
        assert (watch.now, watch.peak) == (0, 600)
        assert sorted(held.size for held in watch.at_peak()) == [200, 400]


WAITS = {
    "item": (lambda x, y: x.sum().item(), "local_scalar_dense"),
    "float": (lambda x, y: float(x.sum()), "local_scalar_dense"),
    "bool": (lambda x, y: bool((x > 0).all()), "local_scalar_dense"),
    "cpu": (lambda x, y: x.cpu(), "copy to the host"),
    "to": (lambda x, y: x.to("cpu", non_blocking=True), "copy to the host"),
    "tolist": (lambda x, y: x.tolist(), "copy to the host"),
    "copy_": (lambda x, y: torch.empty(4).copy_(x), "copy to the host"),
    "to the device": (lambda x, y: torch.zeros(3).to(DEVICE), "copy to the device"),
    "copy_ to the device": (lambda x, y: x.copy_(torch.zeros(4)), "copy to the device"),
    "boolean index": (lambda x, y: x[y], "boolean index"),
    "boolean index, written to": (lambda x, y: x.__setitem__(y, 1.0), "boolean index"),
    "nonzero": (lambda x, y: y.nonzero(), "nonzero"),
    "equal": (lambda x, y: torch.equal(x, x.clone()), "equal"),
}


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_is_seen(name):
    ask, what = WAITS[name]
    with ShapesOnly() as watch:
        x = torch.zeros(4, device=DEVICE)
        ask(x, x > 0)
        assert [(kind, count) for (kind, _), count in watch.waits.items()] == [(what, 1)]


NO_WAITS = {
    "index": lambda x: x[torch.zeros(3, dtype=torch.long, device=DEVICE)],
    "index_select": lambda x: x.index_select(0, torch.zeros(3, dtype=torch.long, device=DEVICE)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "to the device": lambda x: torch.zeros(3).to(DEVICE, non_blocking=True),
    "copy_ to the device": lambda x: x.copy_(torch.zeros(4), non_blocking=True),
    "a number": lambda x: x * 3.0 + torch.tensor(1.0),
    "sum": lambda x: x.double().sum() + x.max(),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_does_not_wait_does_not_count(name):
    with ShapesOnly() as watch:
        NO_WAITS[name](torch.zeros(4, device=DEVICE))
        assert not watch.waits


MIXED = {
    "sum": lambda x, y: x + y,
    "matmul": lambda x, y: x @ y,
    "cat": lambda x, y: torch.cat([x, y]),
    "in place": lambda x, y: y.add_(x),
    "index_select": lambda x, y: x.index_select(0, torch.zeros(3, dtype=torch.long)),
}


@pytest.mark.parametrize("name", MIXED)
def test_operands_on_two_devices_are_refused(name):
    with ShapesOnly(), pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.zeros(4, device=DEVICE), torch.zeros(4))
