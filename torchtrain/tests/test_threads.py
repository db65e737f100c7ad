"""Threads of the host: an optimizer there gets a process's share of the cores, and nothing else is touched."""

import os

import pytest
import torch

from torchtrain.config import DistributedConfig
from torchtrain.distributed.threads import share_cores
from torchtrain.training.determinism import deterministic

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


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 1, 2), (5, 2, 2), (64, 1, 3)])
def test_on_a_cpu_torch_takes_no_more_than_the_process_may_use(monkeypatch, cores, processes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    torch.set_num_threads(3)
    said = share_cores(DistributedConfig(), torch.device("cpu"))
    assert torch.get_num_threads() == threads
    assert (said is None) == (threads == 3)


# --- train.deterministic ----------------------------------------------------------------------------------------------


def test_the_switch_is_on_for_as_long_as_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # which torch's FlashAttention takes for no
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ZeroDivisionError), deterministic(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_the_program_has_chosen_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(True):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        with deterministic(False):
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
