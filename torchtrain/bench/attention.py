"""`torchtrain bench attention`: time(variant) / time(full), and how close that comes to what the live pairs allow.

All that is compared runs on the same tensors of one row of real documents, in turn, forward and backward; each turn has
a ratio of its own to full causal attention in the same turn. Before, all are judged against float64 on a shorter row:
an engine of ours that is not right is not timed; what others give is timed, and its error told.

Legend: T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anchorline.errors import UserError, one_line
from torchtrain.attention import attend
from torchtrain.bench.cases import YARDSTICK, BenchCase, Prepared, list_cases, prepare_case
from torchtrain.bench.clock import Clock
from torchtrain.bench.config import AttentionBench, BenchConfig
from torchtrain.bench.record import BenchRecord
from torchtrain.bench.rows import Corpus, Which
from torchtrain.bench.spread import spread_of
from torchtrain.bench.truth import error_ratio

# Forward: 4 D for each live pair and head; backward, with the scores computed again, two and a half times that.
FORWARD, BACKWARD = 4, 10
NAMES = ("out", "dq", "dk", "dv")
_TOO_MUCH = "runs out of memory"


class Inputs(NamedTuple):
    """What a row is given: queries, keys, values, and the gradient of its output."""

    q_1THD: Tensor
    k_1TKD: Tensor
    v_1TKD: Tensor
    weight_1THD: Tensor


def measure(config: BenchConfig, record: BenchRecord, clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, or go on measuring.

    Args:
        config: what.
        record: what was measured before.
        clock: of the device.
        say: takes one line at a time on what begins.

    Returns:
        What the result holds besides its environment.
    """
    bench, cases, corpus = config.attention, list_cases(config.attention), Corpus(config)
    rows = []
    for name in bench.dtypes:
        dtype = getattr(torch, name)
        say(f"checking {name}: {len(cases)} computations on {bench.check_tokens:,} tokens against float64")
        errors = _check(cases, bench, corpus, dtype, config.seed, clock, record)
        for tokens, which in product(bench.lengths, bench.rows):
            say(f"timing {name}, {tokens:,} tokens, the row of {which} live pairs, {config.repeats} turns")
            rows += _time(cases, errors, config, corpus, tokens, which, dtype, clock, record)
    return {"heads": [bench.heads, bench.kv_heads, bench.head_dim], "rows": rows}


def _check(
    cases: list[BenchCase],
    bench: AttentionBench,
    corpus: Corpus,
    dtype: torch.dtype,
    seed: int,
    clock: Clock,
    record: BenchRecord,
) -> dict[str, dict[str, Any]]:
    """Judge each case; a case that cannot run says why."""
    ids_T = _ids(corpus, bench.check_tokens, "least", clock.device)
    inputs = _draw(bench, bench.check_tokens, dtype, seed, clock.device)
    truths: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def judge(case: BenchCase) -> dict[str, Any]:
        try:
            prepared = prepare_case(case, ids_T, bench, dtype)
        except UserError as error:
            return {"not_run": one_line(error)}
        if case.variant not in truths:
            truths[case.variant] = (
                _run_dense(ids_T[case.variant], inputs, torch.float64),
                _run_dense(ids_T[case.variant], inputs, dtype),
            )
        found = _run(prepared, inputs)
        # Of copies of a BOS each has a gradient of its own; those of the documents' tokens are compared.
        some = slice(None) if prepared.own is None else slice(1, None)
        truth, coarse = truths[case.variant]
        pairs = zip(NAMES, found, truth, coarse, strict=False)  # there may be no gradients
        ratios = {name: error_ratio(x[:, some], y[:, some], z[:, some], dtype) for name, x, y, z in pairs}
        worst = max(ratios.values())
        wrong = case.engine is not None and worst > 1
        return {"error_ratio": worst} | ({"not_run": _tell_error(ratios)} if wrong else {})

    return {
        case.name: record.once({"check": case.name, "dtype": str(dtype)}, lambda case=case: judge(case))
        for case in cases
    }


def _tell_error(ratios: dict[str, float]) -> str:
    worst = max(ratios, key=lambda name: ratios[name])
    return f"{worst} errs {ratios[worst]:.3g} times what the one rule allows, so it is not the same computation"


def _run_dense(ids_T: Tensor, inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
    q, k, v = leaves
    out, _ = attend(q, k, v, ids_T[None], engine="dense")
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.weight_1THD.to(dtype))]


def _run(prepared: Prepared, inputs: Inputs) -> list[Tensor]:
    leaves, weight = _leaves(prepared, inputs)
    if not prepared.backward:
        with torch.no_grad():
            results = [prepared.forward(*leaves)]
    else:
        out = prepared.forward(*leaves)
        results = [out.detach(), *torch.autograd.grad(out, leaves, weight)]
    return results if prepared.own is None else [x[:, prepared.own] for x in results]


def _leaves(prepared: Prepared, inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    taken = slice(None) if prepared.source is None else prepared.source  # each copy of a BOS has an output of its own
    *leaves, weight = (x.detach()[:, taken] for x in inputs)
    return [x.requires_grad_(prepared.backward) for x in leaves], weight


def _time(
    cases: list[BenchCase],
    errors: dict[str, dict[str, Any]],
    config: BenchConfig,
    corpus: Corpus,
    tokens: int,
    which: Which,
    dtype: torch.dtype,
    clock: Clock,
    record: BenchRecord,
) -> Iterator[dict[str, Any]]:
    bench = config.attention
    ids_T = _ids(corpus, tokens, which, clock.device)
    documents = ids_T["intra"].unique_consecutive(return_counts=True)[1].tolist()
    inputs: Inputs | None = None
    ready: dict[str, Prepared] = {}
    missing: dict[str, str] = {name: found["not_run"] for name, found in errors.items() if "not_run" in found}
    for case in cases:
        if case.name not in missing:
            try:
                ready[case.name] = prepare_case(case, ids_T, bench, dtype)
            except UserError as error:
                missing[case.name] = one_line(error)
            except torch.OutOfMemoryError:
                missing[case.name] = _TOO_MUCH
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ready}
    warm = set[str]()

    def once(name: str) -> dict[str, float]:
        nonlocal inputs
        if inputs is None:
            inputs = _draw(bench, tokens, dtype, config.seed, clock.device)
        try:
            if name not in warm:  # it compiles, and takes the memory that it will take again
                _once(ready[name], inputs, clock)
                warm.add(name)
            return _once(ready[name], inputs, clock)
        except torch.OutOfMemoryError:
            return {}

    for turn in range(config.repeats):
        for name in ready:
            if name in missing:
                continue
            key = {"dtype": str(dtype), "tokens": tokens, "row": which, "case": name, "turn": turn}
            seconds[name].append(record.once(key, lambda name=name: once(name)))
            if not seconds[name][-1]:
                missing[name] = _TOO_MUCH
    if YARDSTICK in missing:
        raise UserError(f"attention.lengths {tokens}: {YARDSTICK} runs out of memory there; leave it out")
    yardstick, all_pairs = seconds[YARDSTICK], ready[YARDSTICK].live_pairs
    for case in cases:
        told = {"dtype": str(dtype).removeprefix("torch."), "tokens": tokens, "row": which, "documents": documents}
        row = asdict(case) | told
        if case.name in missing:
            yield row | {"not_run": missing[case.name]}
            continue
        yield row | errors[case.name] | _summary(seconds[case.name], yardstick, ready[case.name], all_pairs, bench)


def _once(prepared: Prepared, inputs: Inputs, clock: Clock) -> dict[str, float]:
    leaves, weight = _leaves(prepared, inputs)
    if not prepared.backward:
        with torch.no_grad():
            return {"forward": clock.seconds(lambda: prepared.forward(*leaves))[0]}
    forward, out = clock.seconds(lambda: prepared.forward(*leaves))
    return {"forward": forward, "backward": clock.seconds(lambda: torch.autograd.grad(out, leaves, weight))[0]}


def _summary(
    seconds: list[dict[str, float]],
    yardstick: list[dict[str, float]],
    prepared: Prepared,
    all_pairs: int,
    bench: AttentionBench,
) -> dict[str, Any]:
    """Sum up a case's turns; where it has no backward pass, against the yardstick's forward alone."""
    parts = list(seconds[0])
    own = [sum(turn.values()) for turn in seconds]
    full = [sum(turn[part] for part in parts) for turn in yardstick]
    of_full = spread_of([mine / its for mine, its in zip(own, full, strict=True)])
    live = prepared.live_pairs / all_pairs
    work = sum({"forward": FORWARD, "backward": BACKWARD}[part] for part in parts)
    flops = work * bench.head_dim * bench.heads * prepared.live_pairs
    total = spread_of(own)
    return {
        **{part: spread_of([turn[part] for turn in seconds]) for part in parts},
        "seconds": total,
        "of_full": of_full,
        "live_ratio": live,
        "over_the_law": {name: value / live for name, value in of_full.items()},
        "flops_per_second": flops / total["median"],
    }


def _ids(corpus: Corpus, tokens: int, which: Which, device: torch.device) -> dict[str, Tensor]:
    variants = ("full", "intra", "anchor")
    return {name: torch.from_numpy(corpus.row(tokens, name, which)["document_ids"]).to(device) for name in variants}


def _draw(bench: AttentionBench, tokens: int, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    heads = (bench.heads, bench.kv_heads, bench.kv_heads, bench.heads)
    q, k, v, weight = (
        torch.randn(1, tokens, n, bench.head_dim, device=device, generator=generator).to(dtype) for n in heads
    )
    return Inputs(q, k, v, weight)
