"""A result as tables: on the screen, and in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as ScreenTable

from torchtrain.bench.memory import WAYS
from torchtrain.bench.spread import show
from torchtrain.planning.budget import LAYER_CHUNK

_GIB = 2**30


@dataclass(frozen=True)
class BenchTable:
    """A title, a head and rows of text."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """Return the table as Markdown, its title before it."""
        lines = [self.head, ("---", *("---:" for _ in self.head[1:])), *self.rows]
        body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)
        return f"**{self.title}**\n\n{body}"

    def screen(self) -> ScreenTable:
        """Return the table for a terminal."""
        table = ScreenTable(*self.head, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        return table


def tables_of(result: dict[str, Any]) -> list[ScreenTable]:
    """Return a result's tables for a terminal."""
    return [table.screen() for table in _TABLES[result["what"]](result)]


def markdown_of(result: dict[str, Any]) -> str:
    """Return a result's tables as Markdown, with what was measured, when, where and by which command."""
    told, settings = result["environment"], result["settings"]
    packages = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    commit = f"commit {told['commit'][:12]}{', changed' if told['changed'] else ''}; " if told["commit"] else ""
    threads = f", {told['threads']} of its threads" if told["threads"] else ""
    turns = "" if result["what"] == "memory" else f" {settings['repeats']} turns; seconds are {told['seconds']}."
    head = f"{told['date']}, {told['device']}{threads}; {packages}; {commit}`{told['command']}`.{turns}"
    return "\n\n".join([head, *(table.markdown() for table in _TABLES[result["what"]](result))]) + "\n"


def _attention(result: dict[str, Any]) -> list[BenchTable]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["dtype"], row["tokens"], row["row"]), []).append(row)
    head = ("", "forward ms", "backward ms", "time / full", "live pairs", "over the law", "GFLOP/s", "error")
    tables = []
    for (dtype, tokens, which), own in groups.items():
        n = own[0]["documents"]
        lengths = f"{len(n)} documents of {min(n):,} to {max(n):,}" if len(n) > 1 else "one document"
        run = [_attention_row(row) for row in own if "not_run" not in row]
        tables.append(BenchTable(f"{dtype}, {tokens:,} tokens, the row of {which} live pairs: {lengths}", head, run))
    return [*tables, *_left_out(result["rows"])]


def _left_out(rows: list[dict[str, Any]]) -> list[BenchTable]:
    """What did not run, once for each reason."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if "not_run" in row:
            name = row["name"] if row["engine"] is None else f"torchtrain {row['engine']}"
            reasons.setdefault((name, row["not_run"]), {})[f"{row['dtype']}, {row['tokens']:,}"] = None
    if not reasons:
        return []
    everywhere = len({(row["dtype"], row["tokens"]) for row in rows})
    told = [
        (name, "everywhere" if len(where) == everywhere else "; ".join(where), why)
        for (name, why), where in reasons.items()
    ]
    return [BenchTable("Not run", ("", "where", "why"), told)]


def _attention_row(row: dict[str, Any]) -> tuple[str, ...]:
    name = row["name"] if row["engine"] is None else f"torchtrain {row['name']}"
    return (
        name,
        f"{1e3 * row['forward']['median']:.1f}",
        f"{1e3 * row['backward']['median']:.1f}" if "backward" in row else "none here",
        show(row["of_full"]),
        f"{row['live_ratio']:.3f}",
        show(row["over_the_law"]),
        f"{row['flops_per_second'] / 1e9:.1f}",
        f"{row['error_ratio']:.2f}",
    )


def _step(result: dict[str, Any]) -> list[BenchTable]:
    layers, weights = result["layers"], result["weights"]
    losses = [
        (name, f"{found['tokens']:,}", f"{found['mean']:.5f}", f"{found['error_ratio']:.2f}")
        for name, found in result["losses"].items()
    ]
    rows = [
        (
            f"{row['tokens']:,} tokens, {row['loop']}",
            show(row["seconds"]),
            show(row["of_yardstick"]) if "of_yardstick" in row else "",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['days_per_billion']:,.1f}",
            f"{row['mfu']:.0%}",
            f"{row['executed_share']:.0%}",
            f"{row['ceiling']['median'] / 1e9:,.0f}",
        )
        for row in result["rows"]
    ]
    rows += [(name, f"not run: {why}", *("" for _ in range(6))) for name, why in result["not_run"].items()]
    head = (
        "",
        "seconds",
        "of transformers, full",
        "tokens/s",
        "days per billion",
        "MFU",
        "executed",
        "ceiling, GFLOP/s",
    )
    title = f"A step of one row: {result['model']}, {layers} layers, {weights:,} weights, {result['dtype']}"
    tables = [
        BenchTable(
            "Losses before anything is learned", ("", "tokens", "nats per token", "error over allowance"), losses
        ),
        BenchTable(title, head, rows),
    ]
    if result["modelled"]:
        asked = result["settings"]["step"]["modelled"]
        title = f"Modelled, not measured: {asked['model']} on {asked['processes']} x {asked['gpu']} at an MFU of "
        tables.append(
            BenchTable(
                f"{title}{asked['mfu']:g}, which is assumed",
                ("tokens, variant", "FLOPs of a row", "days per billion tokens"),
                [
                    (f"{row['tokens']:,}, {row['variant']}", f"{row['flops']:.3g}", f"{row['days_per_billion']:.2f}")
                    for row in result["modelled"]
                ],
            )
        )
    return tables


def _memory(result: dict[str, Any]) -> list[BenchTable]:
    trained = dict.fromkeys(row.get("trained") for row in result["rows"])
    tables = [_contexts(result, what) for what in trained]
    if (told := result["explained"]) is not None:
        asked = result["settings"]["memory"]["explained"]
        name, count = asked["model"].rpartition("/")[2], asked["processes"]
        parts = [(what, f"{size / _GIB:.1f}") for what, size in told["parts"].items()]
        parts.append(("activations", f"{told['activations'] / _GIB:.1f}"))
        parts += [(f"of them {one['dtype']} {one['shape']}", f"{one['bytes'] / _GIB:.1f}") for one in told["alive"]]
        parts += [("all", f"{told['gpu'] / _GIB:.1f}"), ("the hosts", f"{told['hosts'] / _GIB:.1f}")]
        title = f"{name} at {asked['tokens']:,} tokens on {count} x GPU, GiB when it holds most, with `{told['way']}`"
        tables.append(BenchTable(title, ("", "GiB"), parts))
    return tables


def _contexts(result: dict[str, Any], trained: str | None) -> BenchTable:
    rows = [
        (
            f"{row['model'].rpartition('/')[2]}, {row['processes']} x {row['gib']:g} GiB",
            f"{row['shared']}",
            *(_context(row[way], row["counted"]) for way in WAYS),
            "" if row["hosts"] is None else f"{row['hosts'] / _GIB:,.0f}",
        )
        for row in result["rows"]
        if row.get("trained") == trained
    ]
    head = (
        "model, GPUs",
        "GPUs to a row",
        "layers computed again",
        "+ optimizer on the hosts",
        "+ weights on the hosts",
        f"+ chunks of {LAYER_CHUNK:,} tokens",
        "+ inputs of layers on the hosts",
        "hosts then hold, GiB",
    )
    what = "every weight"
    if trained is not None:
        lora = result["settings"]["memory"]["lora"]
        targets = lora["target_modules"]
        of = targets if isinstance(targets, str) else ", ".join(targets)
        what = ", ".join([f"{trained} (LoRA) of rank {lora['rank']} beside {of}", *lora["also_train"]])
    title = f"Longest context in tokens, {what} trained, by what is switched on (~: by a line that goes on)"
    return BenchTable(title, head, rows)


def _context(tokens: int | None, counted: int) -> str:
    if tokens is None:
        return "does not fit"
    return f"{'~ ' if tokens > counted else ''}{tokens:,}"


_TABLES = {"attention": _attention, "step": _step, "memory": _memory}
