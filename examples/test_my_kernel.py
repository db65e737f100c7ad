"""Test your own kernel by the gate: replace the import, run pytest."""

import pytest

from examples.check_sdpa import attend as my_kernel
from parity_tests.pytest_helper import attention_cases


@pytest.mark.parametrize("case", attention_cases(my_kernel, dtypes=["float32"], heads=[(4, 2)]))
def test_my_kernel(case):
    """Every layout: output and gradients within their allowance, nothing invisible has an effect."""
    case.raise_if_different()
