"""One attention engine against the oracle: output, log-sum-exp and the gradients of q, k and v, by the one rule.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from anchorline.tolerance import Verdict, judge
from jaxref.rounding import Rounding, preset
from parity_tests.oracle import Arrays, attention_arrays, preset_name, to_numpy
from torchtrain.attention import attend, make_plan


def draw(
    document_ids_BT: Tensor, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q, k, v and a weight for the output (what the backward pass starts from), rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*document_ids_BT.shape, heads, head_dim)
    q, k, v, weight = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    return q, k[:, :, :kv_heads].contiguous(), v[:, :, :kv_heads].contiguous(), weight


def run_engine(
    engine: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    document_ids_BT: Tensor,
    backward: bool = True,
    sinks_H: Tensor | None = None,
    **layer: Any,
) -> Arrays:
    """`out`, `lse` where the engine gives one, and `dq`, `dk`, `dv` (and `dsinks`) of sum(out * weight)."""
    given = [x.detach().clone().requires_grad_(backward) for x in (q, k, v, sinks_H) if x is not None]
    sinks_H = None if sinks_H is None else given[3]
    with torch.set_grad_enabled(backward):
        out, lse = attend(*given[:3], make_plan(document_ids_BT), engine=engine, sinks_H=sinks_H, **layer)
    results = {"out": out.detach()} | ({} if lse is None else {"lse": lse})
    if backward:
        grads = torch.autograd.grad(out, given, weight)
        results |= dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
    return {name: x.cpu().double().numpy() for name, x in results.items()}


def run_oracle(
    rounding: Rounding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    document_ids_BT: Tensor,
    query_block: int | None = None,
    sinks_H: Tensor | None = None,
    **layer: Any,
) -> Arrays:
    """The same from the oracle."""
    if sinks_H is not None:
        layer["sinks_H"] = jnp.asarray(to_numpy(sinks_H)).astype(rounding.dtype)
    ids = document_ids_BT.cpu().numpy()
    carried = (jnp.asarray(to_numpy(x)).astype(rounding.dtype) for x in (q, k, v, weight))
    q_BTHD, k_BTKD, v_BTKD, weight_BTHD = carried
    results = attention_arrays(q_BTHD, k_BTKD, v_BTKD, weight_BTHD, ids, rounding, query_block=query_block, **layer)
    return {name: np.asarray(x, dtype=np.float64) for name, x in results.items()}


def run_oracle_by_documents(
    rounding: Rounding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    document_ids_BT: Tensor,
    query_block: int | None = None,
) -> Arrays:
    """`run_oracle` on one row, without the log-sum-exp, in the work of its documents alone: the anchor by itself, then
    each document behind a copy of it, whose gradients are added up.

    That is the same function, because no document sees another; `test_the_oracle_by_documents` holds the two together.
    """
    (ids_T,) = document_ids_BT
    arrays = {name: np.zeros(x.shape) for name, x in {"out": q, "dq": q, "dk": k, "dv": v}.items()}
    anchor = (ids_T == 0).nonzero().flatten()
    for document in ids_T[ids_T >= 0].unique():
        own = (ids_T == document).nonzero().flatten()
        index = own if document == 0 else torch.cat([anchor, own])
        copies = len(index) - len(own)
        weight_of_own = weight[:, index].clone()
        weight_of_own[:, :copies] = 0  # what a copy puts out, nobody takes
        part = ids_T[index][None]
        found = run_oracle(rounding, q[:, index], k[:, index], v[:, index], weight_of_own, part, query_block)
        arrays["out"][:, own.numpy()] = found["out"][:, copies:]
        for name in ("dq", "dk", "dv"):
            arrays[name][:, index.numpy()] += found[name]
    return arrays


def compare_engine(
    engine: str,
    document_ids_BT: Tensor,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    backward: bool = True,
    query_block: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    oracle: dict[str, Any] | None = None,
    ask: Callable[..., Arrays] = run_oracle,
    **layer: Any,
) -> dict[str, Verdict]:
    """Judge every output of an engine on random q, k, v under a packing. Returns verdicts by output's name.

    `layer`: sinks, cap and window of the layer, for both; `oracle`: what of it is another for the oracle; `ask`: how
    the oracle computes (`run_oracle_by_documents`: of one row that is too long to be seen at once).
    """
    drawn = draw(document_ids_BT, heads, kv_heads, head_dim, dtype, seed)
    q, k, v, weight = (x.to(device) for x in drawn)
    candidate = run_engine(engine, q, k, v, weight, document_ids_BT.to(device), backward, **layer)
    layer |= oracle or {}
    presets = ("exact", preset_name(engine, dtype))
    truth, reference = (ask(preset(name), *drawn, document_ids_BT, query_block, **layer) for name in presets)
    judged_as = str(dtype).removeprefix("torch.")
    # The log-sum-exp is float32 in every half-precision engine; under `dense` the logits it sums are rounded to half.
    as_dtype = {"lse": "float32" if engine != "dense" else judged_as}
    return {
        name: judge(x, truth[name], reference[name], as_dtype.get(name, judged_as))
        for name, x in candidate.items()
        if name in truth
    }
