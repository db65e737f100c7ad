"""A figure is a caption and a few panels; a panel is drawn once, and shown as SVG on the page and as PNG in a folder.

Every colour is one of `anchorline.page.colours`: in a PNG it is what stands there, on the page it follows the reader's
scheme.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from anchorline.files import replace_file
from anchorline.page import inline
from anchorline.page.colours import LIGHT

INK, SOFT, LINE, PAPER = (LIGHT[name] for name in ("ink", "soft", "line", "paper"))
SCALE_INK, SCALE_INK_DEEP = LIGHT["scale-ink"], LIGHT["scale-ink-deep"]
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

    def is_numeric(self, column: int) -> bool:
        """Return whether a column holds only numbers."""
        return all(isinstance(row[column], (int, float)) for row in self.rows)


@dataclass(frozen=True)
class Figure:
    """What is shown together. `name` is its file's and its anchor's."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    in_shares: bool = False  # shows a column's share: the page adds what a share can be


def svg(panel: Panel, name: str, title: str) -> Markup:
    """Return one panel as an `<svg>` element of the page. name: no other panel of the page has it; title: of its
    figure.
    """
    drawn = io.StringIO()
    with _style(name):
        canvas = Canvas(figsize=(WIDTH * (1.75 if panel.wide else 1), panel.height), layout="constrained")
        panel.draw(canvas.subplots())
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return inline(drawn.getvalue(), panel.title or title)


def write_png(figure: Figure, path: Path) -> None:
    """All panels of a figure in one picture, two in a row, written beside and renamed."""
    rows: list[list[Panel]] = []
    for panel in figure.panels:
        if panel.wide or not rows or len(rows[-1]) == 2 or rows[-1][0].wide:
            rows.append([])
        rows[-1].append(panel)
    columns = 2 if any(len(row) == 2 or row[0].wide for row in rows) else 1
    heights = [max(panel.height for panel in row) for row in rows]
    drawn = io.BytesIO()
    with _style():
        canvas = Canvas(figsize=(WIDTH * columns, sum(heights) + 0.3 * len(rows)), layout="constrained")
        grid = canvas.add_gridspec(len(rows), columns, height_ratios=heights)
        for number, row in enumerate(rows):
            for place, panel in enumerate(row):
                part = canvas.add_subfigure(grid[number, :] if panel.wide else grid[number, place])
                part.suptitle(panel.title, x=0.02, ha="left", color=INK, fontsize=9.5)
                panel.draw(part.subplots())
        canvas.savefig(drawn, format="png", dpi=DPI)
    replace_file(path, drawn.getvalue())


def _style(name: str = "anchorline") -> AbstractContextManager[None]:
    """How matplotlib draws. name: the ids in an SVG are made from it."""
    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,
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
