"""A result as a drawing."""

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator

from anchorline.page import figure_style
from anchorline.page.colours import SERIES

MARKERS = "os^D"


def draw(result: dict[str, Any], paper: str = "none") -> str | None:
    """Return a result's figure as SVG on paper of some colour, or None where it has none."""
    lines = {"attention": _attention, "step": _step}.get(result["what"])
    if lines is None:
        return None
    found, y = lines(result)
    if not found:
        return None
    with matplotlib.rc_context(figure_style(f"bench-{result['what']}")):
        canvas = Canvas(figsize=(7.2, 3.4), layout="constrained")
        axes = canvas.add_subplot()
        lengths = sorted({x for points in found.values() for x, *_ in points})
        for number, (name, points) in enumerate(found.items()):
            again, colour = divmod(number, len(SERIES))  # more lines than colours: another marker
            xs, middle, low, high = zip(*points, strict=True)
            bars = [
                [m - a for m, a in zip(middle, low, strict=True)],
                [b - m for m, b in zip(middle, high, strict=True)],
            ]
            marker = MARKERS[again % len(MARKERS)]
            axes.errorbar(xs, middle, bars, color=SERIES[colour], marker=marker, markersize=3.5, capsize=2, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        # Figures in words of their own: the style draws no formulas, which matplotlib's logarithmic labels are.
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xticks(lengths, [f"{x:,.0f}" for x in lengths])
        axes.minorticks_off()
        if result["what"] == "attention":
            axes.axhline(1, color=SERIES[0], linewidth=0.8, linestyle=":")
        axes.set_xlabel("tokens a row")
        axes.set_ylabel(y)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None}, facecolor=paper)
    return text.getvalue()


Points = list[tuple[float, float, float, float]]  # x, y and the least and most of its turns


def _attention(result: dict[str, Any]) -> tuple[dict[str, Points], str]:
    """The figure of merit of all that leaves something out, in the first dtype, on the mean row."""
    found: dict[str, Points] = {}
    first = result["rows"][0]
    for row in result["rows"]:
        same = (row["dtype"], row["row"]) == (first["dtype"], first["row"])
        if same and "over_the_law" in row and row["variant"] != "full":
            spread = row["over_the_law"]
            point = (float(row["tokens"]), spread["median"], spread["least"], spread["most"])
            found.setdefault(row["name"], []).append(point)
    return found, "time / full, over live pairs / all"


def _step(result: dict[str, Any]) -> tuple[dict[str, Points], str]:
    found: dict[str, Points] = {}
    for row in result["rows"]:
        days = [row["days_per_billion"] * row["seconds"][end] / row["seconds"]["median"] for end in ("least", "most")]
        found.setdefault(row["loop"], []).append((float(row["tokens"]), row["days_per_billion"], *days))
    return found, "days per billion tokens"
