"""The launches of a step, counted on shapes (`benchmarks.launches`)."""

import pytest
import torch

from benchmarks.launches import _launches_of, count
from torchtrain.attention.hf import register

MOST = {"ours_full": 1.05, "ours_anchor": 1.15}  # of transformers' launches


def test_a_list_of_tensors_is_cut_into_launches_as_cuda_cuts_it():
    """By its 320 blocks of 65,536 elements and by how many tensors a launch takes."""

    def launches(*sizes):
        x = [torch.empty(n, device="meta") for n in sizes]
        return _launches_of(torch.ops.aten._foreach_add_.Scalar, (x, 1))

    found = launches(*[1] * 110), launches(*[1] * 111), launches(320 * 65_536), launches(320 * 65_536 + 1)
    assert found == (1, 2, 1, 2)
    assert launches(300 * 65_536, 300 * 65_536) == 2


@pytest.mark.parametrize("loop", MOST)
def test_a_layer_launches_hardly_more_than_transformers(loop):
    register()
    ours, its = (
        count(name, 256, layers=3)["launches"] - count(name, 256, layers=2)["launches"]
        for name in (loop, "transformers")
    )
    assert ours <= MOST[loop] * its
