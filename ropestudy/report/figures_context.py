"""The first token, the masks, the position, the frequencies, and the emulation beside a real one."""

import math
from collections.abc import Sequence

from anchorline.page import count
from ropestudy.report.draw import Dots, Draw, Line, dots, lines, of_stats
from ropestudy.report.figure import Figure, Panel, Table
from ropestudy.report.figures_sites import MOVED, table
from ropestudy.report.select import name_of, of_kind, scores, unique
from ropestudy.schema import ByFrequency, EmulationCheck, MaskPair, OwnError, Record, Results

TEXTS = {"first": "BOS first", "none": "no BOS", "middle": "BOS in the middle"}


def context_figures(results: Results) -> list[Figure]:
    """Those that the study has records for."""
    made = (first_token(results), masks(results), position(results), frequency(results), emulation(results))
    return [figure for figure in made if figure is not None]


def _size(record: Record) -> str:
    return f"{count(record.sequences, 'sequence')} of {count(record.tokens, 'token')}"


def first_token(results: Results) -> Figure | None:
    """The sink, and what is left without it."""
    rows = scores(results, "first_token")
    if not rows:
        return None
    names = [
        f"{r.condition.removesuffix(' + sink')}, {TEXTS[r.text]}{', sink logit' * ('sink' in r.condition)}"
        for r in rows
    ]
    local = [r.shift["local"] for r in rows]
    shares = [
        Dots("share of D (n-weighted)", [d.first_share.mean for d in local]),
        Dots("share of D, every n = 1", [d.first_share_unweighted.mean for d in local]),
        Dots("share of the attention mass", [d.first_mass_unweighted.mean for d in local]),
    ]
    per_mass = [
        Dots("first column", [d.first_per_mass.mean for d in local]),
        Dots("all other columns", [d.rest_per_mass.mean for d in local]),
    ]
    height = 1.3 + 0.25 * len(rows)
    panels = [
        Panel("The first column's share, local", dots(names, shares, "share of all columns", mark=0.5), True, height),
        Panel(
            "Difference per unit of attention received, local",
            dots(names, per_mass, "sum |dATTN| / sum ATTN", log=True),
            True,
            height,
        ),
    ]
    caption = (
        "The first column with the sink where it usually is, without a BOS, with the BOS in the middle of the text, "
        "and with a logit per head that takes the sink's part in the softmax. The lower panel divides each column's "
        f"difference by the attention it receives. Shift {rows[0].d1} against {rows[0].d2}, means over "
        f"{_size(rows[0])}."
    )
    return Figure(
        "first-token",
        "The first token and its mass",
        caption,
        panels,
        [table("first-token", "First token", rows)],
        True,
    )


def masks(results: Results) -> Figure | None:
    """Packed documents under every mask, and two masks against each other."""
    rows, pairs = scores(results, "mask"), of_kind(results, MaskPair)
    panels, tables = [], []
    conditions = unique([r.condition for r in rows if r.condition != "exact"])
    for condition in conditions:
        own = [r for r in rows if r.condition == condition]
        series = [
            Dots("shift error, local", [r.shift["local"].row.mean for r in own]),
            Dots("shift error, propagated", [r.shift["propagated"].row.mean for r in own]),
            Dots("error against float64, local", [r.error["local"].row.mean for r in own]),
            Dots("error against float64, propagated", [r.error["propagated"].row.mean for r in own]),
        ]
        panels.append(Panel(condition, dots([r.mask for r in own], series, MOVED, log=True)))
    if rows:
        tables.append(table("masks", "Masks", rows))
    for a, b in unique([(p.a, p.b) for p in pairs]):  # type: ignore[arg-type]
        own = [p for p in pairs if (p.a, p.b) == (a, b)]
        names = unique([p.condition for p in own])
        series = [
            Dots(
                mode,
                [next((p.difference.row.mean for p in own if (p.condition, p.mode) == (n, mode)), None) for n in names],
            )
            for mode in ("local", "propagated")
        ]
        panels.append(Panel(f"{a} against {b}", dots(names, series, MOVED, log=True)))
    if pairs:
        heads = (
            "condition",
            "mode",
            "a",
            "b",
            "moved per query",
            "D",
            "KL of the outputs, nats",
            "argmax differs",
            "documents",
        )
        cells = [
            [p.condition, p.mode, p.a, p.b, p.difference.row.mean, p.difference.d.mean, p.kl.kl.mean,
             p.kl.argmax_differs.mean, ", ".join(map(str, p.documents))]
            for p in pairs
        ]  # fmt: skip
        tables.append(Table("mask-pairs", "Two choices of positions", heads, cells))
    if not panels:
        return None
    some = [*rows, *pairs][0]
    caption = (
        "Packed documents. By preset: the shift error of the whole row and the distance from float64 under the same "
        "mask. Then two choices of position ids for the same tokens and mask: intra against intra_reset is one "
        "function in exact arithmetic; anchor against anchor_reset is not, because the distance of each document to "
        f"the anchor changes, and exact shows by how much. Means over {_size(some)}."
    )
    return Figure("masks", "Masks and resets on packed documents", caption, panels, tables)


def position(results: Results) -> Figure | None:
    """Each shift's own distance from float64."""
    records = of_kind(results, OwnError)
    panels, rows = [], []
    for mode in unique([r.mode for r in records]):
        own = [r for r in records if r.mode == mode]
        error = [
            of_stats(name_of(r), [max(p.shift, 0.5) for p in r.points], [p.error.row for p in r.points]) for r in own
        ]
        moved = []
        for r in own:
            seen = [(p.shift, p.from_zero.row) for p in r.points if p.from_zero]
            moved.append(of_stats(name_of(r), [d for d, _ in seen], [row for _, row in seen]))
        panels += [
            Panel(
                f"Distance from float64, {mode}", lines(error, "shift (0 drawn at 1/2)", MOVED, log_x=True), height=3.8
            ),
            Panel(f"Distance from its own shift 0, {mode}", lines(moved, "shift", MOVED, log_x=True), height=3.8),
        ]
        rows += [
            [
                name_of(r),
                r.mode,
                p.shift,
                p.error.row.mean,
                p.error.row.std,
                p.from_zero.row.mean if p.from_zero else math.nan,
            ]
            for r in own
            for p in r.points
        ]
    if not panels:
        return None
    caption = (
        "Is shift 0 privileged, and does the error grow with the position? Left: each shift beside float64. Right: "
        "the same shift beside the condition's own shift 0, which is what D compares. The largest shifts put the last "
        f"token at the offsets of the configuration. Means over {_size(records[0])}, bars one standard deviation."
    )
    heads = ("run", "mode", "shift", "distance from float64", "std", "distance from its shift 0")
    return Figure("position", "Position", caption, panels, [Table("position", "By position", heads, rows)])


def frequency(results: Results) -> Figure | None:
    """Which rotary pairs carry the difference."""
    records = of_kind(results, ByFrequency)
    panels, rows = [], []
    for r in records:
        x = [math.sqrt(g.wavelengths[0] * g.wavelengths[1]) for g in r.groups]
        drawn = [
            of_stats("between the shifts", x, [g.shift.row for g in r.groups]),
            of_stats("from float64", x, [g.error.row for g in r.groups]),
        ]
        panels.append(Panel(f"{name_of(r)}, {r.mode}", _wavelengths(drawn)))
        rows += [
            [name_of(r), r.mode, f"{g.first} to {g.last}", *g.wavelengths, g.shift.row.mean, g.error.row.mean]
            for g in r.groups
        ]
    if not panels:
        return None
    caption = (
        "Only one group of rotary pairs is rounded, at RoPE's sites; all other pairs and all else is float64. "
        f"Shift {records[0].d1} against {records[0].d2}, means over {_size(records[0])}, bars one "
        "standard deviation."
    )
    heads = ("run", "mode", "pairs", "wavelength of the first", "of the last", "between the shifts", "from float64")
    return Figure("frequency", "By frequency", caption, panels, [Table("frequency", "By frequency", heads, rows)])


def _wavelengths(drawn: Sequence[Line]) -> Draw:
    return lines(drawn, "wavelength of the group, tokens (geometric mean of its ends)", MOVED, log_x=True)


def emulation(results: Results) -> Figure | None:
    """The oracle's roundings beside a torch model's."""
    records = of_kind(results, EmulationCheck)
    if not records:
        return None
    panels, rows = [], []
    for r in records:
        drawn = [
            Line("torch against float64", r.layers, r.error),
            Line("the oracle against float64", r.layers, r.reference),
            Line("between the two", r.layers, r.between),
        ]
        name = f"{r.attention_from}, {r.dtype}, against {r.condition}"
        panels.append(Panel(name, lines(drawn, "layer", "root mean square of the probabilities")))
        rows.append(
            [name, max(r.ratio), min(r.identical), r.d_oracle.mean, r.d_oracle.std, r.d_torch.mean, r.d_torch.std]
        )
    caption = (
        "The oracle's emulated roundings beside a torch model that really computes in the dtype, layer by layer, and "
        f"D between shifts {records[0].d1} and {records[0].d2} from both. The ratio is error over allowance by the "
        f"repository's one rule: up to 1 passes. {_size(records[0])}."
    )
    heads = ("run", "largest error over allowance", "least fraction identical", "D, oracle", "std", "D, torch", "std")
    return Figure(
        "emulation", "Is the emulation right?", caption, panels, [Table("emulation", "Emulation", heads, rows)]
    )
