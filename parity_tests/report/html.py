"""`report.html`: one self-contained page, the verdict first.

What stands where is `page.html.j2`; here is what it says: verdicts in words, heat maps, and the few letters of a
number. Its cells and rows are left unclosed, as HTML allows: a run has tens of thousands of measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anchorline.page import render as render_page
from parity_tests.report.names import bare
from parity_tests.report.plot import plot, plot_layers, where_over
from parity_tests.report.schema import CaseReport, Group, Measure, Report
from parity_tests.report.verdict import in_words

# Worst first, as the page lists cases; with the sign that says the same without colour.
SIGNS = {"broken": "✗", "not judged": "!", "passed": "✓", "skipped": "–"}
STAGES: dict[Group, str] = {
    "forward": "Forward pass",
    "loss": "Loss",
    "gradients": "Gradients",
    "step": "One AdamW step",
    "trajectory": "Loss, step by step",
    "run": "A whole run",
}


# Error over allowance, up to and including: the classes p0.. keep the rule, b0.. break it.
KEPT = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
BROKEN = (2.0, 10.0, 100.0, math.inf)

PLOTTED = 4  # profiles of a case
# Of a heat map: error over allowance, a row a layer (or one, of None), a column a tap.
Rows = list[tuple[int | None, list[Measure | None]]]


def render(report: Report, kind: str = "reference") -> str:
    """The page, as HTML text to be written in UTF-8. Everything in the report is taken for text, never for markup.

    kind: what is allowed (`in_words`).
    """
    order = list(SIGNS)
    entries = [ListedCase(number, case) for number, case in enumerate(report.cases, start=1)]
    entries.sort(key=lambda entry: order.index(entry.case.verdict))
    word, _, sentence = in_words(report, kind).partition(": ")
    present = {measure.group for case in report.cases for measure in case.measures}
    environment = report.environment
    changed = ", with changes that are not committed" if environment.git_dirty else ""
    return render_page(
        "parity_tests.report",
        "page.html.j2",
        title=report.title,
        created=report.created,
        command=report.command,
        facts={
            "commit": "not in a git repository" if environment.git_commit is None else environment.git_commit + changed,
            "hardware": environment.hardware,
            "threads": str(environment.threads),
            "created": report.created,
            "took": f"{report.seconds:.1f} s",
            "schema version": str(report.schema_version),
        },
        versions=environment.versions,
        headline=word,
        sentence=sentence,
        passed=report.passed,
        kind=kind,
        entries=entries,
        failed=[entry for entry in entries if entry.case.failed],
        stages={stage: name for stage, name in STAGES.items() if stage in present},
        scale=_scale(),
        signs=SIGNS,
        place=(lambda m: "p0" if m.passed else "p4") if kind == "difference" else place,
        ratio=(lambda m: number(m.error)) if kind == "difference" else ratio,
        number=number,
        bare=bare,
    )


# -- what the page shows of a measure and of a case --------------------------------------------------------------------


@dataclass(frozen=True)
class ListedCase:
    """One case, as the page lists it. number: its place in report.json, from 1."""

    number: int
    case: CaseReport

    def worst(self, stage: Group | None = None) -> Measure | None:
        """The worst measure of a stage, or of all."""
        return max((m for m in self.case.measures if stage in (None, m.group)), key=_badness, default=None)

    def heats(self) -> dict[str, list[tuple[str, list[str], Rows]]]:
        """The heat maps of each stage, of the layers and of what is outside of them: caption, columns and rows."""
        made: dict[str, list[tuple[str, list[str], Rows]]] = {}
        for stage, name in STAGES.items():
            own = [measure for measure in self.case.measures if measure.group == stage]
            outside = "Steps" if stage == "trajectory" else "Outside the layers"
            for caption, in_layers in (("Layer by layer", True), (outside, False)):
                if measures := [measure for measure in own if (measure.layer is not None) == in_layers]:
                    made.setdefault(name, []).append((caption, *_heat(measures)))
        return made

    def plots(self) -> list[tuple[Measure, str, str]]:
        """Error along the sequence, as an image and in words.

        Shown are the first divergence and the worst that broke; of a case that passed, the worst.
        """
        drawn = [measure for measure in self.case.measures if measure.profile and measure.profile.starts[1:]]
        first = self.case.first_divergence.name if self.case.first_divergence else None
        drawn.sort(key=lambda measure: (measure.name == first, _badness(measure)), reverse=True)
        broken = [measure for measure in drawn if not measure.passed]
        shown = (broken or drawn[:1])[:PLOTTED]
        profiles = [(measure, measure.profile) for measure in shown if measure.profile]
        return [(m, plot(profile, self.case.tokens or 0), where_over(profile)) for m, profile in profiles]

    def growth(self) -> list[tuple[str, str]]:
        """The arrays of every layer that broke first, and how each errs from layer to layer, as an image."""
        broken = [m.tap for m in self.case.measures if not m.passed and m.layer is not None and m.group == "forward"]
        taps = list(dict.fromkeys(broken))[:PLOTTED]
        own = [[m for m in self.case.measures if m.tap == tap and m.group == "forward"] for tap in taps]
        drawn = [(tap, [row[0] for _, row in _heat(m)[1] if row[0]]) for tap, m in zip(taps, own, strict=True)]
        return [(tap, plot_layers(layers)) for tap, layers in drawn if len(layers) > 2]


def place(measure: Measure) -> str:
    """Its place on the scale. The measure has the verdict: a ratio of 0 breaks the rule if the allowance is
    infinite."""
    if measure.passed:
        return f"p{next(i for i, bound in enumerate(KEPT) if measure.ratio <= bound)}"
    return f"b{next((i for i, bound in enumerate(BROKEN) if 1 < measure.ratio <= bound), len(BROKEN) - 1)}"


def ratio(measure: Measure) -> str:
    """Error over allowance in a few letters, rounded away from 1 so that what is broken never reads as 1.00."""
    value = measure.ratio
    if math.isnan(value) or not (measure.passed or value > 1):
        return "NaN"  # no number, or no finite allowance to compare with
    if value == 0 or math.isinf(value):
        return number(value)
    if value < 10:
        return f"{(math.floor if measure.passed else math.ceil)(value * 100) / 100:.2f}"
    return f"{value:.0f}" if value < 9999.5 else number(value)


def number(value: float) -> str:
    """Three digits: `1.24e-3`."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "NaN" if math.isnan(value) else "∞"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def _heat(measures: Sequence[Measure]) -> tuple[list[str], Rows]:
    """Columns and rows; of an array's ranks and steps the worst."""
    taps = list(dict.fromkeys(measure.tap for measure in measures))
    rows: dict[int | None, dict[str, Measure]] = {}
    for measure in measures:
        row = rows.setdefault(measure.layer, {})
        row[measure.tap] = max(row.get(measure.tap, measure), measure, key=_badness)
    ordered = sorted(rows.items(), key=lambda pair: pair[0] or 0)
    return taps, [(layer, [row.get(tap) for tap in taps]) for layer, row in ordered]


def _badness(measure: Measure) -> tuple[bool, float]:
    """Sorts measures: broken above kept, then by ratio, what is not a number above all."""
    return not measure.passed, math.inf if math.isnan(measure.ratio) else measure.ratio


def _scale() -> dict[str, dict[str, str]]:
    """The scale of every heat map on the page, on both sides of the border: class and bound."""
    kept = {f"p{i}": f"≤ {_bound(bound)}" if bound else "0" for i, bound in enumerate(KEPT)}
    broken = {f"b{i}": f"≤ {_bound(bound)}" for i, bound in enumerate(BROKEN[:-1])}
    return {"keeps the rule, up to 1": kept, "breaks it": broken | {f"b{len(BROKEN) - 1}": f"> {_bound(BROKEN[-2])}"}}


def _bound(bound: float) -> str:
    return f"1/{round(1 / bound)}" if bound < 1 else f"{bound:g}"
