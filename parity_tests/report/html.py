"""`report.html`: one self-contained page, the verdict first.

Everything a reader needs is in the HTML; the page's script only sorts, copies and shows what a cell's title says. Nothing is
loaded from anywhere, and the page's own policy forbids it.

Cells and rows are left unclosed, as HTML allows: a run has tens of thousands of measures.
"""

import base64
import hashlib
import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import get_args

from parity_tests.report.diff import verdict
from parity_tests.report.plot import plot, where_over
from parity_tests.report.schema import Case, Environment, Group, Measure, Report

# Worst first, as the page lists cases; with the sign that says the same without colour.
SIGNS = {"broken": "✗", "not judged": "!", "passed": "✓", "skipped": "–"}
STAGES: dict[Group, str] = {
    "forward": "Forward pass",
    "loss": "Loss",
    "gradients": "Gradients",
    "step": "One AdamW step",
    "trajectory": "Loss, step by step",
}
assert tuple(STAGES) == get_args(Group)

# Error over allowance, up to and including: the classes p0.. keep the rule, b0.. break it.
KEPT = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
BROKEN = (2.0, 10.0, 100.0, math.inf)

NAMED = 5  # divergences told at the top; the rest stand at their cases
PLOTTED = 4  # profiles of a case
LONG = 10  # letters of a line in a heading before it is broken at an underscore

Numbered = tuple[int, Case]  # its number in report.json, from 1


def render(report: Report) -> str:
    """The page, as HTML text to be written in UTF-8. Everything in the report is taken for text, never for markup."""
    style, script = (
        files("parity_tests.report").joinpath(f"page.{kind}").read_text("utf-8").strip() for kind in ("css", "js")
    )
    rank = {name: number for number, name in enumerate(SIGNS)}
    cases = sorted(enumerate(report.cases, start=1), key=lambda item: rank[verdict(item[1])])
    headline, sentence = _headline(report)
    body = "\n".join(
        [
            _header(report, headline, sentence, cases),
            "<main>",
            *([_overview(cases), *map(_case, cases)] if cases else []),
            "</main>",
            _environment(report),
        ]
    )
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{headline}: {_text(report.title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


# -- the verdict -------------------------------------------------------------------------------------------------------------


def _headline(report: Report) -> tuple[str, str]:
    """A word, and a sentence."""
    counts = Counter(map(verdict, report.cases))
    run = len(report.cases) - counts["skipped"]
    skipped = f" {_count(counts['skipped'], 'case')} could not run on this machine." if counts["skipped"] else ""
    if not run:
        return "Not judged", skipped.strip() or "The report holds no case."
    if report.passed:
        arrays = sum(len(case.measures) for case in report.cases)
        return "The same", f"{_count(arrays, 'array')} of {_count(run, 'case')} keep within their allowance.{skipped}"
    broken, unjudged = counts["broken"], counts["not judged"]
    parts = [f"{broken} {'breaks' if broken == 1 else 'break'} the rule"] if broken else []
    parts += [f"{unjudged} could not be judged"] if unjudged else []
    return "Different", f"Of {_count(run, 'case')}, {' and '.join(parts)}.{skipped}"


def _header(report: Report, headline: str, sentence: str, cases: Sequence[Numbered]) -> str:
    mood = "good" if report.passed else "bad"
    return (
        f'<header>\n<p class="kicker">{_text(report.title)} <time>{_text(_date(report.created))}</time></p>\n'
        f'<h1 class="{mood}">{headline}</h1>\n<p class="lede">{sentence}</p>\n{_news(cases)}</header>'
    )


def _news(cases: Sequence[Numbered]) -> str:
    """What failed, in words; or what came closest to it."""
    failed = [item for item in cases if not item[1].passed and item[1].skipped is None]
    if failed:
        items = [f"<li><p>{_text(_words(item[1]))}</p> {_link(item)}" for item in failed[:NAMED]]
        more = f"<p>{_count(len(failed) - NAMED, 'more case')} below.</p>\n" if len(failed) > NAMED else ""
        return "<h2>What differs first</h2>\n<ul class=news>\n" + "\n".join(items) + f"\n</ul>\n{more}"
    worst = max(
        ((m, item) for item in cases for m in item[1].measures), key=lambda pair: _badness(pair[0]), default=None
    )
    if worst is None:
        return ""
    measure, item = worst
    return (
        f"<p>The closest to its allowance is <code>{_text(measure.name)}</code>: error over allowance "
        f"{_ratio(measure)}, in {_link(item)}.</p>\n"
    )


def _words(case: Case) -> str:
    """Why a case does not pass."""
    first = case.first_divergence
    return case.problem or case.skipped or (first.words if first else "")


def _link(item: Numbered) -> str:
    number, case = item
    return f'<a href="#case-{number}">{_breakable(case.id)}</a>'


# -- all cases ---------------------------------------------------------------------------------------------------------------


def _overview(cases: Sequence[Numbered]) -> str:
    present = {measure.group for _, case in cases for measure in case.measures}
    stages: list[Group] = [stage for stage in STAGES if stage in present]
    mixed = len({item[1].passed for item in cases}) == 2
    only = '<label class="only"><input type="checkbox" id="only-broken"> only broken</label>\n' if mixed else ""
    heads = "".join(f'<th scope="col" class="n">{stage}' for stage in stages)
    rows = "\n".join(_overview_row(item, stages) for item in cases)
    return (
        f"<section>\n<h2>Cases</h2>\n{_legend()}\n{only}"
        + _scroll(
            "Cases",
            '<table class="list sorts"><caption>The worst of each stage</caption>\n'
            f'<thead><tr><th scope="col">case<th scope="col">verdict{heads}'
            f'<th scope="col" class="n">seconds</thead>\n<tbody>\n{rows}\n</tbody></table>',
        )
        + "\n</section>"
    )


def _overview_row(item: Numbered, stages: Sequence[Group]) -> str:
    case = item[1]
    worst = [_worst(measure for measure in case.measures if measure.group == stage) for stage in stages]
    cells = "".join(_cell(measure, named=True) for measure in worst)
    return (
        f'<tr{_mark(case)}><th scope="row">{_link(item)}<td class="verdict">{_verdict(case)}{cells}'
        f"<td class=n>{case.seconds:.1f}"
    )


def _legend() -> str:
    """The scale of every heat map on the page, with the border of the rule."""
    bounds = ["0", *(f"≤ {_bound(bound)}" for bound in KEPT[1:]), *(f"≤ {_bound(b)}" for b in BROKEN[:-1])]
    bounds += [f"&gt; {_bound(BROKEN[-2])}"]
    classes = [f"p{i}" for i in range(len(KEPT))] + [f"b{i}" for i in range(len(BROKEN))]
    cells = "".join(f'<td class="{name}">{bound}' for name, bound in zip(classes, bounds, strict=True))
    return (
        "<p>Every number is error over allowance. The error is that against the oracle in float64, the root mean square "
        "over the array. The allowance is twice what the oracle itself errs when it rounds as the candidate does, plus one "
        'rounding of the truth.</p>\n<table class="legend"><caption>Error over allowance</caption>\n<thead>'
        f'<tr><th scope="colgroup" colspan={len(KEPT)}>keeps the rule, up to 1'
        f'<th scope="colgroup" colspan={len(BROKEN)}>breaks it</thead>\n<tbody><tr>{cells}</tbody></table>'
    )


def _bound(bound: float) -> str:
    return f"1/{round(1 / bound)}" if bound < 1 else f"{bound:g}"


# -- one case ----------------------------------------------------------------------------------------------------------------


def _case(item: Numbered) -> str:
    number, case = item
    failed = not case.passed and case.skipped is None
    worst = _worst(case.measures)
    seen = f" <small>worst {_ratio(worst)}</small>" if worst else ""
    first = case.first_divergence
    told = list(dict.fromkeys(filter(None, (case.problem, case.skipped, first and first.words))))
    facts = {
        "model": case.model,
        "variant": case.variant,
        "RoPE": case.rope,
        "engine": case.engine,
        "dtype": case.dtype,
        "oracle rounds as": case.preset,
        "tokens a row": f"{case.tokens:,}",
        "position offset": f"{case.position_offset:,}",
        "seed": str(case.seed),
        "seconds": f"{case.seconds:.1f}",
    }
    parts = [
        *(f'<p class="told">{_text(words)}</p>' for words in told),
        _facts(facts),
        _command(case.command),
        *(_stage(stage, [m for m in case.measures if m.group == stage]) for stage in STAGES),
        _plots(case),
        _measures(case),
    ]
    return (
        f'<details class="case{" x" if failed else ""}" id="case-{number}"{" open" if failed else ""}>\n'
        f'<summary><h3><span class="verdict">{_verdict(case)}</span> {_breakable(case.id)}</h3>{seen}</summary>\n'
        + "\n".join(filter(None, parts))
        + "\n</details>"
    )


def _stage(stage: Group, measures: Sequence[Measure]) -> str:
    """The layers as a map, and beside it what stands outside the layers as one row."""
    if not measures:
        return ""
    layers = [measure for measure in measures if measure.layer is not None]
    outside = [measure for measure in measures if measure.layer is None]
    beside = "Steps" if stage == "trajectory" else "Outside the layers"
    maps = _heat(stage, "Layer by layer", layers) + _heat(stage, beside, outside)
    return f'<h4>{STAGES[stage]}</h4>\n<div class="stage">\n{maps}</div>'


def _heat(stage: Group, caption: str, measures: Sequence[Measure]) -> str:
    """Error over allowance: a row a layer, a column a tap, both in the order of the forward pass."""
    if not measures:
        return ""
    taps = list(dict.fromkeys(measure.tap for measure in measures))
    rows: dict[int | None, dict[str, Measure]] = {}
    for measure in measures:
        rows.setdefault(measure.layer, {})[measure.tap] = measure
    corner = "" if None in rows else '<th scope="col">layer'
    heads = "".join(f'<th scope="col">{_heading(tap, stage)}' for tap in taps)
    lines = "\n".join(
        ("<tr>" if layer is None else f'<tr><th scope="row">{layer}') + "".join(_cell(row.get(tap)) for tap in taps)
        for layer, row in sorted(rows.items(), key=lambda pair: pair[0] or 0)
    )
    return _scroll(
        f"{STAGES[stage]}: {caption.lower()}",
        f'<table class="heat"><caption>{caption}</caption>\n<thead><tr>{corner}{heads}</thead>\n'
        f"<tbody>\n{lines}\n</tbody></table>\n",
    )


def _heading(tap: str, group: Group) -> str:
    """A tap's name, in short lines."""
    if group == "trajectory" and tap.isdecimal():
        return str(int(tap) + 1)  # people count steps from 1
    pieces = re.findall(r"[^.+]*\.|\+?[^.+]+|\+", re.sub(r"\.weight(?=$|\+)", "", tap))
    lines = [re.findall(r"[^_]*_|[^_]+", piece) if len(piece) > LONG else [piece] for piece in pieces]
    return "<br>".join(_text(line) for piece in lines for line in piece)


def _cell(measure: Measure | None, named: bool = False) -> str:
    if measure is None:
        return "<td>"
    numbers = f"error {_number(measure.error)}, allowance {_number(measure.allowance)}"
    title = f"{_text(measure.name)}: {numbers}" if named else numbers  # within a map the headings name it
    return f'<td class={_class(measure)} title="{title}">{_ratio(measure)}'


def _plots(case: Case) -> str:
    """Error along the sequence: the first divergence and the worst that broke; of a case that passed, the worst."""
    drawn = [measure for measure in case.measures if measure.profile and measure.profile.starts]
    first = case.first_divergence.name if case.first_divergence else None
    drawn.sort(key=lambda measure: (measure.name == first, _badness(measure)), reverse=True)
    broken = [measure for measure in drawn if not measure.passed]
    figures = [
        f"<figure>{plot(measure.profile, case.tokens)}<figcaption><code>{_breakable(measure.name)}</code> "
        f"{_ratio(measure)} over all, {where_over(measure.profile)}</figcaption></figure>"
        for measure in (broken or drawn[:1])[:PLOTTED]
        if measure.profile
    ]
    return f'<h4>Error along the sequence</h4>\n<div class="plots">\n{"".join(figures)}\n</div>' if figures else ""


def _measures(case: Case) -> str:
    if not case.measures:
        return ""
    broken = sum(not measure.passed for measure in case.measures)
    title = f"All {_count(len(case.measures), 'measure')}" + (f", {broken} broken" if broken else "")
    mixed = 0 < broken < len(case.measures)
    only = '<label class="only"><input type="checkbox"> only broken</label>\n' if mixed else ""
    rows = "\n".join(map(_measure, case.measures))
    return (
        f'<details class="measures"><summary>{title}</summary>\n{only}'
        + _scroll(
            title,
            '<table class="list sorts"><caption>In the order of the computation; root mean squares in the array\'s own '
            'units. Exact arrays count the entries that differ.</caption>\n<thead><tr><th scope="col">measure'
            '<th scope="col" class="n">error<th scope="col" class="n">allowance<th scope="col" class="n">ratio'
            f'<th scope="col">shape<th scope="col">worst at</thead>\n<tbody>\n{rows}\n</tbody></table>',
        )
        + "\n</details>"
    )


def _measure(measure: Measure) -> str:
    return (
        f"<tr{'' if measure.passed else ' class=x'}><td>{_text(measure.name)}<td>{_number(measure.error)}"
        f"<td>{_number(measure.allowance)}<td class={_class(measure)}>{_ratio(measure)}"
        f"<td>{'×'.join(map(str, measure.shape))}<td>{', '.join(map(str, measure.worst))}"
    )


# -- where and how -----------------------------------------------------------------------------------------------------------


def _environment(report: Report) -> str:
    environment = report.environment
    seeds = sorted({case.seed for case in report.cases})
    facts = {
        "commit": _commit(environment),
        "hardware": environment.hardware,
        "threads": str(environment.threads),
        "seeds": ", ".join(map(str, seeds)) or "none",
        "created": report.created,
        "took": f"{report.seconds:.1f} s",
        "schema version": str(report.schema_version),
    }
    return (
        f"<footer>\n<h2>Where and how</h2>\n{_command(report.command)}\n{_facts(facts)}\n"
        f"<h3>Versions</h3>\n{_facts(environment.versions)}\n</footer>"
    )


def _commit(environment: Environment) -> str:
    if environment.git_commit is None:
        return "not in a git repository"
    return environment.git_commit + (", with changes that are not committed" if environment.git_dirty else "")


# -- small pieces ------------------------------------------------------------------------------------------------------------


def _text(value: str) -> str:
    """Text for an element or a quoted attribute; what HTML cannot hold becomes a replacement character."""
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", value))


def _breakable(name: str) -> str:
    """A long name that may go on in the next line after its separators."""
    return "<wbr>".join(map(_text, re.findall(r"[^-._+]*[-._+]+|[^-._+]+", name)))


def _facts(facts: dict[str, str]) -> str:
    items = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _command(command: str) -> str:
    return f'<div class="command"><code>{_text(command)}</code></div>'


def _scroll(name: str, table: str) -> str:
    """Wide tables scroll by themselves; a keyboard reaches them."""
    return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">{table}</div>'


def _date(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%d %B %Y, %H:%M} UTC"
    except ValueError:
        return created


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _verdict(case: Case) -> str:
    name = verdict(case)
    return f'<span class="{name.replace(" ", "-")}">{SIGNS[name]} {name}</span>'


def _mark(case: Case) -> str:
    return "" if case.passed or case.skipped is not None else ' class="x"'


def _badness(measure: Measure) -> tuple[bool, float]:
    """Sorts measures: broken above kept, then by ratio, what is not a number above all."""
    return not measure.passed, math.inf if math.isnan(measure.ratio) else measure.ratio


def _worst(measures: Iterable[Measure]) -> Measure | None:
    return max(measures, key=_badness, default=None)


def _class(measure: Measure) -> str:
    """Its place on the scale. The verdict is the measure's own: a ratio of 0 breaks the rule where the allowance is infinite."""
    if measure.passed:
        return f"p{next(i for i, bound in enumerate(KEPT) if measure.ratio <= bound)}"
    return f"b{next((i for i, bound in enumerate(BROKEN) if 1 < measure.ratio <= bound), len(BROKEN) - 1)}"


def _ratio(measure: Measure) -> str:
    """Error over allowance in a few letters, rounded away from 1 so that what is broken never reads as 1.00."""
    ratio = measure.ratio
    if math.isnan(ratio) or not (measure.passed or ratio > 1):
        return "NaN"  # no number, or no finite allowance to compare with
    if ratio == 0 or math.isinf(ratio):
        return _number(ratio)
    if ratio < 10:
        return f"{(math.floor if measure.passed else math.ceil)(ratio * 100) / 100:.2f}"
    return f"{ratio:.0f}" if ratio < 9999.5 else _number(ratio)


def _number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "NaN" if math.isnan(value) else "∞"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
