"""One figure a reader remembers: how many bits of mantissa RoPE needs, how far bf16 is from the cliff, where fp8 is."""

import math
from collections.abc import Callable
from typing import Any

from anchorline.page import count
from anchorline.page.colours import SERIES
from ropestudy.report.answers import EAGER, copies, right_lost
from ropestudy.report.draw import Draw, Line, lines
from ropestudy.report.effects import Effect, typical_of
from ropestudy.report.figure import SOFT, Figure, Panel, Table
from ropestudy.report.select import of_kind, unique
from ropestudy.schema import Outcome, Results

MARKS = {2: "e5m2", 3: "e4m3", 7: "bf16", 10: "fp16, TF32"}


def dose_figures(results: Results) -> list[Figure]:
    """The figure, if the study has doses."""
    records = [one for one in of_kind(results, Outcome) if one.group == "dose"]
    if not records:
        return []
    task = "copy" if any(one.task == "copy" for one in records) else "text"
    records = [one for one in records if one.task == task]
    # The farthest at which float64 copies: beyond, rounding has nothing to take off.
    farthest = max((one.gap for one in records if copies(one)), default=max(one.gap for one in records))
    shown = [one for one in records if one.gap == farthest]
    whole = next(
        (
            typical_of(one.outputs.kl.values).value
            for one in of_kind(results, Outcome)
            if _is_whole(one, farthest, task)
        ),
        None,
    )
    panels = [Panel("The outputs' distance from float64", _marked(_kl(shown), whole))]
    if task == "copy":
        panels.insert(0, Panel("Copies lost", _marked(_lost(shown))))
    first = shown[0]
    rows = [
        [one.site or "", float(one.mantissa_bits or 0), float(one.gap), one.outputs.kl.mean]
        + [stat.mean if stat else float("nan") for stat in (one.outputs.nll_q, one.outputs.right_q)]
        for one in records
    ]
    heads = ("site", "mantissa bits", "gap", "KL from float64, nats", "loss, nats", "right")
    caption = (
        f"Mantissa bits at one site, float32's exponents, all else float32, angles in float64; keys {farthest:,} "
        f"positions away; {count(first.sequences, 'sequence')} of {count(first.tokens, 'token')}. Left, the part of "
        "float64's copies that is lost, with its 95 per cent interval; right, KL, geometric means. Dotted: the bits "
        "that formats have. q and k before RoPE are rotated in float32 after they are rounded."
    )
    if whole is not None:
        caption += " Broken line: what all roundings of transformers' eager bf16 make of the same rows."
    return [Figure("dose", "How many bits RoPE needs", caption, panels, [Table("dose", "Every dose", heads, rows)])]


def _is_whole(one: Outcome, gap: int, task: str) -> bool:
    return (one.group, one.task, one.condition, one.start, one.gap) == ("setup", task, EAGER, 0, gap)


def _series(records: list[Outcome], effect: Callable[[Outcome], Effect], bars: bool) -> list[Line]:
    made = []
    for site in unique([one.site or "" for one in records]):
        own = sorted((one for one in records if one.site == site), key=lambda one: one.mantissa_bits or 0)
        found = [effect(one) for one in own]
        bits = [float(one.mantissa_bits or 0) for one in own]
        spread = [(one.high - one.low) / 2 if bars and math.isfinite(one.high - one.low) else 0.0 for one in found]
        made.append(Line(site, bits, [one.value for one in found], spread))
    return made


def _lost(records: list[Outcome]) -> Draw:
    draw = lines(_series(records, right_lost, bars=True), "bits of mantissa", "part of float64's copies")

    def with_gains(axes: Any) -> None:
        draw(axes)
        axes.set_ylim(bottom=None)
        axes.relim()
        axes.autoscale(axis="y")
        axes.axhline(0, color=SOFT, linewidth=0.8)

    return with_gains


def _kl(records: list[Outcome]) -> Draw:
    found = _series(records, lambda one: typical_of(one.outputs.kl.values), bars=False)
    return lines(found, "bits of mantissa", "KL from float64, nats")


def _marked(draw: Draw, level: float | None = None) -> Draw:
    def marked(axes: Any) -> None:
        draw(axes)
        if level is not None:
            axes.axhline(level, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        for bits, name in MARKS.items():
            axes.axvline(bits, color=SERIES[-1], linestyle=":", linewidth=0.9)
            axes.annotate(
                name,
                (bits, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                color=SOFT,
                fontsize=7.5,
                ha="right",
            )

    return marked
