"""matplotlib's settings for all figures, and how a page includes a figure."""
# pyright: reportUnknownMemberType=false
# matplotlib has incomplete types.

import base64
import io
from collections.abc import Callable
from typing import Any

from markupsafe import Markup, escape

SERIES = ("#1f5f86", "#c2501d", "#2c7a5b", "#7a4ea3", "#8a6d00", "#b03a6b", "#4a6573", "#3b3bb5")
_INK, _SOFT = "#1d2125", "#5b646d"


def figure_style(name: str) -> dict[Any, Any]:
    """Return matplotlib's settings for a figure. The ids in its SVG come from `name`: a file is the same each time."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _SOFT,
        "xtick.color": _SOFT,
        "ytick.color": _SOFT,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,
    }


def draw_svg(name: str, put: Callable[[Any], None], size: tuple[float, float] = (6.4, 3.4)) -> str:
    """Return a drawing as SVG in the look of all figures, its size in inches; `put` draws on a figure of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = io.StringIO()
    with matplotlib.rc_context(figure_style(name)):
        canvas = Figure(figsize=size, layout="constrained")
        put(canvas)
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()


def inline(drawn: str, label: str) -> Markup:
    """Return an SVG file's text as an `<img>` of a page. label: for screen readers."""
    data = base64.b64encode(drawn.encode()).decode()
    return Markup('<img src="data:image/svg+xml;base64,{}" alt="{}">').format(data, escape(label))
