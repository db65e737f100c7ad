"""What the tests of this folder share: a compiler that is quick rather than clever, and an oracle that forgets."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(quickly_compiled: None) -> None:
    """That XLA's optimiser keeps every rounding is tested with all of it switched on, in jaxref/tests/test_model.py."""


@pytest.fixture(scope="module", autouse=True)
def _forget_truth() -> Iterator[None]:
    """The gate remembers the oracle's arrays of every case, and a process of the suite runs many a module."""
    yield
    if (truth := sys.modules.get("parity_tests.gate.truth")) is not None:
        truth.forget()
