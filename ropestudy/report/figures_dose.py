"""One figure a reader remembers: how many bits of mantissa RoPE needs, how far bf16 is from the cliff, where fp8 is."""

from typing import Any

from anchorline.page import count
from anchorline.page.colours import SERIES
from ropestudy.report.answers import copies
from ropestudy.report.draw import Draw, Line, lines
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
    panels = [Panel("Divergence from float64", _marked(_kl(shown)))]
    if task == "copy":
        panels.insert(0, Panel("Keys that are copied", _marked(_copied(shown))))
    first = shown[0]
    rows = [
        [one.site or "", float(one.mantissa_bits or 0), float(one.gap), one.outputs.kl.mean]
        + [stat.mean if stat else float("nan") for stat in (one.outputs.nll_q, one.outputs.right_q)]
        for one in records
    ]
    heads = ("site", "mantissa bits", "gap", "KL from float64, nats", "loss, nats", "right")
    caption = (
        f"Mantissa bits at one site, float32's exponents, all else float32, angles in float64; keys {farthest:,} "
        f"positions away; means and standard deviations over {count(first.sequences, 'sequence')} of "
        f"{count(first.tokens, 'token')}. Dotted: the bits that formats have. q and k before RoPE are rotated in "
        "float32 after they are rounded."
    )
    return [Figure("dose", "How many bits RoPE needs", caption, panels, [Table("dose", "Every dose", heads, rows)])]


def _series(records: list[Outcome], what: str) -> list[Line]:
    made = []
    for site in unique([one.site or "" for one in records]):
        own = sorted((one for one in records if one.site == site), key=lambda one: one.mantissa_bits or 0)
        stats = [getattr(one.outputs, what) for one in own]
        bits = [float(one.mantissa_bits or 0) for one in own]
        made.append(Line(site, bits, [stat.mean for stat in stats], [stat.std for stat in stats]))
    return made


def _copied(records: list[Outcome]) -> Draw:
    return lines(_series(records, "right_q"), "bits of mantissa", "fraction of the key that is copied")


def _kl(records: list[Outcome]) -> Draw:
    return lines(_series(records, "kl"), "bits of mantissa", "KL from float64, nats")


def _marked(draw: Draw) -> Draw:
    def marked(axes: Any) -> None:
        draw(axes)
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
