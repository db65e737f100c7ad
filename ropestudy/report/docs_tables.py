"""Every table of a study, as Markdown: what stands in docs/precision-numbers.md."""

from collections.abc import Sequence

from ropestudy.report.answers import (
    BIAS_HEADS,
    COPY_HEADS,
    OUTCOME_HEADS,
    actions,
    bias_rows,
    small_table,
    where_of,
)
from ropestudy.report.effects import difference_of, exponent_of, mean_of, quotient_of
from ropestudy.report.figures_context import TEXTS
from ropestudy.report.figures_sites import rank
from ropestudy.report.findings import CASE_HEADS, case_rows
from ropestudy.report.select import baseline, is_half, name_of, of_kind, scores, unique
from ropestudy.schema import ByLength, EmulationCheck, MaskPair, OwnError, Results, Score


def tables(results: Results) -> list[str]:
    """Return every table of a study that it has records for, as Markdown, each under a heading of its own."""
    return [
        actions_table("From setup to action, everywhere", *actions(results)),
        table("What was found, case by case", CASE_HEADS, case_rows(results)),
        table("Whole setups, plain text", OUTCOME_HEADS, small_table(results, "setup", "text")),
        table("Whole setups, copied keys", (*OUTCOME_HEADS, *COPY_HEADS), small_table(results, "setup", "copy")),
        table("Doses, copied keys", (*OUTCOME_HEADS, *COPY_HEADS), small_table(results, "dose", "copy")),
        table("Doses, plain text", OUTCOME_HEADS, small_table(results, "dose", "text")),
        table(
            "Every rounding alone, by what the outputs make of it", OUTCOME_HEADS, small_table(results, "site", "text")
        ),
        table("The sign of the error of logits", BIAS_HEADS, bias_rows(results)),
        _presets(results),
        _sites(results),
        *_left_out(results),
        *_remedies(results),
        _models(results),
        _first_token(results),
        _masks(results),
        _mask_pairs(results),
        _positions(results),
        _lengths(results),
        _emulation(results),
    ]


def actions_table(title: str, heads: Sequence[str], rows: Sequence[list[str]]) -> str:
    """Return a table in which a setup is named once."""
    return table(title, heads, [["", *row[1:]] if _same(rows, n) else row for n, row in enumerate(rows)])


def _same(rows: Sequence[Sequence[str]], number: int) -> bool:
    """Return whether a row is of the same setup as the one above it, whose name then stands there alone."""
    return number > 0 and rows[number][0] == rows[number - 1][0]


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table under a heading; nothing where it has no rows."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (heads, *rows)]
    return "\n".join([f"### {title}", "", lines[0], "| --- " * len(heads) + "|", *lines[1:]])


MEASURES = (
    *("shift error, local", "shift error, propagated", "error, local", "error, propagated"),
    *("KL between shifts, nats", "KL from float64, nats"),
)


def _measures(score: Score) -> list[list[float]]:
    """Return each text's own of what `MEASURES` names."""
    rows = [side[mode].row.values for side in (score.shift, score.error) for mode in ("local", "propagated")]
    return [*rows, score.kl_shift.kl.values, score.kl_error.kl.values]


def _absolute(title: str, head: str, rows: Sequence[tuple[str, Score]]) -> str:
    return table(
        title,
        (head, "positions", *MEASURES, "loss added, nats"),
        [
            [name, _positions_of(score), *(str(mean_of(x)) for x in _measures(score)), _loss(score)]
            for name, score in rows
        ],
    )


def _positions_of(score: Score) -> str:
    return where_of(score.d1, score.gap, score.tokens)


def _loss(score: Score) -> str:
    """The condition's loss less float64's."""
    p, q = score.kl_error.nll_p, score.kl_error.nll_q
    return str(difference_of(q.values, p.values)) if p and q else ""


def _presets(results: Results) -> str:
    rows = [*scores(results, "baseline"), *scores(results, "control")]
    rows = [score for score in rows if score.group == "baseline" or score.condition.startswith("fp32")]
    found = {(score.condition, _positions_of(score)): score for score in rows}
    named = [(condition, score) for (condition, _), score in found.items()]
    return _absolute("Whole presets: probability moved per query (0 to 2)", "preset", named)


def _sites(results: Results) -> str:
    rows = [(score.condition.removeprefix("on "), score) for score in rank(scores(results, "on_alone"))]
    return _absolute("Every rounding alone: probability moved per query (0 to 2)", "site", rows)


def _left_out(results: Results) -> list[str]:
    rows = [r for r in scores(results, "off_alone") if ", " in (r.site or "")]
    return _fractions(results, rows, "Left out together: fraction left of {}'s", "without", " - ")


def _remedies(results: Results) -> list[str]:
    return _fractions(results, scores(results, "remedy"), "Remedies: fraction left of {}'s", "remedy", ": ")


def _fractions(results: Results, rows: Sequence[Score], title: str, head: str, behind: str) -> list[str]:
    """A table a preset, of what is left of it; `behind` stands between its name and what is changed."""
    made = []
    for base in unique([row.base or "" for row in rows]):
        cells = []
        for row in rows:
            whole = baseline(results, row)
            if row.base == base and whole:
                left = [quotient_of(x, y) for x, y in zip(_measures(row), _measures(whole), strict=True)]
                name = row.condition.removeprefix(f"{base}{behind}")
                cells.append([name, _positions_of(row), *map(str, left)])
        made.append(table(title.format(base), (head, "positions", *MEASURES), cells))
    return made


def _models(results: Results) -> str:
    others = [r for r in scores(results, "control") if r.model != "pretrained"]
    conditions = {r.condition for r in others}
    rows = [*(r for r in scores(results, "baseline") if r.condition in conditions), *others]
    found = {(r.model, r.condition, _positions_of(r)): r for r in rows}
    named = [
        (model if len(conditions) == 1 else f"{model}, {condition}", r) for (model, condition, _), r in found.items()
    ]
    table = _absolute(f"Other weights, under {', '.join(sorted(conditions))}", "weights", named)
    words = "\n".join(f"- {name}: {what}" for name, what in results.model.initialisations.items())
    return f"{table}\n\n{words}" if table and words else table


def _first_token(results: Results) -> str:
    rows = []
    for r in scores(results, "first_token"):
        f = r.shift["local"]
        name = f"{r.condition}, {TEXTS[r.text]}"
        stats = (f.first_mass_unweighted, f.first_share_unweighted, f.first_per_mass, f.rest_per_mass)
        told = [str(mean_of(values)) for values in (*(stat.values for stat in stats), *_measures(r)[:2])]
        rows.append([name, _positions_of(r), *told])
    heads = (
        *("arithmetic and text", "positions", "attention it receives", "its share of the difference (at most 0.5)"),
        *("difference per unit of attention, first column", "all others", *MEASURES[:2]),
    )
    return table("The first column, local", heads, rows)


def _masks(results: Results) -> str:
    rows = [(f"{r.condition}, {r.mask}", r) for r in scores(results, "mask") if is_half(r.condition)]
    return _absolute("Packed documents under every mask: probability moved per query (0 to 2)", "preset and mask", rows)


def _mask_pairs(results: Results) -> str:
    rows = [
        [p.condition, f"{p.a} and {p.b}", p.mode, str(mean_of(p.difference.row.values)), str(mean_of(p.kl.kl.values))]
        for p in of_kind(results, MaskPair)
    ]
    heads = ("arithmetic", "positions as in", "mode", "moved per query", "KL of the outputs, nats")
    return table("The same documents and mask, positions restarted or not", heads, rows)


def _positions(results: Results) -> str:
    records = of_kind(results, OwnError)
    records = [r for r in records if r.mode == records[0].mode]
    shifts = sorted({p.shift for r in records for p in r.points})
    rows = []
    for r in records:
        by_shift = {p.shift: str(mean_of(p.error.row.values)) for p in r.points}
        rows.append([name_of(r), *(by_shift.get(d, "") for d in shifts)])
    title = f"Distance from float64 per query by shift of the positions{f', {records[0].mode}' if records else ''}"
    return table(title, ("arithmetic", *(f"{d:,}" for d in shifts)), rows)


def _lengths(results: Results) -> str:
    rows, begins = [], set[str]()
    for r in of_kind(results, ByLength):
        if is_half(r.condition):
            begins.add(f"{r.d1:,} and {r.d2:,}")
            for p in r.points:
                stats = (p.shift.d_logit_first, p.shift.d_logit_rest, p.shift.d, p.shift.row)
                error = str(mean_of(p.error.row.values)) if p.error else ""
                told = [str(mean_of(stat.values)) for stat in stats]
                rows.append([f"{name_of(r)}, {r.mode}", f"{p.tokens:,}", *told, error])
            if len(r.points) > 1:
                sizes = [p.tokens for p in r.points]
                sides = ("d_logit_first", "d_logit_rest", "d", "row")
                told = [str(exponent_of(sizes, [getattr(p.shift, x).values for p in r.points])) for x in sides]
                rows.append([f"{name_of(r)}, {r.mode}", "exponent", *told, _error_exponent(r)])
    heads = (
        *("run", "tokens", "D_logit, first column", "mean of all others", "D (eq. 5)", "shift error per query"),
        "error per query",
    )
    return table(f"By length, between rows that begin at positions {', '.join(sorted(begins))}", heads, rows)


def _error_exponent(record: ByLength) -> str:
    found = [(p.tokens, p.error.row.values) for p in record.points if p.error]
    return str(exponent_of([x for x, _ in found], [y for _, y in found])) if len(found) > 1 else ""


def _emulation(results: Results) -> str:
    rows = []
    for r in of_kind(results, EmulationCheck):
        between = f"{min(r.between):.2g} to {max(r.between):.2g}"
        same = f"{r.identical[0]:.1%} in the first layer, {min(r.identical):.1%} at least"
        d = (f"{stat.mean:.4g} (std {stat.std:.2g})" for stat in (r.d_torch, r.d_oracle))
        ratios = (f"{x:.2f}" for x in (max(r.ratio), r.shift_ratio, r.shift_ratio_first, r.d_ratio))
        rows.append([r.attention_from, r.condition, *ratios, between, f"{max(r.error):.2g}", same, *d])
    heads = (
        "attention from",
        "beside the oracle's",
        "largest error over allowance of a layer",
        "of the difference between the shifts",
        "of that in the first layer",
        "of D by column",
        "between the two, RMS by layer",
        "largest from float64",
        "the same number",
        "D, torch",
        "D, oracle",
    )
    return table("The emulation beside torch", heads, rows)
