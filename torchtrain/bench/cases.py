"""What is compared: our engines under each variant, and what people would call instead, on the same tensors.

Legend: T tokens of a row · U tokens where each document begins with a BOS of its own · H query heads · K key/value
heads · D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from anchorline.errors import UserError
from torchtrain.attention import AttentionPlan, attend, make_plan, resolve_engine, visible_BTT
from torchtrain.attention.dense import MAX_TOKENS
from torchtrain.attention.flash import leave_newer
from torchtrain.bench.config import AttentionBench
from torchtrain.marks import ANCHOR

YARDSTICK = "causal SDPA"  # full attention, as everyone calls it: what all are a ratio of
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BenchCase:
    """A computation that is timed."""

    name: str
    variant: str  # what it computes
    engine: str | None = None  # of ours; None: what people would use instead


@dataclass(frozen=True)
class Prepared:
    """A case on one row.

    `forward` takes q [1, T, H, D] and k, v [1, T, K, D] to out [1, T, H, D] in the row's order, or, where `source` is
    given, the same of the U tokens that it names, of which `own` are the row's.
    """

    forward: Forward
    live_pairs: int
    backward: bool = True
    source: Tensor | None = None
    own: Tensor | None = None


def list_cases(bench: AttentionBench) -> list[BenchCase]:
    """Return all cases of a config, the yardstick first."""
    ours = [
        BenchCase(f"{engine}, {variant}", variant, engine) for engine in bench.engines for variant in bench.variants
    ]
    return [
        BenchCase(YARDSTICK, "full"),
        *ours,
        *(BenchCase(rival, _variant_of(rival), None) for rival in bench.rivals),
    ]


def _variant_of(rival: str) -> str:
    return "anchor" if rival in ("dense mask", "BOS per document") else "intra"


def prepare_case(case: BenchCase, ids_T: dict[str, Tensor], bench: AttentionBench, dtype: torch.dtype) -> Prepared:
    """Make a case ready on a row.

    Args:
        case: which.
        ids_T: the row's document ids under each variant, on the device.
        bench: how long a dense mask may be.
        dtype: of the tensors that it will get.

    Raises:
        UserError: it cannot run here, in this dtype, or at this length: why.
    """
    ids_1T = ids_T[case.variant][None]
    T, device = ids_1T.shape[1], ids_1T.device
    plan = make_plan(ids_1T)
    if case.name == YARDSTICK:
        return Prepared(_causal, plan.live_pairs)
    if case.engine is not None:
        if case.engine == "dense":
            _check_dense(T, min(bench.dense_tokens, MAX_TOKENS))
        leave_newer()  # of the case before
        engine = resolve_engine(case.engine, device, dtype, training=False)
        return Prepared(_ours(plan, engine), plan.live_pairs, engine != "flex" or device.type == "cuda")
    if case.name == "dense mask":
        _check_dense(T, bench.dense_tokens)
        return Prepared(_masked(visible_BTT(ids_1T)[:, None]), plan.live_pairs)
    if case.name == "BOS per document":
        source, copied_1U, own = _copy_bos(ids_1T[0])
        copied = make_plan(copied_1U)
        engine = resolve_engine("auto", device, dtype)
        return Prepared(_ours(copied, engine), copied.live_pairs, source=source, own=own)
    kept = _block_mask(ids_1T) if case.name == "flex, mask kept" else None
    return Prepared(_flex(ids_1T, kept), plan.live_pairs, device.type == "cuda")


def _check_dense(tokens: int, most: int) -> None:
    if tokens > most:
        raise UserError(f"a T x T mask is made up to {most:,} tokens")


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = _heads_first(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _masked(mask_11TT: Tensor) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _heads_first(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_11TT, enable_gqa=True).transpose(1, 2)

    return forward


def _ours(plan: AttentionPlan, engine: str) -> Forward:
    return lambda q, k, v: attend(q, k, v, plan, engine=engine)[0]


def _flex(ids_1T: Tensor, kept: Any) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _block_mask(ids_1T) if kept is None else kept
        return _compiled()(*_heads_first(q, k, v), block_mask=mask, enable_gqa=True).transpose(1, 2)

    return forward


def _block_mask(ids_1T: Tensor) -> Any:
    """Make the mask as FlexAttention's own guide does."""
    ids_T = ids_1T[0]

    def within_documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids_T[q] == ids_T[k])

    return create_block_mask(within_documents, None, None, len(ids_T), len(ids_T), device=str(ids_T.device))


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _copy_bos(ids_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a row out as the authors' FlashAttention does: the anchor's token once more in front of each document.

    Returns the row's token that each of the U copies [U], their document ids [1, U], and where among them the row's own
    tokens stand [T].
    """
    assert int((ids_T == ANCHOR).sum()) == 1, "a BOS is one token"
    documents, counts = ids_T[1:].unique_consecutive(return_counts=True)
    source, ids, own, at = [], [], [torch.zeros(1, dtype=torch.long)], 1
    for number, count in enumerate(counts.tolist(), start=1):
        begins = sum(map(len, source))
        source.append(torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(at, at + count)]))
        ids.append(torch.full((count + 1,), number))
        own.append(torch.arange(begins + 1, begins + 1 + count))
        at += count
    device = documents.device
    return torch.cat(source).to(device), torch.cat(ids)[None].to(device), torch.cat(own).to(device)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]
