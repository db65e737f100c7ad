"""Mistakes of RoPE, in float64: wrong positions, wrong frequencies, wrong pairs.

Legend: B batch · T tokens of a row · H heads · D head_dim · C = D / 2 rotated pairs.
"""

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxref.frequencies import inverse_frequencies
from jaxref.rope_spec import RopeSpec
from parity_tests.mistakes import Mistake

SHIFTS = (0, *(sign * by for by in range(1, 9) for sign in (1, -1)))


def rotation_mistakes(
    x_BTHD: np.ndarray, positions_BT: np.ndarray, document_ids_BT: np.ndarray, rope: RopeSpec, array_BTHD: np.ndarray
) -> Iterator[Mistake]:
    """`out` [B, T, H, D] of wrong rotations of x.

    x_BTHD: queries or keys before RoPE.
    positions_BT, document_ids_BT: the right ones.
    rope: the right settings.
    array_BTHD: what the candidate gives: each token's position is taken for off by what brings it nearest.
    """
    x, positions = x_BTHD, positions_BT
    seq_len = int(positions.max()) + 1
    right, scaling = inverse_frequencies(rope, seq_len)

    def turned(words: str, frequencies_C: np.ndarray, at: np.ndarray = positions, scaling: float = scaling) -> Mistake:
        return words, lambda: {"out": rotate(x, at, frequencies_C, scaling)}

    for words, moved in _wrong_positions(positions, document_ids_BT):
        if not np.array_equal(moved, positions):
            yield turned(words, right, moved)
    shifted = np.stack([rotate(x, positions + shift, right, scaling) for shift in SHIFTS])
    shifts_BT = np.asarray(SHIFTS)[np.square(shifted - array_BTHD).sum((-2, -1)).argmin(0)]
    if words := describe_shifts(shifts_BT):
        yield turned(words, right, positions + shifts_BT)
    yield turned("the rotation goes in the other direction", right, -positions)
    yield (
        "neighbours are rotated as pairs, not the two halves of the head",
        lambda: {"out": _pair_neighbours(x, positions, right, scaling)},
    )
    angle_BTC = _round(positions[..., None] * right)
    yield "angles are rounded to bfloat16", lambda: {"out": _turn(x, angle_BTC, scaling)}
    yield turned("inverse frequencies are rounded to bfloat16", _round(right))
    yield turned("the attention factor is missing", right, scaling=1.0)
    D, R = x.shape[3], rope.head_dim
    plain = RopeSpec(head_dim=R, theta=rope.theta)
    yield turned(f"RoPE is not scaled: {rope.rope_type} is ignored", inverse_frequencies(plain)[0])
    yield turned("frequencies are divided by the factor twice", right / (rope.factor or 1.0))
    if R < D:
        yield turned("the whole head is rotated, not a part", inverse_frequencies(RopeSpec(D, rope.theta))[0])
        last = np.roll(x, R, axis=-1)
        yield (
            "the last dimensions of a head are rotated, not the first",
            lambda: {"out": np.roll(rotate(last, positions, right, scaling), -R, axis=-1)},
        )
        of_head = inverse_frequencies(RopeSpec(D, rope.theta))[0][: R // 2]
        yield turned("the frequencies are those of a whole head", of_head)
        for more in range(2, min(8, D - R) + 1, 2):
            yield turned(
                f"{R + more} dimensions of a head are rotated, not {R}",
                inverse_frequencies(replace(plain, head_dim=R + more))[0],
            )
    yield turned("half of the head is not rotated", np.where(np.arange(len(right)) < len(right) // 2, right, 0.0))
    for factor in (10.0, 0.1, 50.0, 100.0):
        other = replace(rope, theta=rope.theta * factor) if rope.theta * factor > 1 else rope
        yield turned(f"theta is off by a factor of {factor:g}", inverse_frequencies(other, seq_len)[0])


def _wrong_positions(positions: np.ndarray, documents: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    index = np.broadcast_to(np.arange(positions.shape[1]), positions.shape)
    begins = np.concatenate([np.ones((len(documents), 1), bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    yield "position_ids are ignored: tokens take their index in the row", index
    yield "positions restart in every document", index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    yield "every row takes the positions of the first", np.broadcast_to(positions[:1], positions.shape)
    yield "positions are rounded to bfloat16", positions.astype(ml_dtypes.bfloat16).astype(np.float64)
    yield "nothing is rotated", np.zeros_like(positions)
    for length in 2 ** np.arange(9, 18):
        yield f"positions are clamped to {length - 1}", positions.clip(max=length - 1)


def describe_shifts(shifts_BT: np.ndarray) -> str | None:
    """Say which tokens' positions are off, and by how much; None where none is."""
    moved = np.flatnonzero(shifts_BT.any(0))
    if not len(moved):
        return None
    sizes = sorted({int(shift) for shift in shifts_BT[shifts_BT != 0]}, key=abs)
    by = f"by {sizes[0]:+d}" if len(sizes) == 1 else f"by up to {sizes[-1]:+d}"
    if len(moved) == 1:
        return f"the position of token {moved[0]} is off {by}"
    return f"positions are off {by} from token {moved[0]} on"


def rotate(x_BTHD: np.ndarray, positions_BT: np.ndarray, frequencies_C: np.ndarray, scaling: float) -> np.ndarray:
    """Rotate the two halves of each head, [B, T, H, D], or of its first 2 C dimensions."""
    return _turn(x_BTHD, np.asarray(positions_BT, np.float64)[..., None] * frequencies_C, scaling)


def _turn(x_BTHD: np.ndarray, angle_BTC: np.ndarray, scaling: float) -> np.ndarray:
    C = angle_BTC.shape[-1]
    a, b, rest = np.split(x_BTHD, (C, 2 * C), axis=-1)
    cos, sin = (scaling * table(angle_BTC)[:, :, None] for table in (np.cos, np.sin))
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _pair_neighbours(x_BTHD: np.ndarray, positions_BT: np.ndarray, right_C: np.ndarray, scaling: float) -> np.ndarray:
    part, rest = np.split(x_BTHD, (2 * len(right_C),), axis=-1)
    halves = np.concatenate([part[..., ::2], part[..., 1::2]], axis=-1)
    turned = rotate(halves, positions_BT, right_C, scaling)
    return np.concatenate([np.stack(np.split(turned, 2, axis=-1), axis=-1).reshape(part.shape), rest], axis=-1)


def _round(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
