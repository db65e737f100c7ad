"""What a person sees of a run: the opening lines, the progress bar, the final table, `loss.png`."""

import io
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from torchtrain import data
from torchtrain.training.held_out import HeldOut
from torchtrain.training.losses import Mean

_SECONDS_BETWEEN_LINES = 5.0


def tell_tokenising(
    console: Console, spinner: Status, say: Callable[[str], None]
) -> Callable[[data.PreparationProgress], None]:
    """Return what takes the progress of tokenising: it stands at the spinner on a terminal; anywhere else it is a line
    when its state changes, and one every few seconds.
    """
    if console.is_terminal:
        return lambda progress: spinner.update(Text(str(progress)))
    state, told = "", 0.0

    def tell(progress: data.PreparationProgress) -> None:
        nonlocal state, told
        now = time.monotonic()
        if progress.state != state or now - told >= _SECONDS_BETWEEN_LINES:
            say(str(progress))
            state, told = progress.state, now

    return tell


class Display:
    """The progress of a run, a context manager: bars on a terminal, a line a step anywhere else.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def task(self, name: str, total: int, first: int = 0) -> Callable[[str], None]:
        """Begin a task of `total` steps, `first` of them done; return what takes a status when one more is done."""
        task = self._bars.add_task(name, total=total, completed=first, status="")
        began, done = time.monotonic(), itertools.count(first + 1)

        def advance(status: str) -> None:
            self._bars.update(task, advance=1, status=status)
            if not self._console.is_terminal:
                now = next(done)
                left = (time.monotonic() - began) / (now - first) * (total - now)
                self._console.print(
                    f"{name} {now}/{total} · {status} · {timedelta(seconds=round(left))} left", soft_wrap=True
                )

        return advance


def final_table(before: HeldOut, after: HeldOut, tokens_seen: int, tokens_per_second: float) -> Table:
    """Return the held-out loss of each domain, before and after, in nats per token, and what the training did."""
    caption = f"{tokens_seen:,} tokens seen, {tokens_per_second:,.0f} tokens/s"
    table = Table(title="Held-out loss (nats per token)", caption=caption)
    table.add_column("documents")
    for name in ("tokens", "before", "after", "change"):
        table.add_column(name, justify="right")
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
        table.add_row(escape(name), *numbers)  # a domain may be called [x], which is markup


def plot(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a PNG: training loss (all and per domain) over tokens seen, held-out losses before and after.

    Args:
        events: those of `metrics.jsonl`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluation"]

    def line(key: Callable[[Mapping[str, Any]], Any], name: str, color: str, width: float) -> None:
        there = [e for e in steps if key(e)]
        tokens, losses = [e["tokens_seen"] for e in there], [key(e)["loss"] for e in there]
        axes.plot(tokens, losses, color=color, linewidth=width, marker=".", alpha=0.7, label=f"training, {name}")
        tokens, losses = [e["tokens_seen"] for e in evaluations], [key(e)["loss"] for e in evaluations]
        style = {"linestyle": ":", "marker": "D", "markersize": 7, "markeredgecolor": "white"}
        axes.plot(tokens, losses, color=color, label=f"held out, {name}", **style)

    line(lambda e: e, "all", "black", 2)
    for index, domain in enumerate(evaluations[0]["domains"]):
        line(lambda e, domain=domain: e["domains"].get(domain), domain, f"C{index}", 1)

    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training and held-out loss")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    return drawn.getvalue()
