"""Which records a figure or a claim asks for, what they are called on the page, and how a number is written."""

import math
from collections.abc import Sequence
from typing import TypeVar

from ropestudy.schema import Difference, Record, Results, Score, ShiftPairs

R = TypeVar("R", bound=Record)

HALF = ("bf16", "fp16")


def of_kind(results: Results, kind: type[R]) -> list[R]:
    """Return every record of one kind, in the order of the file."""
    return [record for record in results.records if isinstance(record, kind)]


def scores(results: Results, *groups: str) -> list[Score]:
    """Return every score of these groups."""
    return [score for score in of_kind(results, Score) if score.group in groups]


def is_half(condition: str) -> bool:
    """Return whether a condition's name says that it computes in half precision: `hf_eager_bf16`, `flash_fp16`, ..."""
    return any(form in condition for form in HALF)


def one_rounding(condition: str) -> float:
    """Return what one rounding of every probability to the condition's half precision moves per query: 0.00141 of bf16.

    To nearest, a number m 2^e with 1 <= m < 2 errs by a quarter of its unit in the last place, u 2^e with the roundoff
    u = 2^-8 of bf16, 2^-11 of fp16, in the mean: u / 2. Relative to the number that is u / (2 m), and the mean of 1 / m
    over mantissas that are uniform in their logarithm is 1 / (2 ln 2). A row of attention sums to one.
    """
    return (2.0**-11 if "fp16" in condition else 2.0**-8) / (4 * math.log(2))


def at_other_end(record: ShiftPairs, end: int) -> list[tuple[int, Difference]]:
    """Return (d, difference) of every pair that has `end` as one of its shifts, by rising d. D is symmetric."""
    found = [
        (pair.d1 if pair.d2 == end else pair.d2, pair.difference) for pair in record.pairs if end in (pair.d1, pair.d2)
    ]
    return sorted(found, key=lambda item: item[0])


def paper_shift(results: Results) -> int:
    """Return the shift every other is compared with: 16 in the paper, or what the configuration says."""
    section = results.config.get("shift_pairs") or {}
    return int(section.get("d2", 16))


def baseline(results: Results, score: Score) -> Score | None:
    """Return the whole preset that a score changes, on the same text, under the same mask; None if the study has
    none.
    """
    for other in scores(results, "baseline"):
        same = (
            *(other.tokens, other.sequences, other.model, other.text, other.mask, other.gap, other.d1, other.d2),
        ) == (
            *(score.tokens, score.sequences, score.model, score.text, score.mask, score.gap, score.d1),
            *(score.d2 if score.d2 != score.d1 else other.d2,),
        )
        if same and other.condition == score.base:
            return other
    return None


def name_of(record: Record) -> str:
    """`pretrained, hf_eager_bf16`: a line's name in a legend. The model is left out where it is the pretrained one."""
    parts = [] if record.model == "pretrained" else [record.model]
    parts.append(record.condition)
    if record.attention_from != "oracle":
        parts.append(f"({record.attention_from})")
    return " ".join(parts)


def unique(values: Sequence[R] | Sequence[str]) -> list:
    """Return the distinct values, in their order."""
    return list(dict.fromkeys(values))


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, or as many as asked for: `0.0123`, `1.23e-5`, `1,230`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) < 1000:
        value = float(f"{value:.{digits}g}")  # 999.9 becomes 1,000 and not 1e+03
    if 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def between(values: Sequence[float]) -> str:
    """`0.0123`, or `0.0123 to 0.4`."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def times(x: float, y: float) -> float:
    """Return x / y; infinite where only y is 0, 1 where both are."""
    if y == 0:
        return 1.0 if x == 0 else math.inf
    return x / y


def share(x: float) -> str:
    """`12.3%`."""
    return f"{100 * x:.3g}%"
