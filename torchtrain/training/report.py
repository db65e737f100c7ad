"""What a person sees of a run: the opening lines, the progress bar, the final table, `loss.png`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchtrain.training.evaluate import HeldOut
from torchtrain.training.metrics import Mean


def progress_bar(console: Console) -> Progress:
    """Return a progress bar whose tasks carry a field `status`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
    )


def step_status(event: Mapping[str, Any]) -> str:
    """Return loss, tokens/s and, where it is known, MFU of a step's event."""
    status = f"loss {event['loss']:.4f} · {event['tokens_per_second']:,.0f} tokens/s"
    return status + (f" · MFU {event['mfu']:.1%}" if "mfu" in event else "")


def final_table(before: HeldOut, after: HeldOut) -> Table:
    """Return the held-out loss of each domain, before and after, in nats per token."""
    table = Table(title="Held-out loss (nats per token)")
    for name, justify in (("documents", "left"), ("tokens", "right"), ("before", "right"), ("after", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("change", justify="right")
    for domain, mean in before.by_domain.items():
        _add(table, domain, mean, after.by_domain[domain])
    table.add_section()
    _add(table, "all", before.overall, after.overall)
    _add(table, f"positions beyond {before.own_positions:,}", before.new_positions, after.new_positions)
    return table


def _add(table: Table, name: str, before: Mean, after: Mean) -> None:
    if before.value is not None and after.value is not None:
        numbers = (
            f"{before.tokens:,}",
            f"{before.value:.4f}",
            f"{after.value:.4f}",
            f"{after.value - before.value:+.4f}",
        )
        table.add_row(name, *numbers)


def plot(events: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the training loss (all and per domain) over tokens seen, and the held-out losses before and after.

    Args:
        events: those of `metrics.jsonl`.
        path: the PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluation"]

    axes.plot(
        [e["tokens_seen"] for e in steps], [e["loss"] for e in steps], color="black", linewidth=2, label="training, all"
    )
    _mark(axes, evaluations, [e["loss"] for e in evaluations], "black", "held out, all")
    for index, domain in enumerate(evaluations[0]["domains"]):
        own = [e for e in steps if domain in e["domains"]]
        losses = [e["domains"][domain]["loss"] for e in own]
        axes.plot(
            [e["tokens_seen"] for e in own],
            losses,
            color=f"C{index}",
            linewidth=1,
            alpha=0.7,
            label=f"training, {domain}",
        )
        held_out = [e["domains"][domain]["loss"] for e in evaluations]
        _mark(axes, evaluations, held_out, f"C{index}", f"held out, {domain}")

    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training and held-out loss")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=120)


def _mark(axes: Any, evaluations: Sequence[Mapping[str, Any]], losses: Sequence[float], color: str, label: str) -> None:
    tokens = [e["tokens_seen"] for e in evaluations]
    axes.plot(
        tokens, losses, color=color, linestyle=":", marker="D", markersize=7, markeredgecolor="white", label=label
    )
