"""A small, seeded part of benchmarks/soak.sh: killed and stopped at counted system calls, every run ends with the same bits."""

import pytest

from torchtrain.tests import kills
from torchtrain.tests.kills import Killer


@pytest.mark.skipif(not kills.CAN, reason="needs strace")
def test_runs_killed_at_counted_system_calls_end_the_same(place):
    killer = Killer(place, seed=0)
    runs = [killer.run(number, per_run=4) for number in (2, 5)]
    assert [run.fault for run in runs] == [None, None]
    assert sum(run.kills for run in runs) >= 2, "the calls that are drawn are made"
