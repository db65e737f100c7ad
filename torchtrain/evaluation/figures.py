"""Figures of what was measured: score by length, and score and perplexity against the training step."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas

from anchorline.page import figure_style
from anchorline.page.colours import SERIES
from torchtrain.evaluation.intervals import MOST_EXPONENT, documents_interval, interval_of
from torchtrain.evaluation.measured import Measured, average_of, averages, tell_length

Point = tuple[float, float, float, float]  # x, y, and the ends of its interval


@dataclass(frozen=True)
class ScoreFigure:
    """A figure: the name of its file, its title, what is said below it, and the drawing as SVG."""

    name: str
    title: str
    note: str
    svg: str


def figures_of(runs: Sequence[Measured]) -> list[ScoreFigure]:
    """Return the figures that the results of runs allow: one that would hold nothing is left out.

    Args:
        runs: measured alike, as `compare` returns them.
    """
    figures, first = [], runs[0]
    if not first.lengths() and not first.perplexity:
        return figures
    told = averages(first)
    if told:
        title, wanted = told[0]
        lengths = [length for length in first.lengths() if average_of(first, length, wanted)]
        lines = {run.name: [_point(run, length, wanted, float(length)) for length in lengths] for run in runs}
        note = "Bars are 95 per cent intervals of each run alone; the tables have those of the differences."
        if len(lengths) > 1:  # of one the table says as much
            svg = _draw("by-length", lines, "tokens", "score", lengths)
            figures.append(ScoreFigure("score-by-length", f"RULER by length: {title.lower()}", note, svg))
        lines = {run.name: _by_step(run.whole or run, lengths[-1], wanted) for run in runs}
        if any(len(points) > 1 for points in lines.values()):
            note = f"Each checkpoint alone, at {lengths[-1]:,} tokens; bars are 95 per cent intervals."
            svg = _draw("by-step", lines, "training step", "score")
            figures.append(ScoreFigure("score-by-step", "RULER against the training step", note, svg))
    if first.perplexity:
        length = max(first.perplexity)
        lines = {run.name: _perplexity_by_step(run.whole or run, length) for run in runs}
        if any(len(points) > 1 for points in lines.values()):
            count = len(first.perplexity[length][0].buckets[0].losses)
            note = (
                f"Of all positions up to {length:,}; {count} documents. Bars are 95 per cent intervals over documents, "
                "which the runs share: differences, in the tables, are surer than bars that overlap."
            )
            svg = _draw("perplexity", lines, "training step", "perplexity")
            figures.append(ScoreFigure("perplexity-by-step", "Perplexity against the training step", note, svg))
    return figures


def _point(run: Measured, length: int, wanted: Sequence[str], x: float) -> Point:
    keys = average_of(run, length, wanted)
    assert keys is not None, "runs that were measured alike have the same averages"
    mean, low, high = interval_of([run.scores(key) for key in keys])
    return x, 100 * mean, 100 * low, 100 * high


def _by_step(run: Measured, length: int, wanted: Sequence[str]) -> list[Point]:
    keys = average_of(run, length, wanted)
    assert keys is not None
    points = []
    for step, scores in run.by_step(keys):
        mean, low, high = interval_of(scores)
        points.append((float(step), 100 * mean, 100 * low, 100 * high))
    return points


def _perplexity_by_step(run: Measured, length: int) -> list[Point]:
    by_step: dict[int, list[np.ndarray]] = {}  # of each result [documents], the mean over all positions
    for result in run.perplexity[length]:
        if result.step is not None:
            widths = [of.end - of.first for of in result.buckets]
            losses = np.average([of.losses for of in result.buckets], axis=0, weights=widths)
            by_step.setdefault(result.step, []).append(losses)
    points = []
    for step, each in sorted(by_step.items()):
        losses = np.mean(each, axis=0)
        found = documents_interval(losses) or (float(losses.mean()),) * 3
        mean, low, high = (math.exp(min(loss, MOST_EXPONENT)) for loss in found)
        points.append((float(step), mean, low, high))
    return points


def _draw(salt: str, lines: dict[str, list[Point]], across: str, up: str, lengths: Sequence[int] | None = None) -> str:
    """Draw a line a run, with the interval of each point; runs lie a little beside one another."""
    drawn = io.StringIO()
    with matplotlib.rc_context(figure_style(f"evaluation-{salt}")):
        canvas = Canvas(figsize=(6.4, 3.4), layout="constrained")
        axes = canvas.subplots()
        for i, (name, points) in enumerate(lines.items()):
            if not points:
                continue
            x, y, low, high = zip(*points, strict=True)
            beside = 1 + 0.012 * (i - (len(lines) - 1) / 2) if lengths else 1.0
            bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            at, colour = [of * beside for of in x], SERIES[i % len(SERIES)]
            axes.errorbar(
                at, y, yerr=bars, color=colour, label=name, linewidth=1.5, marker="o", markersize=3.5, capsize=2
            )
        if lengths:
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [tell_length(length) for length in lengths])
        else:
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.minorticks_off()
        axes.legend()
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()
