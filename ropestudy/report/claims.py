"""A claim, the comparisons that it rests on, and the verdict that follows from them. No verdict is written by hand.

A claim is tried on every case the study holds: a model under an arithmetic, in a mode, at positions. A case is an
effect with its interval over texts, and a margin: it says yes if the interval lies on the claim's side of the margin,
no if it lies on the other, and is not settled if it spans it. The verdict is that of the cases that a training run is
in; where others say something else, `exceptions` tells which.

    holds           they say yes
    does not hold   they say no
    not settled     their intervals span the margin
    depends         some say yes and some no; `depends` names the factor that tells them apart
    not measured    the study holds no case
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from anchorline.page import count
from ropestudy.report.effects import Effect, quotient_of
from ropestudy.report.select import between, number
from ropestudy.schema import Difference, Stat

Verdict = Literal["holds", "does not hold", "not settled", "depends", "not measured"]
AT_ZERO = "from 0"  # positions where the first token is not rotated at all


@dataclass(frozen=True)
class Margins:
    """An effect, and the margins between which it says yes."""

    effect: Effect
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Comparison:
    """One case. where: each factor's value, in words; parts: all must say yes, and the first one's effect is what
    `Claim.number_is` says; at: where its rows stand, if that is the beginning of a row.
    """

    where: dict[str, str]
    parts: tuple[Margins, ...]
    at: str = ""

    @property
    def yes(self) -> bool | None:
        """None is not settled."""
        said = {part.effect.within(part.low, part.high) for part in self.parts}
        return False if False in said else None if None in said else True

    @property
    def effect(self) -> Effect:
        """Its number."""
        return self.parts[0].effect

    @property
    def number(self) -> float:
        """Its value alone."""
        return self.effect.value

    @property
    def in_training(self) -> bool:
        """Whether a training run is in this case: whole forward passes in bf16 of a pretrained model, away from 0."""
        where = self.where
        arithmetic = where.get("arithmetic", where.get("preset", "bf16"))
        return (
            where.get("mode", "propagated") == "propagated"
            and "bf16" in arithmetic
            and "inv_freq" not in arithmetic
            and not where.get("positions", "").startswith(AT_ZERO)
        )


def above(where: dict[str, str], effect: Effect, margin: float, at: str = "") -> Comparison:
    """Say yes where an effect is above a margin."""
    return Comparison(where, (Margins(effect, low=math.nextafter(margin, math.inf)),), at)


def below(where: dict[str, str], effect: Effect, margin: float, at: str = "") -> Comparison:
    """Say yes where it is below."""
    return Comparison(where, (Margins(effect, high=math.nextafter(margin, -math.inf)),), at)


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
    by: str = ""  # the factor by which its numbers are told apart
    names: bool = False  # the note says what the values of `by` are

    @property
    def main(self) -> Sequence[Comparison]:
        """The cases that a training run is in; all, where the study has none such."""
        return [case for case in self.cases if case.in_training] or self.cases

    @property
    def verdict(self) -> Verdict:
        """What the main cases say together."""
        if not self.cases:
            return "not measured"
        said = {case.yes for case in self.main}
        if said == {True}:
            return "holds"
        if True not in said:
            return "does not hold" if said == {False} else "not settled"
        return "depends" if False in said else "not settled"

    @property
    def depends(self) -> str:
        """On what, in words; empty unless the verdict is `depends`."""
        return _depends(self.main) if self.verdict == "depends" else ""

    @property
    def tally(self) -> str:
        """How many of the main cases say what; empty where they all say the same."""
        said = {words: sum(case.yes is answer for case in self.main) for answer, words in COUNTED.items()}
        told = [f"{words} in {n}" for words, n in said.items() if n]
        return f"{', '.join(told)} of {len(self.main)}" if len(told) > 1 else ""

    @property
    def exceptions(self) -> str:
        """Which cases say otherwise than the verdict; empty if none does."""
        expected = {"holds": True, "does not hold": False}.get(self.verdict)
        if expected is None or all(case.yes is expected for case in self.cases):
            return ""
        return _depends(self.cases)

    @property
    def numbers(self) -> str:
        """The numbers of the main cases: one with its interval, or the range of several."""
        if not self.cases:
            return ""
        own = self.main
        values = list(dict.fromkeys(case.where.get(self.by, "") for case in own)) if self.by else []
        if len(values) > 1:
            parts = {value: [case for case in own if case.where.get(self.by, "") == value] for value in values}
            told = "; ".join(f"{value} {_range(cases)}" for value, cases in parts.items())
        else:
            told = _range(own)
        places = list(dict.fromkeys(case.at for case in own if case.at))
        at = f" ({'' if all(case.at for case in own) else 'in part '}{'; '.join(places)})" if places else ""
        return f"{self.number_is[:1].upper()}{self.number_is[1:]}: {told}{at}"


def _range(cases: Sequence[Comparison]) -> str:
    """One number with its interval, or the range of several."""
    if len(cases) == 1:
        return str(cases[0].effect)
    low, high = min(case.effect.low for case in cases), max(case.effect.high for case in cases)
    told = f"{between([case.number for case in cases])} ({count(len(cases), 'case')}"
    ranged = math.isfinite(low + high) and any(number(x.effect.low) != number(x.effect.high) for x in cases)
    return told + (f"; intervals from {number(low)} to {number(high)})" if ranged else ")")


def ratio(a: Stat, b: Stat) -> Effect:
    """Return the quotient of two numbers of the same sequences, paired."""
    return quotient_of(a.values, b.values)


def moved(difference: Difference) -> Stat:
    """Return what is judged wherever a claim names no other measure: the probability that moves per query."""
    return difference.row


MOST_NAMED = 6  # values named in a sentence; beyond, the first are named and the rest counted
COUNTED = {True: "yes", False: "no", None: "not settled"}
ANSWERS = {True: "yes for", False: "no for", None: "not settled for"}


def _depends(cases: Sequence[Comparison]) -> str:
    """Return the one factor that tells yes from no; else the two that do together; else how the best single one mixes
    them.
    """
    factors = _factors(cases)
    if not factors:
        return "the case"
    for names in (*((factor,) for factor in factors), *combinations(factors, 2)):
        said: dict[str, set[bool | None]] = {}
        for case in cases:
            said.setdefault(", ".join(filter(None, (case.where.get(name) for name in names))), set()).add(case.yes)
        if all(len(answers) == 1 for answers in said.values()) and (len(names) == 1 or len(said) < len(cases)):
            return (
                f"the {' and the '.join(names)}: {_answers({value: answers.pop() for value, answers in said.items()})}"
            )
    tally = {words: sum(case.yes is answer for case in cases) for answer, words in COUNTED.items()}
    return f"the case: {', '.join(f'{words} in {n}' for words, n in tally.items() if n)} of {len(cases)}"


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


def _list(names: Sequence[str], between: str) -> str:
    shown = names if len(names) <= MOST_NAMED + 2 else [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
    return between.join(shown)
