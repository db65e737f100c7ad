"""From what was measured to a section of a page: every number of it is written here, none is typed."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anchorline.files import save
from anchorline.marked import MarkedPlace
from benchmarks.data import inputs, packing, tokenising

PLACE = MarkedPlace("<!-- made by benchmarks/data -->", "<!-- end of benchmarks/data -->")
HEAD = "# Benchmarks\n\nEach section is written by the program that it names, from the JSON that it names.\n\n"
_COMMAND = ".venv-rivals/bin/python -m benchmarks.data --work FOLDER --repeats {repeats} --write docs/benchmarks.md"


def write(path: Path, report: dict[str, Any]) -> None:
    """Put the section between its marks; a page that lacks them gets them at its end."""
    old = path.read_text(encoding="utf-8") if path.exists() else HEAD
    save(path, PLACE.put_or_append(old, _section(report)).encode())


def _section(report: dict[str, Any]) -> str:
    measured, told = report["measured"], report["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in told["packages"].items())
    parts = [
        "## Data",
        f"{told['date']}, {told['cpu']}, one of {told['cores']} cores, Python {told['python']}; {packages}. "
        f"`make rivals`, then `{_COMMAND.format(repeats=report['repeats'])}`; "
        "all of it is in `benchmarks/results/data.json`.",
        "Every measurement is a process of its own, pinned to one core with one thread; engines take turns, "
        f"{report['repeats']} times. Time is that of the CPU (the machine does other work), as the median and, in "
        "brackets, the least and the most. *Ours over it* is our rate over the other's, turn by turn, likewise: not "
        "settled where turns went either way. Memory is the most that the process held while it was timed, and in "
        "brackets what of that it held before.",
        "### Tokenising",
        f"SmolLM2's tokenizer on {inputs.CHARACTERS / 1e6:g} million characters of the demo's text in a JSONL file, "
        f"`whole` as its documents are, `cut` to a web corpus' lengths (lognormal, mean {inputs.MEAN:,} tokens, spread "
        f"{inputs.SPREAD:g}). All give the same tokens (their SHA-256 is compared). The rows of `tokenizers` read and "
        "write nothing: their texts are in memory.",
        _tables(measured, "tokenising", tokenising.KINDS, "tokens a second", _tokens_a_second),
        "### Packing",
        f"{int(packing.KINDS[0]):,} documents with such lengths, rows of {packing.LENGTH:,} tokens. TRL moves tokens "
        "as it packs (of one byte here, which is in its favour); ours plans from lengths, and reads tokens when a row "
        "is asked for, which the next table times. `wrapped` is the work of `sequential`, without its shuffle; "
        "`bfd_split` that of `best_fit`; `bfd` loses what is longer than a row. As it is called, TRL packs each batch "
        "of 1,000 documents alone.",
        _packing(measured),
        "### Reading rows",
        "A row of a step is five arrays, int64. `torchtrain` builds them when a row is asked for, from a plan made "
        "before; datatrove's come from its tokens and positions; streaming's were written ready, which takes "
        "20 times the disk of tokens and fixes the packing. *Tokens alone* is one array of the five, of rows that were "
        "laid out beforehand: less work, shown for scale. All rows hold the same tokens (compared).",
        _tables(measured, "reading", _kinds(measured, "reading"), "rows a second", _rows_a_second),
        "### How ranks wait",
        "Simulated, the first epoch: live pairs of a step's fullest row over the mean of its rows, in the mean of "
        "steps, each rank one row. 1 is no waiting. The paper publishes how many sequences and tokens each of "
        "SlimPajama's domains has, not how lengths spread within one: once with every document at its domain's mean, "
        "and once with lognormal lengths about it.",
        _balance(report["balance"]),
    ]
    return "\n\n".join(parts) + "\n"


def _tables(
    measured: list[dict[str, Any]], case: str, kinds: Any, unit: str, rate: Callable[[dict[str, Any]], float]
) -> str:
    parts = []
    for kind in kinds:
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


def _kinds(measured: list[dict[str, Any]], case: str) -> list[str]:
    return list(dict.fromkeys(one["kind"] for one in measured if one["case"] == case))


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


def _tokens_a_second(one: dict[str, Any]) -> float:
    return one["tokens"] / one["cpu_seconds"]


def _rows_a_second(one: dict[str, Any]) -> float:
    return one["rows"] / one["cpu_seconds"]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
