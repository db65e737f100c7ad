"""The paper's figures (arXiv 2411.13476, figure 1 and the appendix), and what belongs beside each.

Legend: d1, d2 shifts · D eq. 5 · j column (key) · T tokens.
"""

import math
from collections.abc import Sequence

from anchorline.page import count
from ropestudy.report.draw import Dots, Line, dots, heat, lines, of_stats
from ropestudy.report.figure import Figure, Panel, Table
from ropestudy.report.select import at_other_end, is_half, name_of, of_kind, paper_shift, unique
from ropestudy.schema import ByLength, Difference, PerToken, Record, Results, ShiftPairs

MODES = {"local": "the same inputs at every layer (local)", "propagated": "each run its own forward pass (propagated)"}
NOT_DRAWN = 1e-30  # exact zeros cannot stand on a logarithmic scale


def paper_figures(results: Results) -> list[Figure]:
    """Those that the study has records for."""
    made = (shift(results), from_zero(results), samples(results), grid(results), tokens(results), length(results))
    return [figure for figure in made if figure is not None]


def _of(records: Sequence[Record]) -> str:
    """What was measured, for a caption."""
    sizes = unique([f"{count(r.sequences, 'sequence')} of {count(r.tokens, 'token')}" for r in records])
    return "; ".join(sizes)


def _by_mode(records: Sequence[ShiftPairs]) -> list[tuple[str, list[ShiftPairs]]]:
    return [(words, [r for r in records if r.mode == mode]) for mode, words in MODES.items()]


def _against(results: Results, end: int, name: str, title: str, caption: str, x: str) -> Figure | None:
    records = [r for r in of_kind(results, ShiftPairs) if at_other_end(r, end)]
    panels, rows = [], []
    for words, own in _by_mode(records):
        drawn = []
        for record in own:
            points = at_other_end(record, end)
            drawn.append(of_stats(name_of(record), [d for d, _ in points], [found.d for _, found in points]))
            rows += [[name_of(record), record.mode, record.sequences, d, f.d.mean, f.d.std, f.row.mean,
                      f.first_share.mean]
                     for d, f in points]  # fmt: skip
        if drawn:
            panels.append(Panel(f"D, {words}", lines(drawn, x, "D (eq. 5)", named=True)))
    if not panels:
        return None
    heads = (
        "run",
        "mode",
        "sequences",
        "other shift",
        "D",
        "D std",
        "probability moved per query",
        "first column's share",
    )
    return Figure(name, title, f"{caption} {_of(records)}.", panels, [Table(name, title, heads, rows)])


def shift(results: Results) -> Figure | None:
    """Figure 1, left."""
    end = paper_shift(results)
    return _against(
        results,
        end,
        "shift",
        f"D between shift d1 and shift {end}",
        f"The paper's figure 1, left. D sums |difference of attention| between positions shifted by d1 and by {end} "
        "over layers, heads, columns and queries, each column divided by the queries that see it. Exact arithmetic "
        "gives 0. Means over sequences, bars one standard deviation.",
        f"d1 (d2 = {end})",
    )


def from_zero(results: Results) -> Figure | None:
    """The appendix: d1 = 0."""
    return _against(
        results,
        0,
        "from-zero",
        "D between shift 0 and shift d2",
        "The paper's appendix: the same with d1 = 0 and d2 varied. Means over sequences, bars one standard deviation.",
        "d2 (d1 = 0)",
    )


def samples(results: Results) -> Figure | None:
    """The appendix: single samples."""
    end, panels = paper_shift(results), []
    records = [r for r in of_kind(results, ShiftPairs) if at_other_end(r, end)]
    for words, own in _by_mode(records):
        drawn = []
        for colour, record in enumerate(own):
            points = at_other_end(record, end)
            for sample in range(record.sequences):
                values = [max(found.d.values[sample], NOT_DRAWN) for _, found in points]
                drawn.append(Line(name_of(record), [d for d, _ in points], values, colour=colour, thin=True))
        if drawn:
            panels.append(Panel(f"D, {words}", lines(drawn, f"d1 (d2 = {end})", "D (eq. 5)", named=True)))
    if not panels:
        return None
    caption = f"The paper's appendix: every sequence by itself, a line each, instead of their mean. {_of(records)}."
    return Figure("samples", "Single samples", caption, panels)


def grid(results: Results) -> Figure | None:
    """d1 x d2: is the difference a function of the distance between the shifts?"""
    records = [r for r in of_kind(results, ShiftPairs) if r.mode == "local" and is_half(r.condition)]
    wanted = (results.config.get("shift_pairs") or {}).get("grid") or []
    panels = []
    for record in records:
        by_pair = {(pair.d1, pair.d2): pair.difference for pair in record.pairs}
        shifts = sorted(set(wanted))
        if len(shifts) < 3 or record.model != "pretrained":
            continue
        cells = [[_cell(by_pair, a, b) for b in shifts] for a in shifts]
        name = name_of(record)
        panels.append(
            Panel(f"D between d1 and d2, {name}", heat([str(d) for d in shifts], cells, "d2", "d1"), height=3.7)
        )
        near = [
            of_stats(
                f"smaller shift {a}",
                [b - a for x, b in by_pair if x == a],
                [f.d for (x, _), f in by_pair.items() if x == a],
            )
            for a in shifts[:5]
            if any(x == a for x, _ in by_pair)
        ]
        panels.append(
            Panel(
                f"The same against |d1 - d2|, {name}",
                lines(_sort(near), "|d1 - d2|", "D (eq. 5)", log_x=True),
                height=3.7,
            )
        )
    if not panels:
        return None
    caption = (
        "Local mode. Left: every pair of shifts of the configured grid; the stronger the shade, the more. Were D a "
        "function of |d1 - d2| alone, every diagonal would have one shade, and on the right all lines would be one. "
        f"Means over sequences, bars one standard deviation. {_of(records)}."
    )
    return Figure("grid", "D as a function of both shifts", caption, panels)


def _cell(by_pair: dict[tuple[int, int], Difference], a: int, b: int) -> float | None:
    if a == b:
        return None
    found = by_pair.get((min(a, b), max(a, b)))
    return None if found is None else found.d.mean


def _sort(series: Sequence[Line]) -> list[Line]:
    made = []
    for line in series:
        order = sorted(range(len(line.x)), key=lambda i: line.x[i])
        x, y, spread = ([values[i] for i in order] for values in (line.x, line.y, line.spread))
        made.append(Line(line.name, x, y, spread))
    return made


def tokens(results: Results) -> Figure | None:
    """Figure 1, middle: token by token, and the first one's share beside its mass."""
    records = of_kind(results, PerToken)
    panels, rows = [], []
    for mode, words in MODES.items():
        own = [r for r in records if r.mode == mode]
        if not own:
            continue
        ends = f"d1 = {own[0].d1}, d2 = {own[0].d2}"
        drawn = [
            Line(name_of(r), range(1, 1 + len(r.columns.d)), [max(v, NOT_DRAWN) for v in r.columns.d], colour=i)
            for i, r in enumerate(own)
        ]
        thin = [Line(line.name, line.x, line.y, colour=line.colour, thin=True) for line in drawn]
        panels.append(
            Panel(
                f"D by column, {words}", lines(thin, f"column (token), from 1; {ends}", "D of the column", log_x=True)
            )
        )
        columns = {
            "share of D (eq. 5: over the queries that see it)": [r.difference.first_share.mean for r in own],
            "share of D, not divided by them": [r.difference.first_share_unweighted.mean for r in own],
            "share of the attention": [r.difference.first_mass_unweighted.mean for r in own],
        }
        series = [Dots(name, values) for name, values in columns.items()]
        panels.append(
            Panel(
                f"The first column's share, {mode}",
                dots([name_of(r) for r in own], series, "share of all columns", mark=0.5),
            )
        )
        rows += [
            [name_of(r), r.mode, f.first_share.mean, f.first_share.std, f.first_share_unweighted.mean,
             f.first_mass_unweighted.mean, f.first_per_mass.mean, f.rest_per_mass.mean]
            for r in own
            for f in [r.difference]
        ]  # fmt: skip
    if not panels:
        return None
    caption = (
        "The paper's figure 1, middle: D of each column (means over sequences, logarithmic across), and what "
        "share of all columns the first has, beside the attention it receives. The broken line stands at a "
        f"half. {_of(records)}."
    )
    heads = (
        "run",
        "mode",
        "share of D",
        "std",
        "share, n = 1",
        "mass",
        "|dATTN| per mass, first",
        "the same, all others",
    )
    table = Table("tokens", "The first column", heads, rows)
    return Figure("tokens", "D token by token", caption, panels, [table], in_shares=True)


def length(results: Results) -> Figure | None:
    """Figure 1, right, with all columns beside the first; and what grows apart from it."""
    records = of_kind(results, ByLength)
    panels, rows = [], []
    for mode in MODES:
        own = [r for r in records if r.mode == mode]
        if not own:
            continue
        x = "tokens"
        whole = own
        own = [r for r in own if is_half(r.condition)] or own  # float32's would leave no room to see them grow
        first = [
            of_stats(name_of(r), [p.tokens for p in r.points], [p.shift.d_logit_first for p in r.points]) for r in own
        ]
        rest = [
            of_stats(f"{name_of(r)}", [p.tokens for p in r.points], [p.shift.d_logit_rest for p in r.points])
            for r in own
        ]
        moved = [of_stats(name_of(r), [p.tokens for p in r.points], [p.shift.row for p in r.points]) for r in own]
        error = [
            of_stats(name_of(r), [p.tokens for p in r.points if p.error], [p.error.row for p in r.points if p.error])
            for r in own
            if any(p.error for p in r.points)
        ]
        panels += [
            Panel(f"D_logit of the first column, {mode}", lines(first, x, "D_logit (eq. 6)", log_x=True)),
            Panel(f"The mean of all other columns, {mode}", lines(rest, x, "D_logit", log_x=True)),
        ]
        longest = max(own, key=lambda r: max(p.tokens for p in r.points))
        if is_half(longest.condition):
            named = f"Column by column, {name_of(longest)}, {mode}"
            panels.append(Panel(named, lines(_columns(longest), x, "D_logit", log_x=True)))
        panels.append(
            Panel(
                f"Probability moved per query by the shift, {mode}",
                lines(moved, x, "sum of |dATTN|, 0 to 2", log_x=True),
            )
        )
        if error:
            panels.append(
                Panel(f"Distance from float64 per query, {mode}", lines(error, x, "sum of |dATTN|, 0 to 2", log_x=True))
            )
        rows += [
            [name_of(r), r.mode, p.tokens, p.sequences, p.shift.d_logit_first.mean, p.shift.d_logit_first.std,
             p.shift.d_logit_rest.mean, p.shift.first_share.mean, p.shift.row.mean,
             p.error.row.mean if p.error else math.nan]
            for r in whole
            for p in r.points
        ]  # fmt: skip
    if not panels:
        return None
    ends = f"shift {records[0].d1} against shift {records[0].d2}"
    caption = (
        f"The paper's figure 1, right, {ends}, and every other column beside the first: a column's mean |difference "
        "of logits| over the queries that see it, summed over layers and heads. Below: what one query sees move, "
        "which does not grow by counting. Means over sequences, bars one standard deviation (none column by column, "
        "where the middle and the last one are other tokens at each length). "
        f"{_sequences(records)} at each length."
    )
    heads = ("run", "mode", "tokens", "sequences", "D_logit, first", "std", "D_logit, mean of others",
             "first column's share of D", "moved per query", "distance from float64 per query")  # fmt: skip
    return Figure(
        "length",
        "What grows with the length",
        caption,
        panels,
        [Table("length", "By length", heads, rows)],
        in_shares=True,
    )


def _sequences(records: Sequence[ByLength]) -> str:
    """How many sequences each line is a mean of, and which where that differs."""
    names: dict[int, list[str]] = {}
    for r in records:
        names.setdefault(r.sequences, []).append(name_of(r))
    if len(names) == 1:
        return count(records[0].sequences, "sequence")
    return "; ".join(f"{', '.join(dict.fromkeys(held))}: {count(n, 'sequence')}" for n, held in names.items())


def _columns(record: ByLength) -> list[Line]:
    """One line for each column that is there at two lengths or more; the middle and the last one move with the
    length.
    """
    fixed = sorted({j for p in record.points for j in p.columns if sum(j in q.columns for q in record.points) > 1})
    fixed = [
        j for j in fixed if j not in {p.tokens // 2 for p in record.points} | {p.tokens - 1 for p in record.points}
    ]
    found = [
        (f"column {j + 1}", [(p.tokens, p.columns[j]) for p in record.points if p.columns.get(j)]) for j in fixed[:6]
    ]
    for name, place in (("the middle one", lambda p: p.tokens // 2), ("the last one", lambda p: p.tokens - 1)):
        found.append((name, [(p.tokens, p.columns[place(p)]) for p in record.points if p.columns.get(place(p))]))
    return [Line(name, [x for x, _ in points], [y for _, y in points]) for name, points in found if points]
