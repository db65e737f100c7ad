"""Threads of the host: an optimizer there gets a process's share of the cores, and nothing else is touched."""

import os

import pytest
import torch

from torchtrain.config import DistributedConfig
from torchtrain.distributed.threads import share_cores

GPU = torch.device("cuda", 0)
OFFLOADED = DistributedConfig(zero_stage=2, offload="optimizer")


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "processes", "threads"), [(64, 8, 8), (64, 1, 64), (6, 8, 1), (9, 2, 4)])
def test_an_offloaded_optimizer_gets_its_share_and_it_is_said(monkeypatch, cores, processes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    torch.set_num_threads(3)  # torchrun says 1
    said = share_cores(OFFLOADED, GPU)
    assert torch.get_num_threads() == threads
    assert said == (f"{threads} for the optimizer in host memory, instead of 3: {cores} cores, {processes} processes")
    assert share_cores(OFFLOADED, GPU) is None, "it is said once"


@pytest.mark.parametrize(
    ("distributed", "device"), [(DistributedConfig(zero_stage=2), GPU), (OFFLOADED, torch.device("cpu"))]
)
def test_elsewhere_threads_stay(monkeypatch, distributed, device):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    torch.set_num_threads(3)
    assert share_cores(distributed, device) is None
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 1, 2), (5, 2, 2), (64, 1, 3)])
def test_on_a_cpu_torch_takes_no_more_than_the_process_may_use(monkeypatch, cores, processes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    torch.set_num_threads(3)
    said = share_cores(DistributedConfig(), torch.device("cpu"))
    assert torch.get_num_threads() == threads
    assert (said is None) == (threads == 3)
