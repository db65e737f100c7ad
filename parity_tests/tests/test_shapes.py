"""A wrong shape is refused while testing, and only there."""

import subprocess
import sys

import pytest

from anchorline.tests.shapes import check_shapes


class _Array:
    def __init__(self, *shape: int):
        self.shape, self.dtype = shape, "float32"


def test_a_letter_is_one_size():
    check_shapes("f", ["q_BTHD", "lse_BHT"], {"q_BTHD": _Array(2, 3, 4, 8), "lse_BHT": _Array(2, 4, 3)})
    with pytest.raises(TypeError, match=r"^f: lse_BHT has shape \[2, 3, 4\]; q_BTHD \[2, 3, 4, 8\], lse_BHT"):
        check_shapes("f", ["q_BTHD", "lse_BHT"], {"q_BTHD": _Array(2, 3, 4, 8), "lse_BHT": _Array(2, 3, 4)})
    with pytest.raises(TypeError, match="k_1T has shape"):
        check_shapes("f", ["k_1T"], {"k_1T": _Array(2, 3)})
    with pytest.raises(TypeError, match="q_BT has shape"):
        check_shapes("f", ["q_BT"], {"q_BT": _Array(6)})
    check_shapes("f", ["q_BT", "k_BT"], {"q_BT": None})  # left out, and not yet set


def test_the_oracle_is_held_to_its_names():
    import numpy as np

    pytest.importorskip("jax")
    from jaxref.rope import cos_sin, rotate
    from jaxref.rounding import preset

    rounding = preset("exact")
    cos_BTC, sin_BTC = cos_sin(np.arange(3)[None], np.ones(2), 1.0, rounding)
    assert rotate(np.ones((1, 3, 1, 4)), cos_BTC, sin_BTC, rounding, "q_rotated").shape == (1, 3, 1, 4)
    with pytest.raises(TypeError, match=r"rotate: cos_BTC has shape \[1, 1, 2\]; x_ATHD \[1, 3, 1, 4\]"):
        rotate(np.ones((1, 3, 1, 4)), cos_BTC[:, :1], sin_BTC[:, :1], rounding, "q_rotated")  # broadcasts in silence


def test_outside_tests_nothing_is_checked():
    code = "import jaxref.mask, torchtrain.data.rows\nassert '_check_shapes_of_names' not in vars(jaxref.mask)"
    subprocess.run([sys.executable, "-c", code], check=True)
