"""`report.html`: one self-contained page; the claims and their verdicts first, then the figures they rest on.

Nothing is loaded from anywhere, and the page's own policy forbids it. Without its script the page says the same.
"""

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

from jaxref.study.report.claims import Claim
from jaxref.study.report.claims_cause import cause_claims
from jaxref.study.report.claims_context import context_claims
from jaxref.study.report.claims_paper import paper_claims
from jaxref.study.report.figure import Figure, Table, svg
from jaxref.study.report.figures_context import context_figures
from jaxref.study.report.figures_paper import paper_figures
from jaxref.study.report.figures_sites import sites_figures
from jaxref.study.report.select import count, number, printable
from jaxref.study.schema import Results

SIGNS = {"holds": "✓", "does not hold": "✗", "depends": "~", "not measured": "–"}
NAMES = {"depends": "depends on"}
SHARES = (
    "Shares: the rows of attention sum to one, so what one column loses others gain, and a column's part of the unweighted "
    "difference cannot exceed a half. n of eq. 5 divides a column by the queries that see it, so the last columns weigh most in D."
)
READ = (
    "D is the paper's eq. 5 and grows with the sequence, the layers and the heads. Where nothing else is said, a number is the "
    "probability that moves per query: the sum of |difference of attention| of a row, from 0 (nothing) to 2 (everything), in the "
    "mean over queries, layers and heads. Local: both runs are given the same input at every layer. Propagated: each run is a "
    "forward pass of its own."
)


def figures_of(results: Results) -> list[Figure]:
    """Every figure that the study has records for, in the order of the page."""
    return [*paper_figures(results), *sites_figures(results), *context_figures(results)]


def render(results: Results) -> str:
    """The page, as HTML text to be written in UTF-8. Everything in the results is taken for text, never for markup."""
    style, script = (
        files("jaxref.study.report").joinpath(f"page.{kind}").read_text("utf-8").strip() for kind in ("css", "js")
    )
    figures, paper, own = figures_of(results), paper_claims(results), [*cause_claims(results), *context_claims(results)]
    names = {figure.name for figure in figures}
    body = "\n".join(
        [
            _header(results, paper),
            "<main>",
            _claims("The paper's claims", "paper", paper, names),
            _claims("Beyond the paper", "own", own, names),
            '<section id="figures">\n<h2>Figures</h2>\n' + _contents(figures),
            *map(_figure, figures),
            "</section>\n</main>",
            _footer(results),
        ]
    )
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(results.title)}: precision study</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


# -- the verdicts ------------------------------------------------------------------------------------------------------------


def _header(results: Results, paper: Sequence[Claim]) -> str:
    tally = {name: sum(claim.verdict == name for claim in paper) for name in SIGNS}
    parts = [f"{tally['holds']} {'holds' if tally['holds'] == 1 else 'hold'}", f"{tally['does not hold']} "
             f"{'does' if tally['does not hold'] == 1 else 'do'} not", f"{tally['depends']} depend{'s' if tally['depends'] == 1 else ''}"]  # fmt: skip
    parts += [f"{tally['not measured']} not measured in this configuration"] if tally["not measured"] else []
    return (
        f'<header>\n<p class="kicker">{_text(results.title)} <time>{_text(_date(results.created))}</time></p>\n'
        "<h1>Does bf16 break RoPE?</h1>\n"
        f'<p class="lede">Of the paper\'s {count(len(paper), "claim")}, tried on {_text(results.model.source)}: '
        f"{', '.join(parts)}. Each verdict follows from the numbers by the criterion beside it.</p>\n"
        f'<ul class="summary">{"".join(map(_line, paper))}</ul>\n<p class="soft">{READ}</p>\n</header>'
    )


def _line(claim: Claim) -> str:
    """A claim and its verdict, in the list at the top."""
    return (
        f'<li class="{claim.verdict.replace(" ", "-")}"><b>{SIGNS[claim.verdict]} {claim.verdict}</b> '
        f'<a href="#claim-{claim.key}">{_text(claim.says)}</a>'
    )


def _claims(title: str, identity: str, claims: Sequence[Claim], figures: set[str]) -> str:
    return (
        f'<section id="{identity}">\n<h2>{title}</h2>\n<ol class="claims">\n'
        + "\n".join(_claim(claim, figures) for claim in claims)
        + "\n</ol>\n</section>"
    )


def _claim(claim: Claim, figures: set[str]) -> str:
    name = NAMES.get(claim.verdict, claim.verdict) + (
        " (in this configuration)" if claim.verdict == "not measured" else ""
    )
    on = f" <span>{_text(claim.depends)}</span>" if claim.depends else ""
    link = f' <a href="#{claim.figure}">figure</a>' if claim.cases and claim.figure in figures else ""
    parts = [
        f"<h3>{_text(claim.says)}</h3>",
        f'<p class="verdict {claim.verdict.replace(" ", "-")}"><b>{SIGNS[claim.verdict]} {name}</b>{on}</p>',
        f"<p>{_text(claim.numbers)}.{link}</p>" if claim.cases else "",
        f'<p class="soft">Criterion: {_text(claim.criterion)} <em>{_text(_capital(claim.source))}.</em></p>',
        f'<p class="soft">{_text(claim.note)}</p>' if claim.note else "",
        f'<p class="soft">{SHARES}</p>' if claim.about_shares and claim.cases else "",
        _cases(claim),
    ]
    return f'<li id="claim-{claim.key}">' + "\n".join(filter(None, parts))


def _cases(claim: Claim) -> str:
    if not claim.cases:
        return ""
    factors = list(dict.fromkeys(factor for case in claim.cases for factor in case.where))
    said = {True: "yes", False: "no", None: "sequences disagree"}
    rows = [[*(case.where.get(factor, "") for factor in factors), case.number, said[case.yes]] for case in claim.cases]
    return _table(
        Table(
            claim.key,
            f"All {count(len(rows), 'case')}" if len(rows) > 1 else "The case",
            (*factors, claim.number_is, "criterion met"),
            rows,
        )
    )


# -- the figures -------------------------------------------------------------------------------------------------------------


def _contents(figures: Sequence[Figure]) -> str:
    items = "".join(f'<li><a href="#{figure.name}">{_text(figure.title)}</a>' for figure in figures)
    return f"<ul class=contents>{items}</ul>" if items else "<p>The study holds no record.</p>"


def _figure(figure: Figure) -> str:
    panels = "\n".join(
        f'<div class="panel{" wide" if panel.wide else ""}">'
        + (f"<h4>{_text(panel.title)}</h4>" if panel.title else "")
        + svg(panel, f"{figure.name}-{place}")
        + "</div>"
        for place, panel in enumerate(figure.panels)
    )
    shares = f" {SHARES}" if figure.in_shares else ""
    return (
        f'<figure id="{figure.name}">\n<h3>{_text(figure.title)}</h3>\n<div class="panels">\n{panels}\n</div>\n'
        f"<figcaption>{_text(figure.caption)}{shares}</figcaption>\n{''.join(map(_table, figure.tables))}</figure>"
    )


def _table(table: Table) -> str:
    numeric = [all(isinstance(row[i], (int, float)) for row in table.rows) for i in range(len(table.heads))]
    heads = "".join(
        f'<th scope="col"{" class=n" * n}>{_text(head)}' for head, n in zip(table.heads, numeric, strict=True)
    )
    rows = "\n".join("<tr>" + "".join(_cell(value) for value in row) for row in table.rows)
    return (
        f"<details><summary>{_text(table.title)}</summary>\n"
        f'<div class="scroll" role="region" aria-label="{_text(table.title)}" tabindex="0">'
        f'<table class="sorts"><thead><tr>{heads}</thead>\n<tbody>\n{rows}\n</tbody></table></div></details>\n'
    )


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return f"<td>{_text(value)}"
    if math.isnan(value):
        return "<td class=n>"
    sortable = f"{value:.9g}".replace("inf", "Infinity")  # as JavaScript reads it
    return f'<td class=n data-value="{sortable}">{number(value)}'


# -- where and how -----------------------------------------------------------------------------------------------------------


def _footer(results: Results) -> str:
    environment, model = results.environment, results.model
    commit = environment.git_commit or "not in a git repository"
    shape = ", ".join(
        f"{key} {model.config[key]}"
        for key in (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_size",
            "rope_theta",
            "max_position_embeddings",
        )
        if isinstance(model.config.get(key), (int, float))
    )
    facts = {
        "model": f"{model.source}, {count(model.parameters, 'parameter')}, rounded to {model.weights}",
        "shape": shape or "see results.json",
        "weights' SHA-256": model.sha256,
        "text": f"{results.text.source}; BOS {results.text.bos if results.text.bos is not None else 'none'}",
        "documents": "; ".join(results.text.documents),
        "hardware": environment.hardware,
        "device": environment.device,
        "commit": commit + (", with changes that are not committed" if environment.git_dirty else ""),
        "created": results.created,
        "computing": f"{results.seconds:,.0f} s",
    }
    return (
        f'<footer>\n<h2>Where and how</h2>\n<pre class="command">{_text(results.command)}</pre>\n{_facts(facts)}\n'
        f"<h3>Versions</h3>\n{_facts(environment.versions)}\n</footer>"
    )


def _facts(facts: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts.items()) + "</dl>"


def _date(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%d %B %Y, %H:%M} UTC"
    except ValueError:
        return created


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _text(value: str) -> str:
    """Text for an element or a quoted attribute; what HTML cannot hold becomes a replacement character."""
    return html.escape(printable(value))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
