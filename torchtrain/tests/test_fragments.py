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


def test_another_dtype_or_tensor_is_refused(tmp_path):
    wanted = [Fragment(n, 0, kinds) for n, kinds in whole(0).items()]
    path = tmp_path / "state.safetensors"
    for tensors, message in (
        ({"master:0:a": torch.zeros(15).bfloat16()}, "a tensor is BF16 of shape"),
        ({"gradient:0:a": torch.zeros(15)}, "unknown tensor"),
        ({"master:first:a": torch.zeros(15)}, "invalid literal"),
        ({"a": torch.zeros(15)}, "not enough values"),
        ({"master:0:a": torch.zeros(3, 5)}, "a tensor is F32 of shape"),
    ):
        path.write_bytes(safetensors.torch.save(tensors))
        with pytest.raises(DamageError, match=f"{path}: .*{message}"):
            fragments.read([path], wanted)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", None])
def test_what_is_no_state_file_is_refused(tmp_path, content):
    path = tmp_path / "state.safetensors"
    cut_off = safetensors.torch.save({f"{kind}:0:a": torch.zeros(15) for kind in KINDS})[:-1]
    path.write_bytes(cut_off if content is None else content)
    with pytest.raises(DamageError, match=f"{path}: is not a state file"):
        fragments.read([path], [Fragment(n, 0, kinds) for n, kinds in whole(0).items()])


def of_rank(tensors, how: str, rank: int, ranks: int) -> list[Fragment]:
    """What a rank holds: `flat` of ZeRO 1 and 2, and a share of what every rank holds; `cut` of ZeRO 3."""
    everything = [Fragment(name, 0, kinds) for name, kinds in tensors.items()]
    if how == "flat":
        return fragments.share(everything, rank, ranks)
    parts = [f.cut(f.stop * rank // ranks, f.stop * (rank + 1) // ranks) for f in everything]
    return [part for part in parts if part.start < part.stop]


@pytest.mark.parametrize("how", ["flat", "cut"])
@pytest.mark.parametrize("other", ["flat", "cut"])
@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (4, 2), (2, 3), (1, 4), (4, 1)])
def test_a_rank_opens_its_own_files_where_the_layout_is_the_same(tmp_path, monkeypatch, how, other, writers, readers):
    monkeypatch.setattr(fragments, "FILE_BYTES", 60)
    was, now = whole(0), whole(1)
    files = {rank: fragments.write(tmp_path, of_rank(was, how, rank, writers), rank) for rank in range(writers)}
    names = [name for written in files.values() for name in written]
    assert len(names) > writers
    real_open = fragments.safe_open
    for rank in range(readers):
        held, opened = of_rank(now, other, rank, readers), []
        monkeypatch.setattr(
            fragments, "safe_open", lambda path, *rest, to=opened: to.append(path.name) or real_open(path, *rest)
        )
        fragments.read([tmp_path / name for name in fragments.nearest(names, writers, rank, readers)], held)
        if (how, writers) == (other, readers):
            assert sorted(opened) == sorted(files[rank])
    monkeypatch.undo()
    for parameter, kinds in was.items():
        for kind, x in kinds.items():
            assert torch.equal(now[parameter][kind], x)
