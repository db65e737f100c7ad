"""The three ways in which this study draws numbers: lines, rows of dots, and a heat map.

Each returns a `Panel.draw`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anchorline.page import printable
from anchorline.page.colours import SCALE, SERIES
from ropestudy.report.figure import INK, MARKERS, SCALE_INK, SCALE_INK_DEEP, SOFT
from ropestudy.report.select import number
from ropestudy.schema import Stat

Draw = Callable[[Any], None]

APART = 20  # a logarithmic axis below this range has too few ticks to be read
LEAST = 1e-8  # less is float64's own noise: drawn open at the left edge


@dataclass(frozen=True)
class Line:
    """One line of points. `spread` is drawn as a bar of plus and minus one standard deviation."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = field(default_factory=tuple)
    colour: int | None = None  # of SERIES; None: the next
    thin: bool = False  # one of many samples: no marker, not in the legend twice


def of_stats(name: str, x: Sequence[float], stats: Sequence[Stat], colour: int | None = None) -> Line:
    """Make a line of means with their spreads."""
    return Line(name, x, [stat.mean for stat in stats], [stat.std for stat in stats], colour)


def lines(
    series: Sequence[Line],
    x: str,
    y: str,
    log_x: bool = False,
    named: bool = False,
) -> Draw:
    """Draw lines over x; y is logarithmic where the values reach over more than `APART`, and starts at 0 otherwise.

    named: x values are shown as equally spaced names, as the paper does with its shifts.
    """
    positive = [value for line in series for value in line.y if value > 0]
    log_y = bool(positive) and max(positive) > APART * min(positive)

    def draw(axes: Any) -> None:
        places = {value: i for i, value in enumerate(sorted({value for line in series for value in line.x}))}
        legend: dict[str, Any] = {}
        for order, line in enumerate(series):
            colour = SERIES[(order if line.colour is None else line.colour) % len(SERIES)]
            marker = MARKERS[(order if line.colour is None else line.colour) % len(MARKERS)]
            at = [places[value] for value in line.x] if named else list(line.x)
            if line.thin:
                alone = marker if len(at) == 1 else ""
                (drawn,) = axes.plot(at, line.y, alone, color=colour, linewidth=0.9, alpha=0.8)
            else:
                spread = line.spread if any(line.spread) else None
                error = _within(line.y, spread, log_y)
                drawn = axes.errorbar(at, line.y, error, color=colour, marker=marker, elinewidth=0.9, capsize=1.5)
            legend.setdefault(_plain(line.name), drawn)
        if named:
            axes.set_xticks(list(places.values()), [f"{value:g}" for value in places], rotation=90)
        if log_x:
            axes.set_xscale("log", base=2)
            shown = _apart(sorted({value for line in series for value in line.x if value > 0}))
            axes.set_xticks(shown, [f"{value:g}" for value in shown])
        if log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(xlabel=x, ylabel=y)
        if legend:
            _legend(axes, list(legend.values()), list(legend))

    return draw


def _plain(text: str) -> str:
    """A name as it is: matplotlib would read formulas between dollar signs."""
    return printable(text).replace("$", r"\$")


def _apart(values: Sequence[float]) -> list[float]:
    """Return as many of the rising values as stand apart on a logarithmic axis, the first and the last among them."""
    room = math.log(values[-1] / values[0]) / 8 if len(values) > 1 else 0.0
    kept = list(values[:1])
    for value in values[1:-1]:
        if math.log(value / kept[-1]) >= room and math.log(values[-1] / value) >= room:
            kept.append(value)
    return [*kept, *values[1:][-1:]]


def _legend(axes: Any, drawn: list[Any], names: list[str]) -> None:
    """Above the axes, where it covers nothing; in as many columns as there is room for."""
    inches = axes.figure.bbox.width / axes.figure.get_dpi()
    columns = max(1, int(0.75 * inches / (0.07 * max(map(len, names)) + 0.5)))
    axes.legend(drawn, names, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2, borderpad=0, ncols=columns)


def _within(values: Sequence[float], spread: Sequence[float] | None, log: bool) -> Any:
    """Bars that do not reach below zero on a logarithmic scale."""
    if spread is None:
        return None
    below = [min(s, 0.9 * v) if log else s for v, s in zip(values, spread, strict=True)]
    return [below, list(spread)]


@dataclass(frozen=True)
class Dots:
    """One mark in every row that has a value."""

    name: str
    values: Sequence[float | None]
    spread: Sequence[float] = field(default_factory=tuple)


def dots(
    rows: Sequence[str],
    series: Sequence[Dots],
    x: str,
    log: bool = False,
    mark: float | None = None,
    most: float = math.inf,
) -> Draw:
    """Draw named rows from top to bottom, a dot for each series. mark: a vertical line to compare with.

    most: what is larger is drawn at the edge and told in figures. On a logarithmic scale what is below `LEAST` is drawn
    open, at the left edge.
    """

    def draw(axes: Any) -> None:
        known = [v for one in series for v in one.values if v is not None]
        shown = [v for v in known if v >= LEAST] if log else known
        edge = min(shown, default=1.0) / 3
        for order, one in enumerate(series):
            shift = 0.0 if len(series) == 1 else 0.5 * (order / (len(series) - 1) - 0.5)
            style = {"marker": MARKERS[order % len(MARKERS)], "color": SERIES[order % len(SERIES)], "linestyle": "none"}
            seen = [(row + shift, v) for row, v in enumerate(one.values) if v is not None]
            full = [(at, min(v, most)) for at, v in seen if not log or v >= LEAST]
            axes.plot([v for _, v in full], [at for at, _ in full], label=one.name, **style)
            noise = [at for at, v in seen if log and v < LEAST]
            axes.plot([edge] * len(noise), noise, markerfacecolor="none", **style)
            for at, value in seen:
                if value > most:
                    axes.text(most, at, f"{number(value)} →  ", ha="right", va="center", color=INK, fontsize=7.5)
        if mark is not None:
            axes.axvline(mark, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        if log:
            axes.set_xscale("log")
            axes.set_xlim(edge / 1.3, 3 * max(shown, default=1.0))
        else:
            axes.set_xlim(left=-0.015 * max(1e-300, *(min(v, most) for v in known)) if known else 0)
        axes.set_yticks(range(len(rows)), [_plain(row) for row in rows])
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(x)
        axes.spines.left.set_visible(False)
        if len(series) > 1:
            _legend(axes, *axes.get_legend_handles_labels())

    return draw


def heat(names: Sequence[str], cells: Sequence[Sequence[float | None]], x: str, y: str) -> Draw:
    """Draw a square of numbers, shaded in steps by their place between the least and the largest, each written in its
    cell.
    """

    def draw(axes: Any) -> None:
        known = [v for row in cells for v in row if v is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                if value is None:
                    continue
                step = min(len(SCALE) - 1, int(len(SCALE) * (value - low) / (high - low))) if high > low else 0
                axes.fill(
                    [j - 0.5, j + 0.5, j + 0.5, j - 0.5], [i - 0.5, i - 0.5, i + 0.5, i + 0.5], color=SCALE[step], lw=0
                )
                ink = SCALE_INK if step < 4 else SCALE_INK_DEEP
                axes.text(j, i, number(value), ha="center", va="center", color=ink, fontsize=6.5)
        axes.grid(False)
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set(xlabel=x, ylabel=y)
        axes.spines[["left", "bottom"]].set_visible(False)

    return draw
