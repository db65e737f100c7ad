"""`report.html`: one self-contained page; the claims and their verdicts first, then the figures they rest on.

What stands where is `page.html.j2`; here is what it says.
"""

from collections.abc import Sequence

from anchorline.page import count
from anchorline.page import render as render_page
from ropestudy.report.answers import actions
from ropestudy.report.claims import Claim
from ropestudy.report.claims_cause import cause_claims
from ropestudy.report.claims_context import context_claims
from ropestudy.report.claims_paper import paper_claims
from ropestudy.report.figure import Figure, Table, svg
from ropestudy.report.figures_context import context_figures
from ropestudy.report.figures_dose import dose_figures
from ropestudy.report.figures_paper import paper_figures
from ropestudy.report.figures_sites import sites_figures
from ropestudy.report.findings import CASE_HEADS, case_rows, findings
from ropestudy.report.select import number
from ropestudy.schema import Results

SIGNS = {"holds": "✓", "does not hold": "✗", "not settled": "?", "depends": "~", "not measured": "–"}
SHARES = (
    "Shares: the rows of attention sum to one, so what one column loses others gain, and a column's part of the "
    "unweighted difference cannot exceed a half. n of eq. 5 divides a column by the queries that see it, so the last "
    "columns weigh most in D."
)
READ = (
    "D is the paper's eq. 5 and grows with the sequence, the layers and the heads. Where nothing else is said, a "
    "number is the probability that moves per query: the sum of |difference of attention| of a row, from 0 (nothing) "
    "to 2 (everything), in the mean over queries, layers and heads. Local: both runs are given the same input at "
    "every layer. Propagated: each run is a forward pass of its own."
)


def figures_of(results: Results) -> list[Figure]:
    """Return every figure that the study has records for, in the order of the page."""
    return [*dose_figures(results), *paper_figures(results), *sites_figures(results), *context_figures(results)]


def render(results: Results) -> str:
    """Return the page, as HTML text to be written in UTF-8.

    Everything in the results is taken for text, never for markup.
    """
    figures, paper = figures_of(results), paper_claims(results)
    return render_page(
        "ropestudy.report",
        "page.html.j2",
        title=results.title,
        created=results.created,
        command=results.command,
        facts=_facts(results),
        versions=results.environment.versions,
        lede=_lede(results, paper),
        findings=findings(results),
        found=Table("findings", "What was found, case by case", CASE_HEADS, case_rows(results)),
        actions=_actions(results),
        read=READ,
        shares=SHARES,
        signs=SIGNS,
        paper=paper,
        own=[*cause_claims(results), *context_claims(results)],
        figures=figures,
        shown={figure.name for figure in figures},
        svg=svg,
        cases=cases_of,
        number=number,
        sortable=_sortable,
    )


def _actions(results: Results) -> Table | None:
    heads, rows = actions(results)
    plain = [[cell.replace("**", "") for cell in row] for row in rows]
    return (
        Table("actions", "From setup to action: what a change leaves of the KL from float64", heads, plain)
        if rows
        else None
    )


def cases_of(claim: Claim) -> Table:
    """Return every case of a claim, a row each: its factors, its number and its answer."""
    factors = list(dict.fromkeys(factor for case in claim.cases for factor in case.where))
    said = {True: "yes", False: "no", None: "not settled"}
    rows = [
        [
            *(case.where.get(factor, "") for factor in factors),
            *(case.effect.value, case.effect.low, case.effect.high),
            said[case.yes],
        ]
        for case in claim.cases
    ]
    title = f"All {count(len(rows), 'case')}" if len(rows) > 1 else "The case"
    return Table(claim.key, title, (*factors, claim.number_is, "from", "to", "criterion met"), rows)


def _lede(results: Results, paper: Sequence[Claim]) -> str:
    tally = {name: sum(claim.verdict == name for claim in paper) for name in SIGNS}
    parts = [
        f"{tally['holds']} {'holds' if tally['holds'] == 1 else 'hold'}",
        f"{tally['does not hold']} {'does' if tally['does not hold'] == 1 else 'do'} not",
        f"{tally['not settled']} {'is' if tally['not settled'] == 1 else 'are'} not settled",
        f"{tally['depends']} depend{'s' if tally['depends'] == 1 else ''}",
    ]
    parts += [f"{tally['not measured']} not measured in this configuration"] if tally["not measured"] else []
    return (
        f"Of the paper's {count(len(paper), 'claim')}, tried on {results.model.source}: {', '.join(parts)}. "
        "Each verdict follows from the numbers by the criterion beside it, with an interval over the texts."
    )


def _sortable(value: float) -> str:
    """Return a number with its digits, as JavaScript reads it."""
    return f"{value:.9g}".replace("inf", "Infinity")


def _facts(results: Results) -> dict[str, str]:
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
    return {
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
