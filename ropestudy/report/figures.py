"""The study's figures: each function draws one from a study's records, or returns None where there are none."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from anchorline.files import replace_file
from ropestudy.report.effects import mean_of, typical_of
from ropestudy.schema import AttentionRecord, OutputsRecord, Results

MODES = ("local", "propagated")
FORMATS = {2: "e5m2", 3: "e4m3", 7: "bf16", 10: "fp16, TF32"}
SMALLEST = 1e-30  # a logarithmic axis cannot show exact zeros
PANEL = (4.8, 3.4)  # inches
SHIFT = 16  # the paper's, which the others are compared with
POINTS = {"marker": "o", "markersize": 3}


def write_figures(results: Results, folder: Path) -> None:
    """Write `shift.png`, `tokens.png`, `length.png` and `dose.png`, where the study has records for it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw(results)
        if figure is not None:
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", dpi=110)
            replace_file(folder / f"{name}.png", drawn.getvalue())


def draw_shift(results: Results) -> Figure | None:
    """The paper's figure 1, left: D between shift d1 and shift 16."""

    def draw(axes: Any, records: list[AttentionRecord], style: dict[str, str]) -> None:
        points = sorted((one.d1 if one.d2 == SHIFT else one.d2, mean_of(one.difference.d.values)) for one in records)
        y = [max(one.value, SMALLEST) for _, one in points]
        bars = [min(one.high - one.value, value * 0.9) for (_, one), value in zip(points, y, strict=True)]
        axes.errorbar([d for d, _ in points], y, bars, linewidth=1, **POINTS, **style)

    records = [one for one in _shifts(results, "shift_pairs") if SHIFT in (one.d1, one.d2)]  # D is symmetric
    axes = {"xscale": "symlog", "yscale": "log", "xlabel": f"d1 (d2 = {SHIFT})", "ylabel": "D (eq. 4)"}
    return _by_mode(records, draw, axes)


def draw_tokens(results: Results) -> Figure | None:
    """The paper's figure 1, middle: D of each column."""

    def draw(axes: Any, records: list[AttentionRecord], style: dict[str, str]) -> None:
        y = [max(d, SMALLEST) for one in records if one.columns for d in one.columns.d]
        axes.plot(range(1, len(y) + 1), y, linewidth=0.9, **style)

    records = [one for one in _shifts(results, "shift_pairs") if one.columns]
    axes = {"xscale": "log", "yscale": "log", "xlabel": "column (token), from 1", "ylabel": "D of the column"}
    return _by_mode(records, draw, axes)


def draw_length(results: Results) -> Figure | None:
    """The paper's figure 1, right: D_logit of the first column (solid lines) and the mean of all others (dashed)."""

    def draw(axes: Any, records: list[AttentionRecord], style: dict[str, str]) -> None:
        x = [one.tokens for one in records]
        first = [max(one.difference.d_logit_first.mean, SMALLEST) for one in records]
        rest = [max(one.difference.d_logit_rest.mean, SMALLEST) for one in records]
        axes.plot(x, first, **POINTS, **style)
        axes.plot(x, rest, color=style["color"], linestyle="--", marker="s", markersize=3)

    axes = {"xscale": "log", "yscale": "log", "xlabel": "tokens", "ylabel": "D_logit (eq. 5)"}
    return _by_mode(_shifts(results, "lengths"), draw, axes, "; dashed: mean of the other columns")


def draw_dose(results: Results) -> Figure | None:
    """KL from float64 by the mantissa bits of one site; the dotted lines are formats."""
    records = [one for one in results.records if isinstance(one, OutputsRecord) and one.group == "dose"]
    if not records:
        return None
    gaps = list(dict.fromkeys((one.task, one.gap) for one in records))
    figure = Figure(figsize=(PANEL[0] * min(3, len(gaps)), PANEL[1] * -(-len(gaps) // 3)), layout="constrained")
    all_axes = figure.subplots(-(-len(gaps) // 3), min(3, len(gaps)), squeeze=False, sharey=True).ravel()
    for axes, (task, gap) in zip(all_axes, gaps, strict=False):
        here = [one for one in records if (one.task, one.gap) == (task, gap)]
        for site in dict.fromkeys(one.site for one in here):
            own = sorted((one for one in here if one.site == site), key=lambda one: one.mantissa_bits or 0)
            bits = [one.mantissa_bits or 0 for one in own]
            values = [max(typical_of(one.outputs.kl.values).value, SMALLEST) for one in own]
            axes.plot(bits, values, marker="o", markersize=3, label=site)
        for bits, name in FORMATS.items():
            axes.axvline(bits, color="gray", linestyle=":", linewidth=0.8)
            axes.annotate(name, (bits, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, ha="right")
        axes.set(yscale="log", xlabel="bits of mantissa", ylabel="KL from float64, nats")
        axes.set_title(f"{task}, keys {gap:,} positions away", fontsize=9)
    all_axes[0].legend(fontsize=7, frameon=False)
    return figure


FIGURES = {"shift": draw_shift, "tokens": draw_tokens, "length": draw_length, "dose": draw_dose}


def _shifts(results: Results, group: str) -> list[AttentionRecord]:
    attention = (one for one in results.records if isinstance(one, AttentionRecord))
    return [one for one in attention if (one.group, one.against) == (group, "shift")]


def _by_mode(
    records: list[AttentionRecord],
    draw: Callable[[Any, list[AttentionRecord], dict[str, str]], None],
    axes: dict[str, str],
    note: str = "",
) -> Figure | None:
    """Draw records, a panel for each mode, a colour for each model and condition."""
    modes = [mode for mode in MODES if any(one.mode == mode for one in records)]
    if not modes:
        return None
    colours = {label: f"C{place}" for place, label in enumerate(dict.fromkeys(map(_label, records)))}
    figure = Figure(figsize=(PANEL[0] * len(modes), PANEL[1] + 0.6), layout="constrained")
    for panel, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        panel.set_title(mode + note, fontsize=9)
        for label, colour in colours.items():
            own = [one for one in records if (one.mode, _label(one)) == (mode, label)]
            if own:
                draw(panel, own, {"color": colour, "label": label})
        panel.set(**axes)
    named = {name: line for panel in figure.axes for line, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return figure


def _label(one: AttentionRecord) -> str:
    model = "" if one.model == "pretrained" else f"{one.model} "
    return model + one.condition + ("" if one.attention_from == "oracle" else f" ({one.attention_from})")
