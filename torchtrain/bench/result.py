"""Run `torchtrain bench`, and write its result as JSON and Markdown."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

import torchtrain
from anchorline.environment import git_state, processor, versions
from anchorline.errors import UserError, disk_fault, print, quoted
from anchorline.files import replace_file, resolve_folder
from torchtrain.bench.attention import measure_attention
from torchtrain.bench.config import BenchConfig
from torchtrain.bench.measure import Clock, format_spread, open_clock
from torchtrain.bench.step import measure_step

What = Literal["attention", "step"]
MEASURE = {"attention": measure_attention, "step": measure_step}
PACKAGES = ("torch", "transformers", "flash-attn", "flash-attn-4", "triton", "numpy")


def run_bench(what: What, config: BenchConfig, out: Path, log: Callable[[str], None]) -> None:
    """Measure, and write OUT/WHAT.json and OUT/WHAT.md after each row, so that an interruption loses little.

    Args:
        what: the measurement.
        config: its settings.
        out: the folder.
        log: called with a line when a part begins.

    Raises:
        UserError: a setting or the folder cannot be used.
    """
    folder = resolve_folder("--out", out)
    clock = open_clock(config.device, config.threads)
    settings = config.model_dump(mode="json", include={"data", "tokenizer", "device", "threads", "repeats", what})
    head = {"what": what, "environment": _describe_environment(clock), "settings": settings}

    def save(result: dict[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / f"{what}.json", (json.dumps(head | result, indent=1) + "\n").encode())
            replace_file(folder / f"{what}.md", to_markdown(head | result).encode())
        except OSError as error:
            raise UserError(f"--out {quoted(folder)}: {disk_fault(error)}") from None

    print(to_markdown(head | MEASURE[what](config, clock, log, save)))
    print(f"results in {folder}")


def _describe_environment(clock: Clock) -> dict[str, Any]:
    """Return the date, the machine and the versions of a result."""
    cuda = clock.device.type == "cuda"
    commit, changed = git_state(Path(torchtrain.__file__).parents[1])
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(clock.device) if cuda else processor(),
        "threads": None if cuda else torch.get_num_threads(),
        "seconds": "CPU time of one thread" if clock.counts_cpu_time else "wall time",
        "commit": commit,
        "changed": changed,
        "versions": versions(PACKAGES),
        "command": shlex.join(["torchtrain", *sys.argv[1:]]),
    }


def to_markdown(result: dict[str, Any]) -> str:
    """Return a result's tables as Markdown, below a line with date, machine, versions and command."""
    made, settings = result["environment"], result["settings"]
    packages = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    commit = f"commit {made['commit'][:12]}{', changed' if made['changed'] else ''}; " if made["commit"] else ""
    threads = f", {made['threads']} of its threads" if made["threads"] else ""
    turns = f"{settings['repeats']} turns; seconds are {made['seconds']}."
    head = f"{made['date']}, {made['device']}{threads}; {packages}; {commit}`{made['command']}`. {turns}"
    return "\n\n".join([head, *_TABLES[result["what"]](result)]) + "\n"


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as Markdown; the first column is aligned left, the others right."""
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
    """Return the display name of a row of `bench attention`."""
    return row["name"] if row["engine"] is None else f"torchtrain {row['name']}"


def _attention_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        name_of(row),
        f"{1e3 * row['forward']['median']:.1f}",
        f"{1e3 * row['backward']['median']:.1f}" if "backward" in row else "none",
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
