"""`torchtrain bench attention`: how much less time attention takes under a mask than full causal attention.

The time is also compared with the share of query-key pairs that the mask leaves. All cases run on the same tensors of
one row of real documents, in turns, forward and backward. Each turn gives a ratio to full causal attention in the same
turn. First, all cases are judged against float64 on a shorter row. An engine of torchtrain that breaks the error rule
is not timed. What people would use instead (a rival) is timed, and its error is in the result.

Legend: T tokens of a row · U tokens where each document begins with a BOS of its own · H query heads · K key/value
heads · D head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from anchorline.errors import UserError, one_line
from torchtrain.attention import AttentionPlan, attend, make_plan, resolve_engine, visible_BTT
from torchtrain.attention.dense import MAX_TOKENS
from torchtrain.attention.flash import leave_newer
from torchtrain.bench.config import AttentionBench, BenchConfig
from torchtrain.bench.measure import Clock, error_ratio, spread_of
from torchtrain.bench.rows import Corpus, Which

YARDSTICK = "causal SDPA"  # full attention, as everyone calls it: the denominator of all ratios
VARIANTS = ("full", "intra", "anchor")  # masks under which engines run
# Forward: 4 D for each live pair and head; backward, with the scores computed again, two and a half times that.
WORK = {"forward": 4, "backward": 10}
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A computation that is timed: its name, its mask, and the engine of torchtrain (None: what people use instead)."""

    name: str
    variant: str
    engine: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A case on one row.

    `forward` takes q [1, T, H, D] and k, v [1, T, K, D] to out [1, T, H, D]; where `source` is given, of the U tokens
    that it names, of which `own` are the row's.
    """

    forward: Forward
    live_pairs: int
    backward: bool = True
    source: Tensor | None = None
    own: Tensor | None = None


def measure_attention(
    config: BenchConfig, clock: Clock, say: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure every case at every length.

    Args:
        config: the settings.
        clock: of the device.
        say: takes a line when a part begins.
        keep: takes the result so far, each time a row is done.

    Returns:
        The result, without its environment.
    """
    bench, corpus, rows = config.attention, Corpus(config), list[dict[str, Any]]()
    result = {"heads": [bench.heads, bench.kv_heads, bench.head_dim], "rows": rows}
    for name in bench.dtypes:
        dtype = getattr(torch, name)
        say(f"checking {name}: {len(list_cases(bench))} computations on {bench.check_tokens:,} tokens against float64")
        errors = _check(config, corpus, dtype, clock)
        for tokens, which in product(bench.lengths, bench.rows):
            say(f"timing {name}, {tokens:,} tokens, the row of {which} live pairs, {config.repeats} turns")
            rows += _time(config, corpus, tokens, which, dtype, clock, errors)
            keep(result)
    return result


def list_cases(bench: AttentionBench) -> list[Case]:
    """Return all cases of a config, the yardstick first."""
    ours = [Case(f"{engine}, {variant}", variant, engine) for engine in bench.engines for variant in VARIANTS]
    rivals = [Case(name, "anchor" if name in ("dense mask", "BOS per document") else "intra") for name in bench.rivals]
    return [Case(YARDSTICK, "full"), *ours, *rivals]


def prepare_case(case: Case, ids_T: dict[str, Tensor], bench: AttentionBench, dtype: torch.dtype) -> Prepared:
    """Make a case ready on a row.

    Args:
        case: the case.
        ids_T: the row's document ids under each variant, on the device.
        bench: how long a dense mask may be.
        dtype: of q, k and v.

    Raises:
        UserError: the reason why it cannot run here, in this dtype, or at this length.
    """
    ids_1T = ids_T[case.variant][None]
    T, device = ids_1T.shape[1], ids_1T.device
    plan = make_plan(ids_1T)
    if "dense" in (case.engine, case.name.split()[0]):
        most = min(bench.dense_tokens, MAX_TOKENS) if case.engine else bench.dense_tokens
        if most < T:
            raise UserError(f"a T x T mask is made up to {most:,} tokens")
    if case.engine is not None:
        leave_newer()  # of the case before
        engine = resolve_engine(case.engine, device, dtype, training=False)
        return Prepared(_engine(plan, engine), plan.live_pairs, engine != "flex" or device.type == "cuda")
    if case.name == YARDSTICK:
        return Prepared(_sdpa(is_causal=True), plan.live_pairs)
    if case.name == "dense mask":
        return Prepared(_sdpa(attn_mask=visible_BTT(ids_1T)[:, None]), plan.live_pairs)
    if case.name == "BOS per document":
        source, copied_1U, own = copy_bos(ids_1T[0])
        copied = make_plan(copied_1U)
        return Prepared(
            _engine(copied, resolve_engine("auto", device, dtype)), copied.live_pairs, source=source, own=own
        )
    kept = _block_mask(ids_1T[0]) if case.name == "flex, mask kept" else None
    return Prepared(_flex(ids_1T[0], kept), plan.live_pairs, device.type == "cuda")


def _engine(plan: AttentionPlan, engine: str) -> Forward:
    return lambda q, k, v: attend(q, k, v, plan, engine=engine)[0]


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
    """Make the mask as FlexAttention's own guide does."""

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
        The index in the row of each of the U tokens [U]; their document ids [1, U]; the places of the row's tokens
        among them [T].
    """
    counts = ids_T[1:].unique_consecutive(return_counts=True)[1].tolist()
    bos = torch.zeros(1, dtype=torch.long)
    parts = torch.arange(1, len(ids_T)).split(counts)
    source = torch.cat([torch.cat([bos, part]) for part in parts])
    ids = torch.cat([torch.full((count + 1,), number) for number, count in enumerate(counts, start=1)])
    own = torch.cat([bos, source.nonzero().flatten()])
    return source.to(ids_T.device), ids[None].to(ids_T.device), own.to(ids_T.device)


def _check(config: BenchConfig, corpus: Corpus, dtype: torch.dtype, clock: Clock) -> dict[str, dict[str, Any]]:
    """Judge each case by the error rule, or give the reason why it cannot run."""
    bench = config.attention
    ids_T = _document_ids(corpus, bench.check_tokens, "least", clock.device)
    inputs = _draw(config.attention, bench.check_tokens, dtype, clock.device)

    @cache
    def references(variant: str) -> tuple[list[Tensor], list[Tensor]]:
        plan = make_plan(ids_T[variant][None])
        dense = Prepared(_engine(plan, "dense"), plan.live_pairs)
        return _run(dense, [x.double() for x in inputs]), _run(dense, inputs)

    errors = dict[str, dict[str, Any]]()
    for case in list_cases(bench):
        try:
            prepared = prepare_case(case, ids_T, bench, dtype)
        except UserError as error:
            errors[case.name] = {"not_run": one_line(error)}
            continue
        # Each copy of a BOS has a gradient of its own; those of the documents' tokens are compared.
        own = slice(None) if prepared.own is None else slice(1, None)
        results = zip(("out", "dq", "dk", "dv"), _run(prepared, inputs), *references(case.variant), strict=False)
        ratios = {name: error_ratio(x[:, own], y[:, own], z[:, own], dtype) for name, x, y, z in results}
        worst = max(ratios, key=lambda name: ratios[name])
        errors[case.name] = {"error_ratio": ratios[worst]}
        if case.engine is not None and ratios[worst] > 1:
            errors[case.name]["not_run"] = (
                f"{worst} errs {ratios[worst]:.3g} times what the one rule allows, so it is not the same computation"
            )
    return errors


def _run(prepared: Prepared, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of q, k and v where there is a backward pass."""
    leaves, weight = _leaves(prepared, inputs)
    with torch.set_grad_enabled(prepared.backward):
        out = prepared.forward(*leaves)
    results = [out.detach()]
    if prepared.backward:
        results += torch.autograd.grad(out, leaves, weight)
    return results if prepared.own is None else [x[:, prepared.own] for x in results]


def _leaves(prepared: Prepared, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    taken = slice(None) if prepared.source is None else prepared.source
    *leaves, weight = (x.detach()[:, taken] for x in inputs)
    return [x.requires_grad_(prepared.backward) for x in leaves], weight


def _time(
    config: BenchConfig,
    corpus: Corpus,
    tokens: int,
    which: Which,
    dtype: torch.dtype,
    clock: Clock,
    errors: dict[str, dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    bench, cases = config.attention, list_cases(config.attention)
    ids_T = _document_ids(corpus, tokens, which, clock.device)
    inputs = _draw(config.attention, tokens, dtype, clock.device)
    missing: dict[str, str] = {name: error["not_run"] for name, error in errors.items() if "not_run" in error}
    ready = dict[str, Prepared]()
    seconds: dict[str, list[dict[str, float]]] = {case.name: [] for case in cases}
    for turn, case in product(range(config.repeats), cases):
        try:
            if case.name in missing:
                continue
            if turn == 0:
                ready[case.name] = prepare_case(case, ids_T, bench, dtype)
            seconds[case.name].append(_seconds(ready[case.name], inputs, clock))
        except UserError as error:
            missing[case.name] = one_line(error)
        except torch.OutOfMemoryError:
            missing[case.name] = "runs out of memory"
    if YARDSTICK in missing:
        raise UserError(f"attention.lengths {tokens}: {YARDSTICK} runs out of memory there; leave it out")
    shown = {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "row": which,
        "documents": ids_T["intra"].unique_consecutive(return_counts=True)[1].tolist(),
    }
    for case in cases:
        row = {"name": case.name, "variant": case.variant, "engine": case.engine} | shown
        if case.name in missing:
            yield row | {"not_run": missing[case.name]}
        else:
            summary = _summarise(seconds[case.name], seconds[YARDSTICK], ready[case.name], ready[YARDSTICK], bench)
            yield row | errors[case.name] | summary


def _seconds(prepared: Prepared, inputs: list[Tensor], clock: Clock) -> dict[str, float]:
    leaves, weight = _leaves(prepared, inputs)
    if not prepared.backward:
        with torch.no_grad():
            return {"forward": clock.seconds(lambda: prepared.forward(*leaves))}
    forward = clock.seconds(lambda: prepared.forward(*leaves))
    out = prepared.forward(*leaves)
    backward = clock.seconds(lambda: torch.autograd.grad(out, leaves, weight, retain_graph=True))
    return {"forward": forward, "backward": backward}


def _summarise(
    seconds: list[dict[str, float]],
    yardstick: list[dict[str, float]],
    prepared: Prepared,
    full: Prepared,
    bench: AttentionBench,
) -> dict[str, Any]:
    """Sum up the turns of a case. Without a backward pass it is compared with the forward pass of the yardstick."""
    parts, live = list(seconds[0]), prepared.live_pairs / full.live_pairs
    own = [sum(turn.values()) for turn in seconds]
    whole = [sum(turn[part] for part in parts) for turn in yardstick]
    of_full, total = spread_of([mine / its for mine, its in zip(own, whole, strict=True)]), spread_of(own)
    flops = sum(WORK[part] for part in parts) * bench.head_dim * bench.heads * prepared.live_pairs
    return {
        **{part: spread_of([turn[part] for turn in seconds]) for part in parts},
        "seconds": total,
        "of_full": of_full,
        "live_ratio": live,
        "over_the_law": {name: value / live for name, value in of_full.items()},
        "flops_per_second": flops / total["median"],
    }


def _document_ids(corpus: Corpus, tokens: int, which: Which, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(corpus.row(tokens, name, which)["document_ids"]).to(device) for name in VARIANTS}


def _draw(bench: AttentionBench, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Draw q, k, v and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (bench.heads, bench.kv_heads, bench.kv_heads, bench.heads)
    return [torch.randn(1, tokens, n, bench.head_dim, device=device, generator=generator).to(dtype) for n in heads]
