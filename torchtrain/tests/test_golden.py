"""A refactoring moves no bit of a loss. What is meant to move one writes the file anew and says so."""

import json
import platform

import pytest
import torch

from torchtrain.tests.golden import FILE, measure

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
HERE = (torch.__version__.partition("+")[0], platform.machine())


@pytest.mark.skipif(
    (GOLDEN["torch"], GOLDEN["machine"]) != HERE,
    reason=f"golden losses are of {GOLDEN['torch']} on {GOLDEN['machine']}",
)
def test_losses_are_the_same_bits():
    found = measure()["runs"]
    assert found.keys() == GOLDEN["runs"].keys()
    for name, events in found.items():
        assert events == GOLDEN["runs"][name], name
