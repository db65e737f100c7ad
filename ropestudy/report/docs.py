"""The numbers in docs/precision.md: Markdown tables from a study, put between two marks of the document.

python -m ropestudy.report runs/study --document docs/precision.md
"""

from collections.abc import Sequence
from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import replace_file
from anchorline.page import count
from ropestudy.report.claims import Claim
from ropestudy.report.claims_cause import cause_claims
from ropestudy.report.claims_context import context_claims
from ropestudy.report.claims_paper import paper_claims
from ropestudy.report.figure import write_png
from ropestudy.report.figures_context import TEXTS
from ropestudy.report.figures_sites import rank
from ropestudy.report.html import figures_of
from ropestudy.report.select import (
    baseline,
    between,
    is_half,
    name_of,
    number,
    of_kind,
    scores,
    share,
    times,
    unique,
)
from ropestudy.schema import ByLength, EmulationCheck, MaskPair, OwnError, Results, Score

BEGIN = "<!-- Numbers: made by `python -m ropestudy.report FOLDER --document FILE`; edit the study, not this. -->"
END = "<!-- End of the numbers. -->"
TINY = 0.005  # fractions below would be 0.00
FIGURES = ("shift", "on-alone", "position")  # shown in the document


def refresh(results: Results, document: Path) -> None:
    """Replace what stands between the marks of the document, and its figures in `figures/` beside it.

    Raises UserError, one line, if the document is not there or has not both marks.
    """
    text = document.read_text(encoding="utf-8") if document.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UserError(f"--document {document}: no file with one line {BEGIN!r} and one {END!r}; add them")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    drawn = [figure for figure in figures_of(results) if figure.name in FIGURES]
    folder = document.parent / "figures"
    if drawn:
        folder.mkdir(exist_ok=True)
    for figure in drawn:
        write_png(figure, folder / f"precision-{figure.name}.png")
    replace_file(document, f"{before}{BEGIN}\n\n{numbers(results)}\n{END}{after}".encode())


def numbers(results: Results) -> str:
    """Return every table, with where and how it was measured."""
    parts = [
        _where(results),
        _verdicts("The paper's claims", paper_claims(results)),
        _verdicts("Beyond them", [*cause_claims(results), *context_claims(results)]),
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
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"### {title}", "", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|", *lines])


def _where(results: Results) -> str:
    environment = results.environment
    commit = (environment.git_commit or "no commit")[:12] + (" with changes" if environment.git_dirty else "")
    seen = [f"{tokens:,}" for tokens in sorted({r.tokens for r in results.records})]
    sequences = between(sorted({float(r.sequences) for r in results.records})) if results.records else "0"
    return (
        f"Measured with `{results.command}` ({results.title}) on {results.created[:10]}: {results.model.source}, "
        f"{count(results.model.parameters, 'parameter')} rounded to {results.model.weights}; text "
        f"{results.text.source}; {sequences} sequences of {', '.join(seen)} tokens; {environment.hardware}, JAX on "
        f"{environment.device}, computing {results.seconds:,.0f} s; {commit}."
    )


def _verdicts(title: str, claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        verdict = claim.verdict + (f" on {claim.depends}" if claim.depends else "")
        rows.append([claim.says, verdict, claim.numbers])
    return _table(title, ("claim", "verdict", "number"), rows)


MEASURES = (
    *("shift error, local", "shift error, propagated", "error, local", "error, propagated"),
    *("KL between shifts, nats", "KL from float64, nats"),
)


def _measures(score: Score) -> list[float]:
    rows = [side[mode].row.mean for side in (score.shift, score.error) for mode in ("local", "propagated")]
    return [*rows, score.kl_shift.kl.mean, score.kl_error.kl.mean]


def _absolute(title: str, head: str, rows: Sequence[tuple[str, Score]]) -> str:
    return _table(
        title,
        (head, *MEASURES),
        [[name, *map(number, _measures(score))] for name, score in rows],
    )


def _presets(results: Results) -> str:
    found = {score.condition: score for score in scores(results, "baseline")}
    found |= {score.condition: score for score in scores(results, "control") if score.condition.startswith("fp32")}
    return _absolute("Whole presets: probability moved per query (0 to 2)", "preset", list(found.items()))


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
                left = [times(x, y) for x, y in zip(_measures(row), _measures(whole), strict=True)]
                name = row.condition.removeprefix(f"{base}{behind}")
                cells.append([name, *(number(x) if x < TINY else f"{x:.2f}" for x in left)])
        made.append(_table(title.format(base), (head, *MEASURES), cells))
    return made


def _models(results: Results) -> str:
    rows = {(r.model, r.condition): r for r in scores(results, "control") if r.model != "pretrained"}
    conditions = {condition for _, condition in rows}
    own = {(r.model, r.condition): r for r in scores(results, "baseline") if r.condition in conditions} if rows else {}
    named = [
        (model if len(conditions) == 1 else f"{model}, {condition}", r)
        for (model, condition), r in (own | rows).items()
    ]
    table = _absolute(f"Other weights, under {', '.join(sorted(conditions))}", "weights", named)
    words = "\n".join(f"- {name}: {what}" for name, what in results.model.initialisations.items())
    return f"{table}\n\n{words}" if table and words else table


def _first_token(results: Results) -> str:
    rows = []
    for r in scores(results, "first_token"):
        f = r.shift["local"]
        name = f"{r.condition}, {TEXTS[r.text]}"
        shares = (share(stat.mean) for stat in (f.first_mass_unweighted, f.first_share_unweighted))
        rows.append(
            [name, *shares, number(f.first_per_mass.mean), number(f.rest_per_mass.mean), *map(number, _measures(r)[:2])]
        )
    heads = (
        *("arithmetic and text", "attention it receives", "its share of the difference (at most 50%)"),
        *("difference per unit of attention, first column", "all others", *MEASURES[:2]),
    )
    return _table("The first column, local", heads, rows)


def _masks(results: Results) -> str:
    rows = [(f"{r.condition}, {r.mask}", r) for r in scores(results, "mask") if is_half(r.condition)]
    return _absolute("Packed documents under every mask: probability moved per query (0 to 2)", "preset and mask", rows)


def _mask_pairs(results: Results) -> str:
    rows = [
        [p.condition, f"{p.a} and {p.b}", p.mode, number(p.difference.row.mean), number(p.kl.kl.mean)]
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
        by_shift = {p.shift: p.error.row.mean for p in r.points}
        rows.append([name_of(r), *(number(by_shift[d]) if d in by_shift else "" for d in shifts)])
    title = f"Distance from float64 per query by shift of the positions{f', {records[0].mode}' if records else ''}"
    return _table(title, ("arithmetic", *(f"{d:,}" for d in shifts)), rows)


def _lengths(results: Results) -> str:
    rows = []
    for r in of_kind(results, ByLength):
        if is_half(r.condition):
            for p in r.points:
                stats = (p.shift.d_logit_first, p.shift.d_logit_rest, p.shift.row)
                error = number(p.error.row.mean) if p.error else ""
                rows.append([f"{name_of(r)}, {r.mode}", f"{p.tokens:,}", *(number(s.mean) for s in stats), error])
    heads = ("run", "tokens", "D_logit, first column", "mean of all others", "shift error per query", "error per query")
    return _table("By length", heads, rows)


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
