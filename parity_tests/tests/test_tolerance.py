"""The judge judged: what must pass passes, what must not does not."""

import numpy as np
import pytest

from parity_tests.tolerance import UNIT_ROUNDOFF, judge


def test_twice_the_reference_plus_one_rounding_is_the_border():
    truth, reference = np.array([4.0, 4.0]), np.array([4.5, 3.5])
    border = 2 * 0.5 + UNIT_ROUNDOFF["bfloat16"] * 4
    at = judge(truth + [border, -border], truth, reference, "bfloat16")
    assert at.passed
    assert at.ratio == 1
    beyond = judge(truth + [border, -border - 1e-12], truth, reference, "bfloat16")
    assert not beyond.passed
    assert beyond.worst == (1,)


def test_an_error_in_few_elements_counts_by_its_square():
    truth, reference = np.ones(100), np.ones(100)
    one_off = truth.copy()
    one_off[7] += 10 * UNIT_ROUNDOFF["bfloat16"]
    assert judge(one_off, truth, reference, "bfloat16").ratio == 1
    one_off[7] += 1e-12
    assert not judge(one_off, truth, reference, "bfloat16").passed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_stray_infinities_never_pass(bad):
    truth = np.array([1.0, 2.0])
    assert not judge([1.0, bad], truth, truth, "bfloat16").passed
    assert not judge([1.0, 2.0], [1.0, bad], [1.0, 2.0], "bfloat16").passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reference_that_broke_is_no_licence(bad):
    assert not judge([1.0, 2.0], [1.0, 2.0], [1.0, bad], "bfloat16").passed


def test_equal_infinities_are_equal():
    truth = np.array([-np.inf, 1.0])
    assert judge(truth, truth, truth, "float32").error == 0


def test_unit_roundoffs_are_those_of_the_dtypes():
    assert UNIT_ROUNDOFF["float64"] == np.finfo(np.float64).eps / 2
    assert UNIT_ROUNDOFF["float32"] == np.finfo(np.float32).eps / 2
    assert UNIT_ROUNDOFF["float16"] == np.finfo(np.float16).eps / 2
    import ml_dtypes

    assert UNIT_ROUNDOFF["bfloat16"] == float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) / 2


@pytest.mark.parametrize(
    ("arrays", "dtype", "says"),
    [
        (([1.0], [1.0, 2.0], [1.0]), "float32", "shapes differ"),
        (([], [], []), "float32", "empty"),
        (([1.0], [1.0], [1.0]), "int8", "no unit roundoff"),
    ],
)
def test_what_cannot_be_judged_is_refused(arrays, dtype, says):
    with pytest.raises(ValueError, match=says):
        judge(*arrays, dtype)
