"""A claim, the comparisons that it rests on, and the verdict that follows from them. No verdict is written by hand.

A claim is tried on every case the study holds: a model under an arithmetic, in a mode, at a shift. A case says yes if
its criterion is met in every sequence, no if in none, and nothing if the sequences disagree.

    holds           every case says yes
    does not hold   every case says no
    depends         neither; `depends` then names the factor whose values tell yes from no, or says how they mix
    not measured    the study holds no case
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from anchorline.page import count
from ropestudy.report.select import between
from ropestudy.schema import Difference, Stat

Verdict = Literal["holds", "does not hold", "depends", "not measured"]


@dataclass(frozen=True)
class Comparison:
    """One comparison. where: each factor's value, in words; number: what `Claim.number_is` says."""

    where: dict[str, str]
    yes: bool | None
    number: float


@dataclass(frozen=True)
class Claim:
    """What is claimed, by whom, how it is judged, and by what."""

    key: str
    says: str
    source: str
    criterion: str
    number_is: str
    figure: str
    cases: Sequence[Comparison] = field(default_factory=tuple)
    note: str = ""
    about_shares: bool = False  # the page adds what a column's share can be

    @property
    def verdict(self) -> Verdict:
        """What the cases say together."""
        if not self.cases:
            return "not measured"
        said = {case.yes for case in self.cases}
        return "holds" if said == {True} else "does not hold" if said == {False} else "depends"

    @property
    def depends(self) -> str:
        """On what, in words; empty unless the verdict is `depends`."""
        return _depends(self.cases) if self.verdict == "depends" else ""

    @property
    def numbers(self) -> str:
        """The numbers of the cases, by what they say."""
        if not self.cases:
            return ""
        parts = []
        for yes, name in ((True, "yes"), (False, "no"), (None, "sequences disagree")):
            own = [case.number for case in self.cases if case.yes is yes]
            if own:
                told = f" where {name}" if yes is None or len({case.yes for case in self.cases}) > 1 else ""
                parts.append(f"{between(own)}{told} ({count(len(own), 'case')})")
        return f"{self.number_is[:1].upper()}{self.number_is[1:]}: {', '.join(parts)}"


def agree(answers: Iterable[bool]) -> bool | None:
    """Return yes if all do, no if none does, None if they disagree."""
    found = set(answers)
    assert found, "a case has at least one sequence"
    return found.pop() if len(found) == 1 else None


def compare_each(a: Stat, b: Stat, test: Callable[[float, float], bool]) -> bool | None:
    """Test two numbers of the same sequences, sequence by sequence."""
    return agree(test(x, y) for x, y in zip(a.values, b.values, strict=True))


def above(a: Stat, bound: float) -> bool | None:
    """Return whether the sequences are above a bound."""
    return agree(value > bound for value in a.values)


def moved(difference: Difference) -> Stat:
    """Return what is judged wherever a claim names no other measure: the probability that moves per query."""
    return difference.row


MOST_NAMED = 6  # values named in a sentence; beyond, the first are named and the rest counted
ANSWERS = {True: "yes for", False: "no for", None: "the sequences disagree for"}


def _depends(cases: Sequence[Comparison]) -> str:
    """Return the one factor that tells yes from no; else the two that do together; else how the best single one mixes
    them.
    """
    factors = _factors(cases)
    if not factors:
        return "the sequence"
    for names in (*((factor,) for factor in factors), *combinations(factors, 2)):
        said: dict[str, set[bool | None]] = {}
        for case in cases:
            said.setdefault(", ".join(filter(None, (case.where.get(name) for name in names))), set()).add(case.yes)
        if all(len(answers) == 1 for answers in said.values()) and (len(names) == 1 or len(said) < len(cases)):
            return (
                f"the {' and the '.join(names)}: {_answers({value: answers.pop() for value, answers in said.items()})}"
            )
    mixed = min(factors, key=lambda factor: _impurity(cases, factor))
    tally = []
    for value in dict.fromkeys(case.where.get(mixed, "") for case in cases):
        own = [case for case in cases if case.where.get(mixed, "") == value]
        tally.append(f"{value} {sum(case.yes is True for case in own)} of {len(own)}")
    return f"more than one thing; yes, by {mixed}: {_list(tally, ', ')}"


def _answers(said: dict[str, bool | None]) -> str:
    """`yes for a, b; no for c`. The longest answer is `all others` if naming it would take long."""
    by_answer = {answer: [value for value, given in said.items() if given is answer] for answer in ANSWERS}
    longest = max(by_answer, key=lambda answer: len(by_answer[answer]))
    rest = longest if len(by_answer[longest]) > MOST_NAMED else "nothing"
    parts = []
    for answer in sorted(by_answer, key=lambda answer: answer is rest):
        if values := by_answer[answer]:
            told = "all others" if answer is rest else _list(values, "; " if ", " in values[0] else ", ")
            parts.append(f"{ANSWERS[answer]} {told}")
    return "; ".join(parts)


def _factors(cases: Sequence[Comparison]) -> list[str]:
    """Those that vary, the ones with the fewest values first: the simplest account of a difference is the one told."""
    names = dict.fromkeys(name for case in cases for name in case.where)
    values = {name: {case.where.get(name, "") for case in cases} for name in names}
    return sorted((name for name in names if len(values[name]) > 1), key=lambda name: len(values[name]))


def _impurity(cases: Sequence[Comparison], factor: str) -> float:
    """Cases that a majority vote within each value of the factor would get wrong; more values cost a little."""
    wrong, values = 0, dict.fromkeys(case.where.get(factor, "") for case in cases)
    for value in values:
        said = [case.yes for case in cases if case.where.get(factor, "") == value]
        wrong += len(said) - max(said.count(answer) for answer in (True, False, None))
    return wrong + 0.5 * len(values)


def _list(names: Sequence[str], between: str) -> str:
    shown = names if len(names) <= MOST_NAMED + 2 else [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    return between.join(shown)
