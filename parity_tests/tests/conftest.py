"""What the tests of this folder share: a compiler that is quick rather than clever."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(quickly_compiled: None) -> None:
    """That XLA's optimiser keeps every rounding is tested with all of it switched on, in jaxref/tests/test_model.py."""
