"""Checks an engine on this GPU before a run relies on it, and measures which is the fastest on the run's own rows.

An engine may align its causal mask otherwise on a card or in a version that nobody tried, and nothing fails. So output
and gradients are compared with `dense` in float64 on a short row. Some engines prepare a kernel for each new length, so
the row that is timed is one that the engine has not seen.

Legend: T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anchorline.environment import version
from anchorline.errors import UserError, one_line
from anchorline.tolerance import judge
from torchtrain.attention.engines.choice import attend, resolve_engine
from torchtrain.attention.engines.flash import leave_newer
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.marks import ANCHOR, PADDING

# Of `auto`, each with the package that it needs; flex is chosen by name.
CANDIDATES = {
    **{"flash": None, "sdpa": None, "flash3": "flash-attn-3", "flash4": "flash-attn-4"},
    "cudnn": "nvidia-cudnn-frontend",
}
_DRAWN = 1024  # tokens whose numbers are drawn; a longer row repeats them
_ROW = [ANCHOR] * 2 + [1] * 37 + [2] * 70 + [3] * 5 + [4] + [PADDING] * 6


@dataclass(frozen=True)
class Heads:
    """What attention is measured with: a rank's heads, their width, the dtype and the device."""

    queries: int
    keys: int
    width: int
    dtype: torch.dtype
    device: torch.device


def check_engine(engine: str, heads: Heads) -> None:
    """Judge an engine's output and gradients by `dense` in float64. Raises UserError: they are wrong, or none."""
    plan = make_plan(torch.tensor([_ROW])).to(heads.device)
    qkv, weight = _draw(heads, len(_ROW))
    truth, reference = (
        _attend(plan, "dense", [x.to(dtype) for x in (*qkv, weight)]) for dtype in (torch.float64, heads.dtype)
    )
    try:
        found = _attend(plan, engine, [*qkv, weight])
    except (UserError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:  # of a kernel that this card or version lacks
        raise UserError(
            f"attention {engine}: fails here: {one_line(error)}; choose another in model.attention"
        ) from error
    named = str(heads.dtype).removeprefix("torch.")
    whats = ("output", "gradient of q", "gradient of k", "gradient of v")
    for what, *arrays in zip(whats, found, truth, reference, strict=True):
        verdict = judge(*map(_array, arrays), dtype=named)
        if not verdict.passed:
            raise UserError(
                f"attention {engine}: its {what} is wrong here: {verdict.ratio:.3g} times the error that the rule "
                "allows against dense (it may align its mask otherwise); choose another in model.attention"
            )


def list_candidates() -> list[str]:
    """Return the engines that `auto` measures: those whose package is installed."""
    return [engine for engine, package in CANDIDATES.items() if package is None or version(package) is not None]


def measure_engines(engines: Sequence[str], rows: Sequence[AttentionPlan], heads: Heads) -> dict[str, float | str]:
    """Measure each engine's forward and backward pass on the last of the rows, after the others.

    rows: plans of one row each.
    Returns seconds, or why the engine cannot be chosen; under torch's deterministic algorithms also because its bits
        differ from one time to the next.
    """
    found: dict[str, float | str] = {}
    for engine in engines:
        try:
            resolve_engine(engine, heads.device, heads.dtype)
            check_engine(engine, heads)
            found[engine] = [_seconds(engine, row, heads) for row in rows][-1]
            if torch.are_deterministic_algorithms_enabled() and not _repeats(engine, rows[-1], heads):
                found[engine] = f"attention {engine}: its bits differ from one time to the next (train.deterministic)"
        except UserError as error:
            found[engine] = one_line(error)
        except torch.OutOfMemoryError:
            found[engine] = f"attention {engine}: runs out of memory on a row"
        leave_newer()
    return found


def describe(found: dict[str, float | str], chosen: str) -> str:
    """Return what was measured and chosen, in a line."""
    times = ", ".join(f"{name} {1e3 * x:.3g} ms" for name, x in found.items() if isinstance(x, float))
    refused = "".join(f"; {reason}" for reason in found.values() if isinstance(reason, str))
    return f"auto: {times} for a row of new lengths, forward and backward, so {chosen}{refused}"


def _seconds(engine: str, plan: AttentionPlan, heads: Heads) -> float:
    qkv, weight = _draw(heads, plan.document_ids_BT.shape[1])
    if plan.seqlens_q:
        plan.batches  # noqa: B018  # made here, as ahead of a step
    plan = plan.to(heads.device)
    _wait(heads.device)
    started = time.perf_counter()
    _attend(plan, engine, [x.to(heads.dtype) for x in (*qkv, weight)])
    _wait(heads.device)
    return time.perf_counter() - started


def _repeats(engine: str, plan: AttentionPlan, heads: Heads) -> bool:
    qkv, weight = _draw(heads, plan.document_ids_BT.shape[1])
    first, second = (_attend(plan.to(heads.device), engine, [*qkv, weight]) for _ in range(2))
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _draw(heads: Heads, tokens: int) -> tuple[list[Tensor], Tensor]:
    """Draw q, k, v [1, T, .., D] and the gradient of the output; the process's own random state stays."""
    random = torch.Generator().manual_seed(0)
    counts = (heads.queries, heads.keys, heads.keys, heads.queries)
    drawn = torch.randn(1, min(tokens, _DRAWN), sum(counts), heads.width, generator=random).to(
        heads.device, heads.dtype
    )
    drawn = drawn.repeat(1, -(-tokens // _DRAWN), 1, 1)[:, :tokens]
    *qkv, weight = (x.contiguous() for x in drawn.split(counts, 2))
    return qkv, weight


def _attend(plan: AttentionPlan, engine: str, tensors: list[Tensor]) -> list[Tensor]:
    *qkv, weight = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]
    with torch.enable_grad():
        out, _ = attend(*leaves, plan, engine=engine)  # type: ignore[misc]
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def _array(x: Tensor) -> np.ndarray:
    x = x.cpu()
    return (x if x.dtype == torch.float64 else x.float()).numpy()  # numpy has no bfloat16
