"""Which cast is to blame: the factorial, the remedies and the controls as rows of dots, and as tables.

Every row is judged by `row`: the probability that moves per query, mean of sum_j |dATTN_ij| over queries, layers and
heads. It runs from 0 to 2 and does not grow with the length, so numbers of different experiments can be held side by
side.
"""

from collections.abc import Sequence

from anchorline.page import count
from ropestudy.report.draw import Dots, dots
from ropestudy.report.figure import Figure, Panel, Table
from ropestudy.report.select import baseline, scores, times, unique
from ropestudy.schema import Results, Score

HEADS = (
    *("condition", "model", "text", "mask", "shift, local", "shift, propagated", "error, local", "error, propagated"),
    *(
        "first share of D, local",
        "D, local",
        "KL between shifts, nats",
        "KL from float64, nats",
        "argmax differs from float64",
        "in words",
    ),
)
MOVED = "probability moved per query (0 to 2)"
LEFT = "left of the whole preset's (1 = no change)"
AGAIN = (
    "rope_sum, q_rotated or k_rotated, and kv_heads round the same numbers one after the other: one of them alone can "
    "be left out without any effect, and so can every rounding of what is already rounded."
)
WITHIN_PRESET = 1.6  # remaining fractions beyond are drawn at the edge and told in figures


def sites_figures(results: Results) -> list[Figure]:
    """Those that the study has records for."""
    made = (on_alone(results), off_alone(results), remedies(results), controls(results), models(results))
    return [figure for figure in made if figure is not None]


def table(name: str, title: str, rows: Sequence[Score]) -> Table:
    """Every scale of a score, a row each."""
    return Table(name, title, HEADS, [
        [r.condition, r.model, r.text, r.mask, r.shift["local"].row.mean, r.shift["propagated"].row.mean,
         r.error["local"].row.mean, r.error["propagated"].row.mean, r.shift["local"].first_share.mean,
         r.shift["local"].d.mean, r.kl_shift.kl.mean, r.kl_error.kl.mean, r.kl_error.argmax_differs.mean, r.about]
        for r in rows
    ])  # fmt: skip


def _of(rows: Sequence[Score]) -> str:
    first = rows[0]
    return (
        f"Shift {first.d1} against shift {first.d2}, means over {count(first.sequences, 'sequence')} of "
        f"{count(first.tokens, 'token')}; spreads stand in results.json."
    )


def _height(rows: Sequence[object]) -> float:
    return 1.3 + 0.2 * len(rows)


def _absolute(rows: Sequence[Score], names: Sequence[str] | None = None) -> Panel:
    series = [
        Dots("shift error, local", [r.shift["local"].row.mean for r in rows]),
        Dots("shift error, propagated", [r.shift["propagated"].row.mean for r in rows]),
        Dots("error against float64, local", [r.error["local"].row.mean for r in rows]),
        Dots("error against float64, propagated", [r.error["propagated"].row.mean for r in rows]),
    ]
    return Panel(
        "", dots(names or [r.condition for r in rows], series, MOVED, log=True), wide=True, height=_height(rows) + 0.3
    )


def _remaining(rows: Sequence[Score], base: Score, names: Sequence[str], title: str) -> Panel:
    pairs = [
        ("shift error, local", lambda r: r.shift["local"].row.mean),
        ("shift error, propagated", lambda r: r.shift["propagated"].row.mean),
        ("error against float64, local", lambda r: r.error["local"].row.mean),
        ("error against float64, propagated", lambda r: r.error["propagated"].row.mean),
        ("KL from float64 of the outputs", lambda r: r.kl_error.kl.mean),
    ]
    series = [Dots(name, [times(value(r), value(base)) for r in rows]) for name, value in pairs]
    return Panel(title, dots(names, series, LEFT, mark=1.0, most=WITHIN_PRESET), wide=True, height=_height(rows) + 0.4)


def rank(rows: Sequence[Score]) -> list[Score]:
    """Sort by the local shift error, largest first: there nothing but this layer's own roundings is in play."""
    return sorted(rows, key=lambda r: r.shift["local"].row.mean, reverse=True)


def on_alone(results: Results) -> Figure | None:
    """Every rounding site alone."""
    rows = rank(scores(results, "on_alone"))
    if not rows:
        return None
    whole = [b for b in scores(results, "baseline") if b.base is not None and b.tokens == rows[0].tokens]
    shown = [*{r.condition: r for r in whole}.values(), *rows]
    names = [f"all of {r.condition}" if r in whole else r.condition.removeprefix("on ") for r in shown]
    panel = _absolute(shown, names)
    caption = (
        "Each site of the computation rounded by itself, everything else in float64; whole presets on top. Sorted by "
        "the local shift error. A mark that is open, at the left edge, is below 1e-8, float64's own noise: such a "
        f"site keeps RoPE relative however much it errs (see its distance from float64). {_of(rows)}"
    )
    tables = [table("on-alone", "Every site alone", shown)]
    return Figure("on-alone", "Which cast does it: every rounding alone", caption, [panel], tables, in_shares=True)


def off_alone(results: Results) -> Figure | None:
    """Every rounding site left out of a preset."""
    rows = scores(results, "off_alone")
    panels = []
    for base in unique([r.base or "" for r in rows]):
        own = [r for r in rows if r.base == base]
        whole = baseline(results, own[0])
        if whole is None:
            continue
        own = sorted(own, key=lambda r: r.shift["local"].row.mean)
        panels.append(_remaining(own, whole, [r.condition.removeprefix(f"{base} - ") for r in own], f"{base}, without"))
    if not panels:
        return None
    caption = (
        "One rounding taken out of a preset, the rest as it is: what is left of the preset's differences. Left of the "
        f"broken line it helps. {AGAIN} {_of(rows)}"
    )
    tables = [table("off-alone", "Every site left out", rows)]
    return Figure(
        "off-alone",
        "Which cast can be taken out: every rounding left out alone",
        caption,
        panels,
        tables,
        in_shares=True,
    )


def remedies(results: Results) -> Figure | None:
    """What people do about it."""
    rows = scores(results, "remedy")
    panels = []
    for base in unique([r.base or "" for r in rows]):
        own = [r for r in rows if r.base == base]
        whole = baseline(results, own[0])
        if whole is not None:
            names = [r.condition.removeprefix(f"{base}: ") for r in own]
            panels.append(_remaining(own, whole, names, f"{base}, with"))
    if not panels:
        return None
    caption = (
        "What is left of a preset's differences under each remedy (and under one cautionary tale). A remedy that only "
        "makes the shifts agree moves the first two marks; one that makes the model compute more exactly moves the "
        f"others. Resetting positions and anchoring stand under the masks. {_of(rows)}"
    )
    return Figure("remedies", "Remedies", caption, panels, [table("remedies", "Remedies", rows)], in_shares=True)


def controls(results: Results) -> Figure | None:
    """What must hold, or must not, if rounding after the rotation is the cause."""
    rows = [r for r in scores(results, "control") if r.model == "pretrained"]
    if not rows:
        return None
    bases = [b for b in scores(results, "baseline") if b.tokens == rows[0].tokens and b.base in {r.base for r in rows}]
    shown = [*{r.condition: r for r in (*bases, *rows)}.values()]
    caption = (
        "Rounding q and k before the rotation instead of after it; a constant random phase for every rotary pair, as "
        "neutral in exact arithmetic as a shift (its shift error compares with and without the phases); float32 with "
        f"angles of either precision. Open marks at the left edge are below 1e-8. {_of(rows)}"
    )
    return Figure(
        "controls", "Controls", caption, [_absolute(shown)], [table("controls", "Controls", shown)], in_shares=True
    )


def models(results: Results) -> Figure | None:
    """Pretrained weights, the same shuffled, and random ones."""
    rows = [r for r in scores(results, "control") if r.model != "pretrained"]
    if not rows:
        return None
    conditions = {r.condition for r in rows}
    own = [r for r in scores(results, "control", "baseline") if r.model == "pretrained" and r.condition in conditions]
    own = [r for r in own if r.tokens == rows[0].tokens]
    shown = [*{(r.model, r.condition): r for r in (*own, *rows)}.values()]
    names = [r.model if len(conditions) == 1 else f"{r.model}, {r.condition}" for r in shown]
    words = "; ".join(f"{name}: {what}" for name, what in results.model.initialisations.items())
    caption = (
        f"The same measures of other weights, under {', '.join(sorted(conditions))}. shuffled: the pretrained "
        f"parameters, the entries of each in a random order. {words}. {_of(rows)}"
    )
    return Figure(
        "models",
        "Does training matter?",
        caption,
        [_absolute(shown, names)],
        [table("models", "Models", shown)],
        in_shares=True,
    )
