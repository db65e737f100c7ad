"""Micro-batches are made ahead of their steps, in a thread, and are the same."""

import threading

import pytest
import torch

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
            assert began[place + 1].wait(timeout=60), "it would only begin when it is asked for"
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


def test_nothing_to_make():
    assert list(make_ahead(lambda number: number, [], CPU)) == []
