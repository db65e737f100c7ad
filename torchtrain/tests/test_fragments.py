"""Fragments: what any layout of ranks wrote, any other reads."""

import itertools
import tempfile
from math import prod
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtrain.checkpoint import fragments
from torchtrain.checkpoint.fragments import KINDS, Fragment
from torchtrain.checkpoint.manifest import DamageError

SHAPES = {"a": (3, 5), "b": (1,), "c": (4, 2, 2)}


def whole(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {name: {kind: torch.randn(prod(s), generator=generator) for kind in KINDS} for name, s in SHAPES.items()}


def cut(tensors, places: list[int]) -> list[list[Fragment]]:
    """Cut all parameters, end to end, at places; return what lies between two of them as one rank's."""
    everything = [Fragment(name, 0, kinds) for name, kinds in tensors.items()]
    total = sum(f.stop for f in everything)
    edges = [0, *sorted(p % (total + 1) for p in places), total]
    ranks = []
    for first, last in itertools.pairwise(edges):
        own, before = [], 0
        for f in everything:
            start, stop = max(first - before, 0), min(last - before, f.stop)
            if start < stop:
                own.append(f.cut(start, stop))
            before += f.stop
        ranks.append(own)
    return ranks


PLACES = st.lists(st.integers(0, 100), max_size=4)


@settings(max_examples=25)
@given(writers=PLACES, readers=PLACES, room=st.sampled_from([12, 40, 1 << 20]))
def test_what_any_layout_wrote_any_other_reads(writers, readers, room):
    was, now = whole(0), whole(1)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fragments, "FILE_BYTES", room)
        folder = Path(name)
        written = [list(fragments.write(folder, own, rank)) for rank, own in enumerate(cut(was, writers))]
        paths = [folder / file for names in written for file in names]
        for own in cut(now, readers):
            fragments.read(paths, own)
        for path in paths:
            assert sum(x.nbytes for x in safetensors.torch.load_file(path).values()) <= max(room, 12)
    for parameter, kinds in was.items():
        for kind, x in kinds.items():
            assert torch.equal(now[parameter][kind], x)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_shares_are_equal_and_together_whole(parts):
    everything = [Fragment(name, 0, kinds) for name, kinds in whole(0).items()]
    shares = [fragments.share(everything, part, parts) for part in range(parts)]
    sizes = [sum(f.stop - f.start for f in own) for own in shares]
    assert max(sizes) - min(sizes) <= 1
    fragments.check_whole({n: list(s) for n, s in SHAPES.items()}, [fragments.elements(own) for own in shares])
    end = {name: 0 for name in SHAPES}
    for own in shares:
        for f in own:
            assert f.start == end[f.parameter]
            end[f.parameter] = f.stop


def test_what_is_not_there_is_refused(tmp_path):
    first, second = cut(whole(0), [9])
    fragments.write(tmp_path, first, 0)
    with pytest.raises(DamageError, match="6 elements of master of a are in none of its files"):
        fragments.read(tmp_path.iterdir(), second)
    with pytest.raises(AssertionError):
        fragments.check_whole({n: list(s) for n, s in SHAPES.items()}, [fragments.elements(first)])
