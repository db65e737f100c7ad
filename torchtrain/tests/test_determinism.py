"""`train.deterministic` is torch's own switch, for as long as a run lasts. What it does is tried in `tests/cuda`."""

import os

import pytest
import torch

from torchtrain.training.determinism import deterministic


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
