"""The computations that `torchtrain bench attention` times: engines of torchtrain, and their alternatives.

Legend: T tokens of a row · U tokens with a BOS at the start of each document · H query heads · K key/value
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
from torchtrain.attention.engines.dense import MAX_TOKENS
from torchtrain.attention.engines.flash import leave_newer
from torchtrain.bench.config import AttentionBench

YARDSTICK = "causal SDPA"  # full attention: the denominator of all ratios
VARIANTS = ("full", "intra", "anchor")  # masks under which engines run
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A computation to time: its name, its mask, the engine of torchtrain (None: an alternative), and its window."""

    name: str
    variant: str
    engine: str | None = None
    window: int | None = None


@dataclass(frozen=True)
class Prepared:
    """A case on one row.

    `forward` maps q [1, T, H, D] and k, v [1, T, K, D] to out [1, T, H, D]. With `source` [U] it takes the U tokens at
    these indices of the row, and `own` [T] are the places of the row's tokens among them.
    """

    forward: Forward
    live_pairs: int
    backward: bool = True
    source: Tensor | None = None
    own: Tensor | None = None


def list_cases(bench: AttentionBench) -> list[Case]:
    """Return all cases of a config, the yardstick first."""
    ours = [Case(f"{engine}, {variant}", variant, engine) for engine in bench.engines for variant in VARIANTS]
    ours += [Case(f"{name}, window {n:,}", "full", name, n) for name in bench.engines for n in bench.windows]
    rivals = [Case(name, "anchor" if name in ("dense mask", "BOS per document") else "intra") for name in bench.rivals]
    return [Case(YARDSTICK, "full"), *ours, *rivals]


def prepare_case(case: Case, ids_T: dict[str, Tensor], bench: AttentionBench, dtype: torch.dtype) -> Prepared:
    """Prepare a case on a row.

    Args:
        case: the case.
        ids_T: the row's document ids under each variant, on the device.
        bench: with the longest row for a dense mask.
        dtype: of q, k and v.

    Raises:
        UserError: the case cannot run on this device, in this dtype or at this length.
    """
    ids_1T = ids_T[case.variant][None]
    T, device = ids_1T.shape[1], ids_1T.device
    plan = make_plan(ids_1T)
    if "dense" in (case.engine, case.name.split()[0]):
        most = min(bench.dense_tokens, MAX_TOKENS) if case.engine else bench.dense_tokens
        if most < T:
            raise UserError(f"a T x T mask is made up to {most:,} tokens")
    if case.engine is not None:
        leave_newer()  # the case before may have chosen FlashAttention 3 or 4
        engine = resolve_engine(case.engine, device, dtype, training=False)
        pairs = plan.mean_live_pairs({case.window: 1})
        return Prepared(engine_forward(plan, engine, case.window), pairs, engine != "flex" or device.type == "cuda")
    if case.name == YARDSTICK:
        return Prepared(_sdpa(is_causal=True), plan.live_pairs)
    if case.name == "dense mask":
        return Prepared(_sdpa(attn_mask=visible_BTT(ids_1T)[:, None]), plan.live_pairs)
    if case.name == "BOS per document":
        source, copied_1U, own = copy_bos(ids_1T[0])
        copied = make_plan(copied_1U)
        return Prepared(
            engine_forward(copied, resolve_engine("auto", device, dtype)), copied.live_pairs, source=source, own=own
        )
    kept = _block_mask(ids_1T[0]) if case.name == "flex, mask kept" else None
    return Prepared(_flex(ids_1T[0], kept), plan.live_pairs, device.type == "cuda")


def engine_forward(plan: AttentionPlan, engine: str, window: int | None = None) -> Forward:
    """Return an engine's attention under a plan, within a window."""
    return lambda q, k, v: attend(q, k, v, plan, engine=engine, window=window)[0]


def _sdpa(**how: Any) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how).transpose(1, 2)

    return forward


def _flex(ids_T: Tensor, kept: Any) -> Forward:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = _block_mask(ids_T) if kept is None else kept
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _compiled()(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return forward


def _block_mask(ids_T: Tensor) -> Any:
    """Make the mask as in FlexAttention's guide."""

    def within_documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids_T[q] == ids_T[k])

    return create_block_mask(within_documents, None, None, len(ids_T), len(ids_T), device=str(ids_T.device))


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def copy_bos(ids_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a row out as the authors' FlashAttention does, with a copy of the anchor's token in front of each document.

    Args:
        ids_T: document ids of a row whose anchor is its first token alone.

    Returns:
        The U tokens' indices in the row [U], their document ids [1, U], and the places of the row's tokens among
        them [T].
    """
    counts = ids_T[1:].unique_consecutive(return_counts=True)[1].tolist()
    bos = torch.zeros(1, dtype=torch.long)
    parts = torch.arange(1, len(ids_T)).split(counts)
    source = torch.cat([torch.cat([bos, part]) for part in parts])
    ids = torch.cat([torch.full((count + 1,), number) for number, count in enumerate(counts, start=1)])
    own = torch.cat([bos, source.nonzero().flatten()])
    return source.to(ids_T.device), ids[None].to(ids_T.device), own.to(ids_T.device)


def run_case(prepared: Prepared, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of q, k and v if there is a backward pass."""
    leaves, weight = leaves_of(prepared, inputs)
    with torch.set_grad_enabled(prepared.backward):
        out = prepared.forward(*leaves)
    results = [out.detach()]
    if prepared.backward:
        results += torch.autograd.grad(out, leaves, weight)
    return results if prepared.own is None else [x[:, prepared.own] for x in results]


def leaves_of(prepared: Prepared, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return a case's inputs q, k and v, and the gradient of its output."""
    taken = slice(None) if prepared.source is None else prepared.source
    *leaves, weight = (x.detach()[:, taken] for x in inputs)
    return [x.requires_grad_(prepared.backward) for x in leaves], weight
