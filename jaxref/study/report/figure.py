"""A figure is a caption and a few panels; a panel is drawn once, and shown as SVG on the page and as PNG in a folder.

Every colour is one of `PALETTE`. In the page's SVG each becomes a custom property of its style sheet, which knows what it is
in a light and in a dark scheme; in a PNG it is what stands here.
"""

import html
import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

from jaxref.study.report.select import printable

INK, SOFT, LINE, PAPER = "#1d2125", "#5b646d", "#dfe3e6", "#ffffff"
SERIES = ("#1f5f86", "#c2501d", "#2c7a5b", "#7a4ea3", "#8a6d00", "#b03a6b", "#4a6573", "#3b3bb5")
SCALE = ("#f2f6f8", "#d9e7ee", "#b8d3e1", "#8fbad0", "#5f9abb", "#356f92")  # of heat maps, little to much
SCALE_INK, SCALE_INK_DEEP = "#14212b", "#fdfefe"  # on the first four, on the last two

PALETTE = {
    **{INK: "ink", SOFT: "soft", LINE: "line", PAPER: "paper"},
    **{colour: f"s{i}" for i, colour in enumerate(SERIES)},
    **{colour: f"h{i}" for i, colour in enumerate(SCALE)},
    **{SCALE_INK: "h-ink", SCALE_INK_DEEP: "h-ink-deep"},
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

WIDTH, HEIGHT = 4.7, 3.3  # inches of a panel; a wide one has two panels' width
DPI = 110


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `draw` fills them."""

    title: str
    draw: Callable[[Any], None]
    wide: bool = False
    height: float = HEIGHT


@dataclass(frozen=True)
class Table:
    """Numbers beside a figure. Cells are text or numbers; numbers are kept whole in CSV."""

    name: str
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | float]]


@dataclass(frozen=True)
class Figure:
    """What is shown together. `name` is its file's and its anchor's."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    in_shares: bool = False  # shows a column's share: the page adds what a share can be


def svg(panel: Panel, prefix: str) -> str:
    """One panel as an `<svg>` element without any style of its own. prefix: makes its ids unique on the page."""
    text = io.StringIO()
    with _style():
        canvas = Canvas(figsize=(WIDTH * (1.75 if panel.wide else 1), panel.height), layout="constrained")
        axes = canvas.subplots()
        panel.draw(axes)
        canvas.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", drawn, flags=re.S)
    drawn = re.sub(r'\sstyle="([^"]*)"', _attributes, drawn)
    drawn = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}-", drawn)
    drawn = re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found.group()), drawn)
    opening = re.match(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", drawn)
    assert opening
    return f'<svg viewBox="{opening.group(1)}" role="img" aria-label="{html.escape(printable(panel.title))}">{re.sub(chr(10) + " *", chr(10), drawn[opening.end() :]).strip()}'


def write_png(figure: Figure, path: Path) -> None:
    """All panels of a figure in one picture, two in a row, written beside and renamed."""
    rows: list[list[Panel]] = []
    for panel in figure.panels:
        if panel.wide or not rows or len(rows[-1]) == 2 or rows[-1][0].wide:
            rows.append([])
        rows[-1].append(panel)
    columns = 2 if any(len(row) == 2 or row[0].wide for row in rows) else 1
    heights = [max(panel.height for panel in row) for row in rows]
    partial = path.with_name(f".{path.name}.partial")
    with _style():
        canvas = Canvas(figsize=(WIDTH * columns, sum(heights) + 0.3 * len(rows)), layout="constrained")
        grid = canvas.add_gridspec(len(rows), columns, height_ratios=heights)
        for number, row in enumerate(rows):
            for place, panel in enumerate(row):
                part = canvas.add_subfigure(grid[number, :] if panel.wide else grid[number, place])
                part.suptitle(panel.title, x=0.02, ha="left", color=INK, fontsize=9.5)
                panel.draw(part.subplots())
        canvas.savefig(partial, format="png", dpi=DPI)
    partial.replace(path)


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "anchorline",
            "font.family": "DejaVu Sans",
            "font.size": 8.5,
            "axes.titlesize": 9.5,
            "axes.labelsize": 8.5,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.fontsize": 8,
            "legend.frameon": False,
            "text.color": INK,
            "axes.labelcolor": SOFT,
            "axes.edgecolor": LINE,
            "axes.facecolor": "none",
            "figure.facecolor": PAPER,
            "savefig.facecolor": PAPER,
            "xtick.color": LINE,
            "ytick.color": LINE,
            "xtick.labelcolor": SOFT,
            "ytick.labelcolor": SOFT,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "axes.grid": True,
            "grid.color": LINE,
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "lines.linewidth": 1.4,
            "lines.markersize": 4,
        }
    )


def _attributes(found: re.Match[str]) -> str:
    """A style attribute as presentation attributes, which the page's policy allows."""
    made = ""
    for part in filter(str.strip, found.group(1).split(";")):
        key, value = (word.strip() for word in part.split(":", 1))
        if key == "font":  # `8px "DejaVu Sans", ...`: the size alone; the family is the page's
            key, value = "font-size", value.split("px")[0].split()[-1] + "px"
        if key != "font-family":
            made += f' {key}="{value}"'
    return made


def _variable(colour: str) -> str:
    return f"var(--{PALETTE[colour]})"
