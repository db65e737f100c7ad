"""docs/precision.md: what a study found, for someone who decides, put between two marks of the document; and every
table, in docs/precision-numbers.md beside it.

python -m ropestudy.report runs/study --document docs/precision.md
"""

from collections.abc import Sequence
from pathlib import Path

from anchorline.files import replace_file
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page import count
from ropestudy.report.answers import BETTER, WORSE, brief_actions, in_short, own_loss
from ropestudy.report.claims import Claim
from ropestudy.report.claims_cause import cause_claims
from ropestudy.report.claims_context import context_claims
from ropestudy.report.claims_paper import paper_claims
from ropestudy.report.docs_tables import actions_table, table, tables
from ropestudy.report.figure import Figure, write_png
from ropestudy.report.findings import findings
from ropestudy.report.html import figures_of
from ropestudy.report.select import between
from ropestudy.schema import Results

BEGIN = "<!-- Numbers: made by `python -m ropestudy.report FOLDER --document FILE`; edit the study, not this. -->"
END = "<!-- End of the numbers. -->"
COMMANDS_BEGIN = "<!-- Commands: made like the numbers. -->"
COMMANDS_END = "<!-- End of the commands. -->"
_NUMBERS, _COMMANDS = MarkedPlace(BEGIN, END), MarkedPlace(COMMANDS_BEGIN, COMMANDS_END)
FIGURES = ("dose", "shift", "samples", "tokens", "length")  # shown in the document


def tables_file(document: Path) -> Path:
    """Return where every table goes: `precision-numbers.md` beside `precision.md`."""
    return document.with_name(f"{document.stem}-numbers{document.suffix}")


def refresh(results: Results, document: Path, second: Results | None = None) -> None:
    """Replace what stands between the two pairs of marks of the document, its figures in `figures/` beside it, and the
    whole file of its tables.

    second: of another model, whose answers and tables follow.

    Raises UserError, one line, if the document is not there or has not all marks.
    """
    text = read_marked(document, [_NUMBERS, _COMMANDS])
    drawn = [figure for figure in figures_of(results) if figure.name in FIGURES]
    folder = document.parent / "figures"
    if drawn:
        folder.mkdir(exist_ok=True)
    for figure in drawn:
        write_png(figure, folder / f"precision-{figure.name}.png")
    numbers_file = tables_file(document)
    replace_file(numbers_file, every_number(results, document.name, second).encode())
    text = _NUMBERS.put(text, numbers(results, drawn, second, numbers_file.name))
    replace_file(document, _COMMANDS.put(text, _commands(results, second)).encode())


def _commands(results: Results, second: Results | None) -> str:
    """Every command of both studies, as a block."""
    said = [one for study in (results, second) if study for one in study.command.split("\n")]
    return "".join(f"    {one}\n" for one in said)


def numbers(
    results: Results, drawn: Sequence[Figure] = (), second: Results | None = None, tables_in: str = "numbers.md"
) -> str:
    """Return what to do, what was found, what a second model says of both, and every claim's verdict.

    tables_in: the file that holds every table, as a link leads there.
    """
    own, others = _claims(results), _claims(second) if second else {}
    parts = [
        f"{_where(results)} Every table stands in [{tables_in}]({tables_in}).",
        "## What to do",
        in_short(results),
        ACTIONS_SAY,
        actions_table("From setup to action", *brief_actions(results)),
        "## What was found",
        _found(results),
        *_shown(drawn, "dose"),
    ]
    if second is not None:
        parts += [
            f"## A second model: {second.title}",
            _where(second),
            actions_table("From setup to action, of the second model", *brief_actions(second)),
            _found(second),
        ]
    parts += ["## The paper's claims", CLAIMS_SAY + (f" {SECOND_SAYS}" if second else "")]
    parts += [part for title in own for part in _judged(title, own[title], others.get(title))]
    parts += _shown(drawn, "shift", "samples", "tokens", "length")
    return "\n\n".join(filter(None, parts)) + "\n"


def every_number(results: Results, document: str, second: Results | None = None) -> str:
    """Return the text of the file of tables: of a study, and of that of a second model.

    document: the file that says what they mean, as a link leads there.
    """
    parts = [
        "# Every number of the study of precision",
        f"What they mean, and how they were measured, is said in [{document}]({document}); this file is made with it, "
        "whole, by the same command.",
    ]
    asked = [
        (claim.says, claim.criterion, claim.source, claim.note) for each in _claims(results).values() for claim in each
    ]
    parts += [table("How each claim is judged", ("claim", "it holds where", "who says it", "note"), asked)]
    for study in filter(None, (results, second)):
        parts += [f"## {study.title}", _where(study), *tables(study)]
    if second is not None:
        parts += ["## The claims, of the second model"]
        parts += [part for title, claims in _claims(second).items() for part in _judged(title, claims)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _claims(results: Results) -> dict[str, list[Claim]]:
    """Those of the paper, and those beyond it, by the heading they stand under."""
    return {
        "Claim by claim": list(paper_claims(results)),
        "Beyond them": [*cause_claims(results), *context_claims(results)],
    }


ACTIONS_SAY = (
    "A cell says what an action leaves of the outputs' distance from float64 (KL: 1 all of it, 0.5 half) and what it "
    "adds to the loss (nats a token; below 0 is better), each with its interval. "
    f"**do**: the interval of the KL lies below {BETTER}; **do not**: above {WORSE}; **no matter**: between them; *may "
    "help*, *may harm*: it reaches over one of them; *not settled*: over both. A word is bold where it holds with all "
    "intervals of the table at once (Bonferroni), plain where it holds by itself. A row of N positions has two ends: "
    "*near*, its last tokens, with keys among themselves; *far*, a query at its end and keys at its beginning, with "
    "nothing between them: there float64's own loss, in the first line, says how little of a model is left to spoil. "
    "An action must be right at both."
)
CLAIMS_SAY = (
    "A verdict counts bf16 forward passes of the pretrained model away from position 0 where there are any; other "
    "cases are in brackets. Where there are none, *at position 0* stands behind the number. It is *not settled* where "
    "an interval spans the margin, which the tables' file names. What is judged is rounding; what training makes of a "
    "mask is not."
)
SECOND_SAYS = "*Second model* is its verdict on the same claim, by its own cases."


def _shown(drawn: Sequence[Figure], *names: str) -> list[str]:
    """Each figure and its caption."""
    found = {figure.name: figure for figure in drawn}
    return [
        f"![{found[name].title}](figures/precision-{name}.png)\n\n*{found[name].caption}*"
        for name in names
        if name in found
    ]


def _judged(title: str, claims: Sequence[Claim], others: Sequence[Claim] | None = None) -> list[str]:
    """The claims that were measured, beside what a second model says of them, and the others by name."""
    left = [claim.says for claim in claims if not claim.cases]
    named = f"Not measured here: {'; '.join(left)}." if left else ""
    beside = {claim.key: claim.verdict for claim in others or []}
    rows = [
        [claim.says, _verdict(claim), claim.numbers, *([beside[claim.key]] if others else [])]
        for claim in claims
        if claim.cases
    ]
    words = "\n".join(
        f"*{claim.says}:* {claim.note}." for claim in claims if claim.cases and claim.names and claim.note
    )
    return [table(title, ("claim", "verdict", "number", *(["second model"] if others else [])), rows), words, named]


def _verdict(claim: Claim) -> str:
    verdict = claim.verdict + (f" on {claim.depends}" if claim.depends else "")
    verdict += f" ({claim.tally})" if claim.tally and not claim.depends else ""
    return verdict + (f" (over all cases, by {claim.exceptions})" if claim.exceptions else "")


def _found(results: Results) -> str:
    return "\n".join(f"{place}. **{one.head}** {one.says}" for place, one in enumerate(findings(results), start=1))


def _where(results: Results) -> str:
    environment = results.environment
    commit = (environment.git_commit or "no commit")[:12] + (" with changes" if environment.git_dirty else "")
    seen = [f"{tokens:,}" for tokens in sorted({r.tokens for r in results.records})]
    sequences = between(sorted({float(r.sequences) for r in results.records})) if results.records else "0"
    left = [f"{name} {ready} of {whole}" for name, (ready, whole) in results.cells.items() if ready < whole]
    unfinished = f" Not finished, and not shown: {', '.join(left)} cells." if left else ""
    return (
        f"Put together on {results.created[:10]} ({results.title}): {results.model.source}, "
        f"{count(results.model.parameters, 'parameter')} rounded to {results.model.weights}; text "
        f"{results.text.source}; {sequences} sequences of {', '.join(seen)} tokens; {environment.hardware}, "
        f"JAX on {environment.device.partition(':')[0]}, computing {results.seconds:,.0f} s, at commit {commit}."
        f"{own_loss(results)}{unfinished}"
    )
