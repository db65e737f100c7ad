"""The numbers in docs/precision.md: Markdown tables from a study, put between two marks of the document.

python -m ropestudy.report runs/study --document docs/precision.md
"""

from collections.abc import Sequence
from pathlib import Path

from anchorline.files import replace_file
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page import count
from ropestudy.report.answers import (
    BETTER,
    BIAS_HEADS,
    COPY_HEADS,
    MUCH,
    OUTCOME_HEADS,
    WORSE,
    actions,
    bias_rows,
    brief_actions,
    small_table,
    where_of,
)
from ropestudy.report.claims import Claim
from ropestudy.report.claims_cause import cause_claims
from ropestudy.report.claims_context import context_claims
from ropestudy.report.claims_paper import paper_claims
from ropestudy.report.effects import difference_of, exponent_of, mean_of, quotient_of
from ropestudy.report.figure import Figure, write_png
from ropestudy.report.figures_context import TEXTS
from ropestudy.report.figures_sites import rank
from ropestudy.report.findings import CASE_HEADS, case_rows, findings
from ropestudy.report.html import figures_of
from ropestudy.report.select import (
    baseline,
    between,
    is_half,
    name_of,
    of_kind,
    scores,
    unique,
)
from ropestudy.schema import ByLength, EmulationCheck, MaskPair, OwnError, Results, Score

BEGIN = "<!-- Numbers: made by `python -m ropestudy.report FOLDER --document FILE`; edit the study, not this. -->"
END = "<!-- End of the numbers. -->"
COMMANDS_BEGIN = "<!-- Commands: made like the numbers. -->"
COMMANDS_END = "<!-- End of the commands. -->"
_NUMBERS, _COMMANDS = MarkedPlace(BEGIN, END), MarkedPlace(COMMANDS_BEGIN, COMMANDS_END)
TINY = 0.005  # fractions below would be 0.00
FIGURES = ("dose", "shift", "samples", "tokens", "length")  # shown in the document


def refresh(results: Results, document: Path, second: Results | None = None) -> None:
    """Replace what stands between the two pairs of marks of the document, and its figures in `figures/` beside it.

    second: of another model, whose tables follow.

    Raises UserError, one line, if the document is not there or has not all marks.
    """
    text = read_marked(document, [_NUMBERS, _COMMANDS])
    drawn = [figure for figure in figures_of(results) if figure.name in FIGURES]
    folder = document.parent / "figures"
    if drawn:
        folder.mkdir(exist_ok=True)
    for figure in drawn:
        write_png(figure, folder / f"precision-{figure.name}.png")
    text = _NUMBERS.put(text, numbers(results, drawn, second))
    replace_file(document, _COMMANDS.put(text, _commands(results, second)).encode())


def _commands(results: Results, second: Results | None) -> str:
    """Every command of both studies, as a block."""
    said = [one for study in (results, second) if study for one in study.command.split("\n")]
    return "".join(f"    {one}\n" for one in said)


def numbers(results: Results, drawn: Sequence[Figure] = (), second: Results | None = None) -> str:
    """Return the whole of what is measured: what to do, what was found, claims, every table, a second model."""
    parts = [
        _where(results),
        "## What to do",
        ACTIONS_SAY,
        _actions("From setup to action", *brief_actions(results)),
        "## What was found",
        _found(results),
        *_shown(drawn, "dose"),
        "## The paper's claims",
        CLAIMS_SAY,
        *_judged("Claim by claim", paper_claims(results)),
        *_judged("Beyond them", [*cause_claims(results), *context_claims(results)]),
        *_shown(drawn, "shift", "samples", "tokens", "length"),
        "## Every number",
        *_tables(results),
    ]
    if second is not None:
        parts += [
            f"## A second model: {second.title}",
            _where(second),
            _actions("From setup to action", *brief_actions(second)),
            _found(second),
            *_judged("The paper's claims, of the second model", paper_claims(second)),
            *_judged("Beyond them, of the second model", [*cause_claims(second), *context_claims(second)]),
            *_tables(second),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


ACTIONS_SAY = (
    "Each cell says how many times as far from float64 the outputs are after the change (KL; 1: no difference, 0.5: "
    f"half as far), with its interval over texts. **do**: the interval lies below {BETTER}; **do not**: above "
    f"{WORSE}; **never**: above {MUCH:g}; **no matter**: between the first two; **not settled**: it spans one of them. "
    "A row of N positions has both: *near*, its last tokens, with keys among themselves; *far*, its first tokens and "
    "its last, with nothing between. In the tables below these are *T tokens ending at N* and *keys N farther away*. "
    "**A change must be right for both.**"
)
CLAIMS_SAY = (
    "A verdict counts bf16 forward passes of the pretrained model away from position 0 where there are any; other "
    "cases are in brackets. Where there are none, *at position 0* stands behind the number. It is *not settled* where "
    "an interval spans the margin."
)


def _shown(drawn: Sequence[Figure], *names: str) -> list[str]:
    """Each figure and its caption."""
    found = {figure.name: figure for figure in drawn}
    return [
        f"![{found[name].title}](figures/precision-{name}.png)\n\n*{found[name].caption}*"
        for name in names
        if name in found
    ]


def _judged(title: str, claims: Sequence[Claim]) -> list[str]:
    """The claims that were measured, and the others by name."""
    left = [claim.says for claim in claims if not claim.cases]
    named = f"Not measured here: {'; '.join(left)}." if left else ""
    return [_verdicts(title, [claim for claim in claims if claim.cases]), named]


def _actions(title: str, heads: Sequence[str], rows: Sequence[list[str]]) -> str:
    return _table(title, heads, [["", *row[1:]] if _same(rows, n) else row for n, row in enumerate(rows)])


def _same(rows: Sequence[Sequence[str]], number: int) -> bool:
    """Return whether a row is of the same setup as the one above it, whose name then stands there alone."""
    return number > 0 and rows[number][0] == rows[number - 1][0]


def _found(results: Results) -> str:
    return "\n".join(f"{place}. **{one.head}** {one.says}" for place, one in enumerate(findings(results), start=1))


def _tables(results: Results) -> list[str]:
    whole = actions(results)
    return [
        _actions("From setup to action, everywhere", *whole) if whole != brief_actions(results) else "",
        _table("What was found, case by case", CASE_HEADS, case_rows(results)),
        _table("Whole setups, plain text", OUTCOME_HEADS, small_table(results, "setup", "text")),
        _table("Whole setups, copied keys", (*OUTCOME_HEADS, *COPY_HEADS), small_table(results, "setup", "copy")),
        _table("Doses, copied keys", (*OUTCOME_HEADS, *COPY_HEADS), small_table(results, "dose", "copy")),
        _table("Doses, plain text", OUTCOME_HEADS, small_table(results, "dose", "text")),
        _table(
            "Every rounding alone, by what the outputs make of it", OUTCOME_HEADS, small_table(results, "site", "text")
        ),
        _table("The sign of the error of logits", BIAS_HEADS, bias_rows(results)),
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


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (heads, *rows)]
    return "\n".join([f"### {title}", "", lines[0], "| --- " * len(heads) + "|", *lines[1:]])


def _where(results: Results) -> str:
    environment = results.environment
    commit = (environment.git_commit or "no commit")[:12] + (" with changes" if environment.git_dirty else "")
    seen = [f"{tokens:,}" for tokens in sorted({r.tokens for r in results.records})]
    sequences = between(sorted({float(r.sequences) for r in results.records})) if results.records else "0"
    left = [f"{name} {ready} of {whole}" for name, (ready, whole) in results.cells.items() if ready < whole]
    unfinished = f" Not finished, and not shown: {', '.join(left)} cells." if left else ""
    return (
        f"Measured on {results.created[:10]} ({results.title}): {results.model.source}, "
        f"{count(results.model.parameters, 'parameter')} rounded to {results.model.weights}; text "
        f"{results.text.source}; {sequences} sequences of {', '.join(seen)} tokens; {environment.hardware}, JAX on "
        f"{environment.device}, computing {results.seconds:,.0f} s; {commit}.{unfinished}"
    )


def _verdicts(title: str, claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        verdict = claim.verdict + (f" on {claim.depends}" if claim.depends else "")
        verdict += f" (over all cases, by {claim.exceptions})" if claim.exceptions else ""
        rows.append([claim.says, verdict, claim.numbers])
    return _table(title, ("claim", "verdict", "number"), rows)


MEASURES = (
    *("shift error, local", "shift error, propagated", "error, local", "error, propagated"),
    *("KL between shifts, nats", "KL from float64, nats"),
)


def _measures(score: Score) -> list[list[float]]:
    """Return each text's own of what `MEASURES` names."""
    rows = [side[mode].row.values for side in (score.shift, score.error) for mode in ("local", "propagated")]
    return [*rows, score.kl_shift.kl.values, score.kl_error.kl.values]


def _absolute(title: str, head: str, rows: Sequence[tuple[str, Score]]) -> str:
    return _table(
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
        made.append(_table(title.format(base), (head, "positions", *MEASURES), cells))
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
    return _table("The first column, local", heads, rows)


def _masks(results: Results) -> str:
    rows = [(f"{r.condition}, {r.mask}", r) for r in scores(results, "mask") if is_half(r.condition)]
    return _absolute("Packed documents under every mask: probability moved per query (0 to 2)", "preset and mask", rows)


def _mask_pairs(results: Results) -> str:
    rows = [
        [p.condition, f"{p.a} and {p.b}", p.mode, str(mean_of(p.difference.row.values)), str(mean_of(p.kl.kl.values))]
        for p in of_kind(results, MaskPair)
    ]
    heads = ("arithmetic", "positions as in", "mode", "moved per query", "KL of the outputs, nats")
    return _table("The same documents and mask, positions restarted or not", heads, rows)


def _positions(results: Results) -> str:
    records = of_kind(results, OwnError)
    records = [r for r in records if r.mode == records[0].mode]
    shifts = sorted({p.shift for r in records for p in r.points})
    rows = []
    for r in records:
        by_shift = {p.shift: str(mean_of(p.error.row.values)) for p in r.points}
        rows.append([name_of(r), *(by_shift.get(d, "") for d in shifts)])
    title = f"Distance from float64 per query by shift of the positions{f', {records[0].mode}' if records else ''}"
    return _table(title, ("arithmetic", *(f"{d:,}" for d in shifts)), rows)


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
    return _table(f"By length, between rows that begin at positions {', '.join(sorted(begins))}", heads, rows)


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
    return _table("The emulation beside torch", heads, rows)
