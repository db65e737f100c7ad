"""What was found, in words, as a table and as an exception."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from anchorline.page import count
from anchorline.tolerance import judge
from jaxref.mask import ANCHOR, PADDING
from parity_tests.checking.adapter import Adapter
from parity_tests.checking.cases import judged_as, oracle
from parity_tests.checking.judging import ARRAYS, CaseResult, place
from parity_tests.oracle import preset_name

if TYPE_CHECKING:
    from rich.table import Table


class NotTheSame(AssertionError):  # noqa: N818, a verdict
    """A function that does not compute attention under the mask rule; the message says how."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one function.

    verdict: `same`; `different`: an array breaks the rule, or it raises, returns no attention, leaks; `not judged`:
    nothing ran.
    hint: what it looks like, in words, where something is known.
    """

    name: str
    adapter: Adapter
    cases: tuple[CaseResult, ...]
    hint: str | None = field(default=None)

    @property
    def verdict(self) -> Literal["same", "different", "not judged"]:
        """The verdict in a word or two."""
        if not self.judged:
            return "not judged"
        return "same" if all(result.passed for result in self.judged) else "different"

    @property
    def passed(self) -> bool:
        """Whether some case was run and all that were run passed."""
        return self.verdict == "same"

    @property
    def judged(self) -> tuple[CaseResult, ...]:
        """The cases that were run."""
        return tuple(result for result in self.cases if result.not_run is None)

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """The cases that were run and did not pass."""
        return tuple(result for result in self.judged if not result.passed)

    def raise_if_different(self) -> None:
        """Raise NotTheSame, an AssertionError, with `explain()`, unless it passed."""
        if not self.passed:
            raise NotTheSame(self.explain())

    def explain(self) -> str:
        """The verdict in words: what breaks, by how much, where, what it looks like, and what was not run."""
        lines = [self._headline()]
        if self.failed:
            lines.append(_worst_in_words(self.failed, self.adapter.like or "flash"))
        if self.hint:
            lines.append(f"It looks like this: {self.hint}.")
        lines += [f"Note: {remark}." for remark in dict.fromkeys(r for c in self.judged for r in c.remarks)]
        lines += _not_run_in_words(self.cases)
        return "\n".join(lines)

    def _headline(self) -> str:
        layouts = len({result.case.layout.name for result in self.judged})
        if self.verdict == "not judged":
            return f"NOT JUDGED: {self.name}: no case is left to run"
        if self.verdict == "different":
            return f"DIFFERENT: {self.name}: {len(self.failed)} of {count(len(self.judged), 'case')} failed"
        ratio, array, case = max((v.ratio, n, r.case.id) for r in self.judged for n, v in r.verdicts.items())
        arrays = ", ".join(name for name in ARRAYS if any(name in r.verdicts for r in self.judged))
        isolation = (
            "what is invisible has exactly no effect"
            if all(result.isolated for result in self.judged)
            else "isolation is NOT proved everywhere"
        )
        return (
            f"SAME: {self.name}: {count(len(self.judged), 'case')} on {count(layouts, 'layout')}; "
            f"{arrays} within their allowance, at worst {ratio:.2f} of it ({array} in {case}); {isolation}"
        )

    def table(self) -> "Table":
        """A rich table: for each layout and dtype the worst error over allowance of each array, over all heads."""
        from rich.table import Table

        table = Table("layout", "dtype", *ARRAYS, "isolated", "", title="error / allowance (up to 1 passes)")
        for key in dict.fromkeys((r.case.layout.name, r.case.dtype) for r in self.cases):
            results = [r for r in self.cases if (r.case.layout.name, r.case.dtype) == key]
            table.add_row(*key, *(_cell(results, name) for name in ARRAYS), _isolation(results), _remark(results))
        return table


def _cell(results: list[CaseResult], name: str) -> str:
    ratios = [r.verdicts[name].ratio for r in results if name in r.verdicts]
    if not ratios:
        return "-"
    return f"{max(ratios):.2f}" if max(ratios) <= 1 else f"[bold red]{max(ratios):.3g}[/]"


def _isolation(results: list[CaseResult]) -> str:
    found = {r.isolated for r in results}
    return "[bold red]no[/]" if False in found else "exactly" if found - {None} else "-"


def _remark(results: list[CaseResult]) -> str:
    from rich.markup import escape

    problem = next((r.problem for r in results if r.problem), None)
    if problem:
        return f"[red]{escape(problem)}[/]"
    not_run = [r.not_run for r in results if r.not_run]
    heads = "" if len(not_run) == len(results) else f"{len(not_run)} of {len(results)} heads "
    return f"{heads}not run: {not_run[0]}" if not_run else ""


def _not_run_in_words(cases: tuple[CaseResult, ...]) -> list[str]:
    lines = []
    for reason in dict.fromkeys(r.not_run for r in cases if r.not_run):
        names = [r.case.layout.name for r in cases if r.not_run == reason]
        lines.append(f"Not run ({reason}): {count(len(names), 'case')}: {', '.join(dict.fromkeys(names))}.")
    return lines


def _worst_in_words(failed: tuple[CaseResult, ...], like: str) -> str:
    """The first problem if it broke down everywhere it failed; else the first case whose numbers are wrong."""
    numbers = [r for r in failed if r.broken]
    if not numbers:
        return f"First, {failed[0].case.id}: {failed[0].problem}."
    first = numbers[0]
    name = first.broken[0]
    others = ", ".join(f"{n} {first.verdicts[n].ratio:.3g}" for n in first.broken[1:])
    text = f"First, {first.case.id}: {name} errs {first.verdicts[name].ratio:.3g} times its allowance, "
    text += _where(first, name, like) + (f" (also {others})" if others else "") + "."
    problems = [r for r in failed if r.problem]
    if problems:
        text += f"\nAlso, {problems[0].case.id}: {problems[0].problem}."
    return text


def _where(result: CaseResult, name: str, like: str) -> str:
    """The worst element, and which documents alone are wrong where that is not all of them."""
    case, verdict = result.case, result.verdicts[name]
    if verdict.whole <= 1 and verdict.part:
        return f"in {verdict.part.name} (the array as a whole is within its own)"
    worst = verdict.worst
    row, token, head = (worst[0], worst[2], worst[1]) if name == "lse" else worst[:3]
    text = f"most at {place(case, row, token)}, head {head}"
    if name == "lse":
        return text
    wrong, right = _documents_by_verdict(result, name, like)
    return f"{text}; wrong in {', '.join(wrong)} only" if wrong and right else text


def _documents_by_verdict(result: CaseResult, name: str, like: str) -> tuple[list[str], list[str]]:
    """The rule, document by document."""
    case = result.case
    truth, reference = oracle(case, "exact")[name], oracle(case, preset_name(like, case.dtype))[name]
    wrong, right = [], []
    for document in np.unique(case.document_ids_BT):
        chosen = case.document_ids_BT == document
        words = {PADDING: "padding", ANCHOR: "the anchor"}.get(int(document), f"document {document}")
        mine, true, rounded = (x[chosen] for x in (result.arrays[name], truth, reference))
        passed = judge(mine, true, rounded, judged_as(name, like, case.dtype)).passed
        (right if passed else wrong).append(words)
    return wrong, right
