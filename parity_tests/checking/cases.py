"""The cases an attention function is judged on, and what the oracle says of each.

A layout is a batch of packed rows. What a function must understand to run it (anchors, padding, several rows, ...) is
read off the rows, so a function that lacks one of these is neither judged nor passed on a layout that needs it.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Literal

import jax
import ml_dtypes
import numpy as np

from anchorline.tolerance import Verdict, judge
from jaxref.mask import ANCHOR, PADDING
from jaxref.rounding import Rounding, preset
from parity_tests.oracle import Arrays, attention_arrays

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
LIKE = ("flash", "eager")

# What a function may declare it lacks, and what that means.
FEATURES = {
    "documents": "more than one document in a row",
    "anchor": "an anchor that every document sees",
    "padding": "tokens of no document",
    "batch": "more than one row",
    "apart": "documents whose tokens are not adjacent",
    "gqa": "fewer key/value heads than query heads",
    "backward": "gradients",
    "strides": "arrays that are not contiguous",
}
# What a layer may add to the mask rule, and the names of parameters through which a function takes it.
ADDED = {
    "window": ("window", "window_size"),
    "keep_anchor": ("keep_anchor",),
    "softcap": ("softcap",),
    "sinks": ("sinks",),
}


@dataclass(frozen=True)
class Layout:
    """A batch of packed rows: document ids (0 anchor, 1.. documents, -1 padding), and what is special about them.

    scale_factor: the scale over head_dim ** -0.5.
    large: documents have logits of size: all near +100, all near -100, one key in the middle that dominates, equal
        keys, in turn.
    sizes: values are 2^17 times as large, the output's cotangent 2^-60 times; in float16, which cannot hold it, usual.
    handed: how torch arrays lie in memory: `usual`; `sliced` out of one product that has q, k and v (packed ones: k and
        v), with NaN before and behind; `transposed` (tokens and heads the other way round); `expanded` (one key/value
        head, repeated by a stride of 0). The output's cotangent alike.
    window, keep_anchor, softcap, sinks: what the layer adds to the mask rule (`jaxref.attention.attention`).
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    scale_factor: float = 1.0
    large: bool = False
    sizes: bool = False
    handed: Literal["usual", "sliced", "transposed", "expanded"] = "usual"
    window: int | None = None
    keep_anchor: bool = False
    softcap: float | None = None
    sinks: bool = False

    @cached_property
    def document_ids_BT(self) -> np.ndarray:
        """Int64 [B, T]."""
        return np.array(self.rows, dtype=np.int64)

    @cached_property
    def needs(self) -> frozenset[str]:
        """Names of `FEATURES` without which the layout cannot be run, and `scale` where it is not the default."""
        ids = self.document_ids_BT
        found = {
            "documents": (ids != 1).any(),
            "anchor": (ids == ANCHOR).any(),
            "padding": (ids == PADDING).any(),
            "batch": len(ids) > 1,
            "apart": any(_in_pieces(row) for row in self.rows),
            "scale": self.scale_factor != 1.0,
            "strides": self.handed != "usual",
        }
        return frozenset(name for name, needed in found.items() if needed) | self.adds

    @property
    def adds(self) -> frozenset[str]:
        """Names of `ADDED` that the layout has."""
        return frozenset(name for name in ADDED if getattr(self, name))


def other_documents(layout: Layout) -> Layout:
    """A layout of the same shape, ids and sum of ids with other boundaries, where there are three documents in a row.

    A document gives its first token to the one before and its last to the one behind.
    """
    rows = []
    for row in layout.rows:
        changed = list(row)
        runs = [(document, len(list(tokens))) for document, tokens in groupby(row)]
        start = runs[0][1]
        for (before, _), (own, length), (behind, _) in zip(runs, runs[1:], runs[2:], strict=False):
            if before > ANCHOR and (before, behind) == (own - 1, own + 1) and length > 2:
                changed[start], changed[start + length - 1] = before, behind
            start += length
        rows.append(tuple(changed))
    return replace(layout, name=f"{layout.name}_changed", rows=tuple(rows))


def _in_pieces(row: tuple[int, ...]) -> bool:
    pieces = [document for document, _ in groupby(row) if document > ANCHOR]
    return len(pieces) > len(set(pieces))


def _row(*pieces: tuple[int, int]) -> tuple[int, ...]:
    """A row from (document, tokens) pairs."""
    return tuple(document for document, tokens in pieces for _ in range(tokens))


# 47 and 523 tokens: multiples of nothing a kernel blocks by. Few lengths, so that code is compiled seldom.
_FULL = _row((1, 47))
_INTRA = _row((1, 19), (2, 5), (3, 23))
_ANCHOR = _row((0, 1), (1, 18), (2, 5), (3, 23))
_PADDED = _row((0, 1), (1, 16), (2, 5), (3, 14), (-1, 11))
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout("full", (_FULL,)),
            Layout("intra", (_INTRA,)),  # intra_reset too: it differs in positions, which attention never sees
            Layout("anchor", (_ANCHOR,)),
            Layout("anchor_of_five", (_row((0, 5), (1, 14), (2, 3), (3, 25)),)),
            Layout("one_token", (_row((1, 1), (2, 1), (3, 20), (4, 1), (5, 1), (6, 22), (7, 1)),)),
            Layout("one_token_anchor", (_row((0, 1), (1, 1), (2, 1), (3, 19), (4, 1), (5, 23), (6, 1)),)),
            Layout("padded_start", (_row((-1, 5), (1, 14), (2, 3), (3, 20), (-1, 5)),)),
            Layout("padded_end", (_row((1, 19), (2, 5), (3, 12), (-1, 11)),)),
            Layout("padded_end_anchor", (_PADDED,)),
            Layout("padded_middle", (_row((1, 8), (-1, 3), (1, 2), (2, 13), (-1, 2), (3, 12), (-1, 7)),)),
            Layout("padded_middle_anchor", (_row((0, 1), (1, 9), (-1, 3), (2, 13), (-1, 2), (3, 12), (-1, 7)),)),
            Layout("apart", (_row((1, 7), (2, 6), (1, 9), (3, 3), (2, 11), (1, 1), (3, 10)),)),
            Layout("apart_anchor", (_row((0, 2), (2, 6), (1, 8), (2, 1), (3, 12), (1, 9), (3, 2), (2, 7)),)),
            Layout("rows", (_INTRA, _row((1, 30), (2, 17)))),
            Layout("full_rows", (_FULL,) * 3),
            Layout("rows_of_every_kind", (_ANCHOR, _FULL, _PADDED, _row((0, 47)), _row((-1, 47)))),
            Layout("off_blocks", (_row((1, 7), (2, 17), (3, 33), (4, 65), (5, 129), (6, 272)),)),
            Layout("off_blocks_anchor", (_row((0, 3), (1, 131), (2, 15), (3, 259), (4, 1), (5, 103), (-1, 11)),)),
            Layout("long_anchor", (_row((0, 140), (1, 116), (-1, 131), (2, 7), (3, 129)),)),  # a block of padding alone
            Layout("long_apart", (_row((1, 140), (-1, 135), (2, 60), (1, 30), (3, 128), (2, 30)),)),
            Layout("many_documents", (_row(*((i + 1, 3 if i == 7 else 2) for i in range(261))),)),
            Layout("one_long", (_row((0, 2), (1, 1140), (2, 11)),)),  # 9 blocks of 128 and a token
            Layout("whole_blocks", (_row((1, 128)), _row((1, 16), (2, 16), (3, 96))), large=True),
            Layout("another_scale", (_INTRA,), scale_factor=0.3, sizes=True),
            Layout("larger_scale", (_INTRA,), scale_factor=1.7),
            Layout("large_logits", (_row((1, 13), (2, 11), (3, 12), (4, 11)),), large=True),
            Layout("large_logits_anchor", (_row((0, 3), (1, 10), (2, 11), (3, 12), (4, 8), (-1, 3)),), large=True),
            Layout("sliced", (_ANCHOR, _INTRA), handed="sliced"),
            Layout("transposed", (_ANCHOR, _INTRA), handed="transposed"),
            Layout("expanded_heads", (_ANCHOR, _INTRA), handed="expanded"),
            Layout("windows", (_ANCHOR, _INTRA), window=7),
            Layout("windows_apart", (_row((0, 2), (2, 6), (1, 8), (-1, 3), (2, 9), (1, 12), (2, 7)),), window=7),
            Layout("windows_and_anchor", (_ANCHOR,), window=7, keep_anchor=True),
            Layout("softcap", (_ANCHOR,), softcap=1.5),
            Layout("sinks", (_PADDED,), sinks=True),
        )
    }
)


@dataclass(frozen=True)
class CheckCase:
    """One layout with its heads and dtype. Everything drawn follows from the case, so it is the same everywhere."""

    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    seed: int = 0

    @property
    def id(self) -> str:
        """Names the case: `anchor-h4k2d16-bfloat16`."""
        return f"{self.layout.name}-h{self.heads}k{self.kv_heads}d{self.head_dim}-{self.dtype}"

    @property
    def needs(self) -> frozenset[str]:
        """What a function must be able to do to be judged on it."""
        return self.layout.needs | ({"gqa"} if self.kv_heads < self.heads else frozenset())

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return self.head_dim**-0.5 * self.layout.scale_factor

    @property
    def document_ids_BT(self) -> np.ndarray:
        """Int64 [B, T]."""
        return self.layout.document_ids_BT

    @property
    def sinks_H(self) -> np.ndarray | None:
        """The layer's sinks [H], in the dtype, each another; None where it has none."""
        return np.linspace(-1, 2, self.heads).astype(DTYPES[self.dtype]) if self.layout.sinks else None

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Standard normal q [B, T, H, D], k, v [B, T, K, D] and the output's cotangent [B, T, H, D], in the dtype."""
        random = np.random.default_rng(self.seed)
        B, T = self.document_ids_BT.shape
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, weight = (random.standard_normal((B, T, n, self.head_dim)) for n in heads)
        if self.layout.large:
            q, k = self._enlarge(q, k)
        if self.layout.sizes and self.dtype != "float16":
            v, weight = v * 2.0**17, weight * 2.0**-60
        if self.layout.handed == "expanded":
            k, v, weight = (np.repeat(x[:, :, :1], x.shape[2], axis=2) for x in (k, v, weight))
        dtype = DTYPES[self.dtype]
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), weight.astype(dtype)

    def _enlarge(self, q_BTHD: np.ndarray, k_BTKD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits near +100, near -100, one key of +100 among small ones, equal keys: documents in turn."""
        ids_BT = self.document_ids_BT
        size = (100 / self.scale / self.head_dim) ** 0.5  # q . k = head_dim size^2
        # All that varies lies across the direction (1, 1, ..., 1), along which the size is added.
        q, k = (x - x.mean(-1, keepdims=True) for x in (q_BTHD, k_BTKD))
        which_BT = np.where(ids_BT > ANCHOR, ids_BT % 4, 0)
        one_BT = np.zeros(ids_BT.shape)
        for b, ids_T in enumerate(ids_BT):
            one_BT[b, [np.flatnonzero(ids_T == document).mean().astype(int) for document in np.unique(ids_T)]] = 1
        sign_BT = np.select([which_BT == 1, which_BT == 2, which_BT == 3], [1.0, -1.0, 1.0], 0.0)
        large_BT = np.select([which_BT == 3, which_BT == 0], [one_BT, 0.0], 1.0)
        large_BT = np.where(ids_BT == ANCHOR, 1.0, large_BT)
        k = np.where((which_BT == 0)[..., None, None] & (ids_BT > ANCHOR)[..., None, None], k[:, -1:], k)
        return q + size * sign_BT[..., None, None], k + size * large_BT[..., None, None]


def judge_array(
    name: str, values: np.ndarray, truth: np.ndarray, reference: np.ndarray, like: str, dtype: str
) -> Verdict:
    """Judge `out`, `lse`, `dq`, `dk` or `dv` by the one rule, as a whole and in parts."""
    axes = "BHT" if name == "lse" else "BTHD"
    return judge(values, truth, reference, judged_as(name, like, dtype), axes, cancels=name.startswith("d"))


def judged_as(name: str, like: str, dtype: str) -> str:
    """The dtype of an array's one rounding. FlashAttention's log-sum-exp is float32 whatever its inputs are."""
    return "float32" if name == "lse" and like == "flash" else dtype


@lru_cache(maxsize=512)
def oracle(case: CheckCase, rounding: str) -> Mapping[str, np.ndarray]:
    """What the oracle computes under a preset: `out`, `lse`, `dq`, `dk`, `dv` as float64; remembered."""
    return MappingProxyType(_run_oracle(case, preset(rounding)))


def _run_oracle(case: CheckCase, rounding: Rounding) -> Arrays:
    """Row by row, which the rule keeps apart: two lengths to compile for, however many rows a layout has."""
    drawn = [x.astype(rounding.dtype) for x in case.draw()]
    given = {name: getattr(case.layout, name) for name in case.layout.adds - {"sinks"}}
    given |= {"rounding": rounding, "scale": case.scale}
    if case.sinks_H is not None:
        given["sinks_H"] = case.sinks_H.astype(rounding.dtype)
    rows = [
        _oracle_row(*(x[b : b + 1] for x in drawn), case.document_ids_BT[b : b + 1], **given)
        for b in range(len(case.document_ids_BT))
    ]
    return {name: np.concatenate([row[name] for row in rows]).astype(np.float64) for name in rows[0]}


_oracle_row = jax.jit(attention_arrays, static_argnames=("rounding", "scale", "window", "keep_anchor", "softcap"))
