"""A result of `torchtrain bench`: written as JSON and Markdown, shown, and compared with an earlier one."""

import datetime
import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

import torchtrain
from anchorline.environment import git_state, processor, versions
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import read_json, replace_file, resolve_folder
from torchtrain.bench.attention import measure_attention
from torchtrain.bench.config import BenchConfig
from torchtrain.bench.measure import Clock, format_spread, noise_of, open_clock
from torchtrain.bench.step import measure_step

What = Literal["attention", "step"]
MEASURE = {"attention": measure_attention, "step": measure_step}
PACKAGES = ("torch", "transformers", "flash-attn", "flash-attn-4", "triton", "numpy")
# The names of a row that identify it, and its ratio that is compared.
_KEYS = {"attention": (("dtype", "tokens", "row", "name"), "of_full"), "step": (("tokens", "loop"), "of_yardstick")}


def run_bench(what: What, config: BenchConfig, out: Path, check: Path | None, say: Callable[[str], None]) -> list[str]:
    """Measure, and write OUT/WHAT.json and OUT/WHAT.md, each time a row is done: what was cut off is kept so far.

    Args:
        what: which measurement.
        config: its settings.
        out: the folder.
        check: an earlier result to compare with.
        say: takes one line at a time on what begins.

    Returns:
        What moved against the earlier result by more than both measured as noise, a line each.

    Raises:
        UserError: a setting, the folder or the earlier result cannot be used; nothing was measured.
    """
    folder = resolve_folder("--out", out)
    before = None if check is None else read_json(check, f"--check {quoted(check)}")
    if before is not None and (before.get("what") != what or not isinstance(before.get("rows"), list)):
        raise UserError(
            f"--check {quoted(check)}: is no result of `torchtrain bench {what}`; give a {what}.json of one"
        )
    clock = open_clock(config.device, config.threads)
    settings = config.model_dump(
        mode="json", include={"data", "tokenizer", "device", "threads", "repeats", "seed", what}
    )
    head = {"what": what, "environment": _describe_environment(clock), "settings": settings}

    def keep(found: dict[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / f"{what}.json", (json.dumps(head | found, indent=1) + "\n").encode())
            replace_file(folder / f"{what}.md", to_markdown(head | found).encode())
        except OSError as error:
            raise UserError(f"--out {quoted(folder)}: {disk_fault(error)}") from None

    result = head | MEASURE[what](config, clock, say, keep)
    print(to_markdown(result))
    return [] if before is None else compare(before, result)


def _describe_environment(clock: Clock) -> dict[str, Any]:
    """Return when, where and with what a result is made."""
    cuda = clock.device.type == "cuda"
    commit, changed = git_state(Path(torchtrain.__file__).parents[1])
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(clock.device) if cuda else processor(),
        "threads": None if cuda else torch.get_num_threads(),
        "seconds": "the CPU's, of one thread" if clock.counts_cpu_time else "the clock's",
        "commit": commit,
        "changed": changed,
        "versions": versions(PACKAGES),
        "command": shlex.join(["torchtrain", *sys.argv[1:]]),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each ratio that moved by more than the noise that both measured, and for each that is gone.

    Raises:
        UserError: the two have nothing in common, or the earlier one is damaged.
    """
    names, ratio = _KEYS[after["what"]]
    try:
        earlier = {tuple(str(row[name]) for name in names): row.get(ratio) for row in before["rows"]}
        pairs = [(key, earlier.get(key), row) for row in after["rows"] if (key := tuple(str(row[n]) for n in names))]
        shared = [(key, old, row) for key, old, row in pairs if old is not None]
        moved = [f"{', '.join(key)}: {said}" for key, old, row in shared if (said := _moved(old, row, ratio))]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError("--check: the earlier result is damaged or of another version; make it anew") from None
    if not shared:
        raise UserError("--check: the earlier result has nothing that was measured here; give one of the same config")
    return moved


def _moved(old: dict[str, float], row: dict[str, Any], ratio: str) -> str:
    if (new := row.get(ratio)) is None:
        return f"was measured, and is not any more: {row.get('not_run', 'no reason is known')}"
    change, noise = math.log(new["median"] / old["median"]), noise_of(old) + noise_of(new)
    if abs(change) <= noise:
        return ""
    ratios = f"{format_spread(old)} before, {format_spread(new)} now"
    return f"{ratios}: {math.exp(change) - 1:+.0%}, noise {math.exp(noise) - 1:.0%}"


def to_markdown(result: dict[str, Any]) -> str:
    """Return a result's tables as Markdown, under a line that says when, where and by which command it was made."""
    made, settings = result["environment"], result["settings"]
    packages = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    commit = f"commit {made['commit'][:12]}{', changed' if made['changed'] else ''}; " if made["commit"] else ""
    threads = f", {made['threads']} of its threads" if made["threads"] else ""
    turns = f"{settings['repeats']} turns; seconds are {made['seconds']}."
    head = f"{made['date']}, {made['device']}{threads}; {packages}; {commit}`{made['command']}`. {turns}"
    return "\n\n".join([head, *_TABLES[result["what"]](result)]) + "\n"


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown; its first column is aligned left, the others right."""
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)


def _attention_tables(result: dict[str, Any]) -> list[str]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in result["rows"]:
        if "not_run" in row:
            reasons.setdefault((name_of(row), row["not_run"]), {})[f"{row['dtype']}, {row['tokens']:,}"] = None
        else:
            groups.setdefault((row["dtype"], row["tokens"], row["row"], tuple(row["documents"])), []).append(row)
    head = ("", "forward ms", "backward ms", "time / full", "live pairs", "over the law", "GFLOP/s", "error")
    parts = []
    for (dtype, tokens, which, lengths), rows in groups.items():
        documents = f"{len(lengths)} documents of {min(lengths):,} to {max(lengths):,} tokens"
        parts.append(f"**{dtype}, {tokens:,} tokens, the row of {which} live pairs: {documents}**")
        parts.append(format_table(head, [_attention_row(row) for row in rows]))
    return [*parts, *(f"Not run: {name} ({'; '.join(where)}): {why}." for (name, why), where in reasons.items())]


def name_of(row: dict[str, Any]) -> str:
    """Return the name of a row of `bench attention`, for people."""
    return row["name"] if row["engine"] is None else f"torchtrain {row['name']}"


def _attention_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        name_of(row),
        f"{1e3 * row['forward']['median']:.1f}",
        f"{1e3 * row['backward']['median']:.1f}" if "backward" in row else "none here",
        format_spread(row["of_full"]),
        f"{row['live_ratio']:.3f}",
        format_spread(row["over_the_law"]),
        f"{row['flops_per_second'] / 1e9:.1f}",
        f"{row['error_ratio']:.2f}",
    )


def _step_tables(result: dict[str, Any]) -> list[str]:
    head = ("", "seconds", "of transformers, full", "tokens/s", "days per billion", "MFU", "error")
    rows = [
        (
            f"{row['tokens']:,} tokens, {row['loop']}",
            format_spread(row["seconds"]),
            format_spread(row["of_yardstick"]) if "of_yardstick" in row else "",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['days_per_billion']:,.1f}",
            f"{row['mfu']:.0%}",
            f"{result['losses'][row['loop']]['error_ratio']:.2f}" if row["loop"] in result["losses"] else "",
        )
        for row in result["rows"]
    ]
    title = f"**{result['model']}, {result['layers']} layers, {result['weights']:,} weights, {result['dtype']}**"
    return [title, format_table(head, rows), *(f"Not run: {name}: {why}." for name, why in result["not_run"].items())]


_TABLES = {"attention": _attention_tables, "step": _step_tables}
