"""From what was measured to tables, as Markdown. docs/benchmarks.md holds them and says what each measures."""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.data import packing


def tables_of(report: dict[str, Any]) -> str:
    """Return the tables of tokenising, packing, reading and waiting.

    Times are the CPU's: the median and, in brackets, the least and the most. `ours over it` is our rate over the
    other's, turn by turn.
    """
    measured = report["measured"]
    return "\n\n".join(
        [
            _tables(measured, "tokenising", "tokens a second", lambda one: one["tokens"] / one["cpu_seconds"]),
            _packing(measured),
            _tables(measured, "reading", "rows a second", lambda one: one["rows"] / one["cpu_seconds"]),
            _balance(report["balance"]),
        ]
    )


def _tables(measured: list[dict[str, Any]], case: str, unit: str, rate: Callable[[dict[str, Any]], float]) -> str:
    parts = []
    for kind in dict.fromkeys(one["kind"] for one in measured if one["case"] == case):
        rows = []
        for engine, own in _by_engine(measured, case, kind).items():
            if missing := own[0].get("missing"):
                rows.append((engine, f"not run: {missing} is not installed", "", ""))
                continue
            rates = sorted(rate(one) for one in own)
            middle = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})"
            rows.append((engine, middle, _ratio(measured, case, kind, engine, rate), _memory(own)))
        _check_same(measured, case, kind)
        parts.append(_table((kind, unit, "ours over it", "peak memory, MiB"), rows))
    return "\n\n".join(parts)


def _packing(measured: list[dict[str, Any]]) -> str:
    rows = []
    for engine, own in _by_engine(measured, "packing", packing.KINDS[0]).items():
        if missing := own[0].get("missing"):
            rows.append((engine, f"not run: {missing} is not installed", "", "", ""))
            continue
        seconds = sorted(one["cpu_seconds"] for one in own)
        middle = f"{statistics.median(seconds):.3g} ({seconds[0]:.3g} to {seconds[-1]:.3g})"
        rows.append((engine, middle, f"{own[0]['rows']:,}", f"{own[0]['dropped']:,}", _memory(own)))
    return _table(("", "seconds", "rows", "tokens lost", "peak memory, MiB"), rows)


def _balance(found: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"{one['corpus']}: {one['tokens'] / 1e6:,.0f} million tokens, rows of {one['sequence_length']:,}",
            f"{one['ranks']}",
            f"{one['steps']:,}",
            f"{one['sequential']:.3f}",
            f"{one['by_length']:.3f}",
        )
        for one in found
    ]
    return _table(("corpus", "ranks", "steps", "sequential", "by_length"), rows)


def _by_engine(measured: list[dict[str, Any]], case: str, kind: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in measured:
        if (one["case"], one["kind"]) == (case, kind):
            found.setdefault(one["engine"], []).append(one)
    return found


def _check_same(measured: list[dict[str, Any]], case: str, kind: str) -> None:
    digests = {one["digest"] for own in _by_engine(measured, case, kind).values() for one in own if "digest" in one}
    assert len(digests) == 1, f"{case}, {kind}: engines gave other tokens"


def _ratio(
    measured: list[dict[str, Any]], case: str, kind: str, engine: str, rate: Callable[[dict[str, Any]], float]
) -> str:
    """Return the median of ratios repeat by repeat, their least and most, and whether these leave it open."""
    by_engine = _by_engine(measured, case, kind)
    ours = next(iter(by_engine.values()))
    pairs = zip(ours, by_engine[engine], strict=True)
    ratios = sorted(rate(one) / rate(other) for one, other in pairs)
    middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{middle}, not settled" if ratios[0] < 1 < ratios[-1] else middle


def _memory(own: list[dict[str, Any]]) -> str:
    peak, before = (max(one[name] for one in own) / 2**20 for name in ("peak_bytes", "bytes_before"))
    return f"{peak:,.0f} ({before:,.0f})"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
