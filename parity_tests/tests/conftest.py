"""What the tests of this folder share: a compiler that is quick rather than clever, and dumps."""

import pytest

from parity_tests.tests.dumps import sides  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(quickly_compiled: None) -> None:
    """That XLA's optimiser keeps every rounding is tested with all of it switched on, in jaxref/tests/test_model.py."""
