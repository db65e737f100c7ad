"""`torchtrain bench attention`: the time of attention under a mask, as a share of full causal attention's.

The share is also compared with the share of query-key pairs that the mask leaves. All cases run in turns on the same
tensors of one row of real documents, forward and backward, and each turn gives a ratio to full causal attention. Before
that, all cases are judged against float64 on a shorter row. An engine of torchtrain that breaks the error rule is not
timed. An alternative to torchtrain (a rival) is timed in any case, and its error is in the result.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from anchorline.errors import UserError, one_line
from torchtrain.attention import make_plan
from torchtrain.bench.cases import (
    VARIANTS,
    YARDSTICK,
    Prepared,
    engine_forward,
    leaves_of,
    list_cases,
    prepare_case,
    run_case,
)
from torchtrain.bench.config import AttentionBench, BenchConfig
from torchtrain.bench.measure import Clock, error_ratio, spread_of
from torchtrain.bench.rows import Corpus, Which

# FLOPs for each live pair, head and unit of D. The backward pass recomputes the scores.
WORK = {"forward": 4, "backward": 10}


def measure_attention(
    config: BenchConfig, clock: Clock, log: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure every case at every length.

    Args:
        config: the settings.
        clock: of the device.
        log: called with a line when a part begins.
        save: called with the result so far after each row.

    Returns:
        The result, without its environment.
    """
    bench, corpus, rows = config.attention, Corpus(config), list[dict[str, Any]]()
    result = {"heads": [bench.heads, bench.kv_heads, bench.head_dim], "rows": rows}
    for name in bench.dtypes:
        dtype = getattr(torch, name)
        count = len(list_cases(bench))
        log(f"checking {name}: {count} computations on {_checked_tokens(bench):,} tokens against float64")
        errors = _check(config, corpus, dtype, clock)
        for tokens, which in product(bench.lengths, bench.rows):
            log(f"timing {name}, {tokens:,} tokens, the row of {which} live pairs, {config.repeats} turns")
            rows += _time(config, corpus, tokens, which, dtype, clock, errors)
            save(result)
    return result


def _checked_tokens(bench: AttentionBench) -> int:
    """Return the tokens of the row on which all cases are judged before they are timed."""
    return min(1024, max(bench.lengths))


def _check(config: BenchConfig, corpus: Corpus, dtype: torch.dtype, clock: Clock) -> dict[str, dict[str, Any]]:
    """Return each case's error by the error rule, or the reason why the case cannot run."""
    bench = config.attention
    ids_T = _document_ids(corpus, _checked_tokens(bench), "least", clock.device)
    inputs = _draw(bench, _checked_tokens(bench), dtype, clock.device)

    @cache
    def references(variant: str, window: int | None) -> tuple[list[Tensor], list[Tensor]]:
        plan = make_plan(ids_T[variant][None])
        dense = Prepared(engine_forward(plan, "dense", window), plan.live_pairs)
        return run_case(dense, [x.double() for x in inputs]), run_case(dense, inputs)

    errors = dict[str, dict[str, Any]]()
    for case in list_cases(bench):
        try:
            prepared = prepare_case(case, ids_T, bench, dtype)
        except UserError as error:
            errors[case.name] = {"not_run": one_line(error)}
            continue
        # Each copy of a BOS has a separate gradient: only the gradients of other tokens are compared.
        own = slice(None) if prepared.own is None else slice(1, None)
        results = zip(
            ("out", "dq", "dk", "dv"), run_case(prepared, inputs), *references(case.variant, case.window), strict=False
        )
        ratios = {name: error_ratio(x[:, own], y[:, own], z[:, own], dtype) for name, x, y, z in results}
        worst = max(ratios, key=lambda name: ratios[name])
        errors[case.name] = {"error_ratio": ratios[worst]}
        if case.engine is not None and ratios[worst] > 1:
            errors[case.name]["not_run"] = (
                f"the error of {worst} is {ratios[worst]:.3g} times what the error rule allows"
            )
    return errors


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
    leaves, weight = leaves_of(prepared, inputs)
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
    """Summarise the turns of a case. Without a backward pass it is compared with the yardstick's forward pass."""
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
