"""Beyond the paper: whether shift 0 is privileged, what grows with what, and what the first token's part is.

Legend: D eq. 5.
"""

from collections.abc import Iterator

from jaxref.study.report.claims import Case, Claim, agreed, moved, paired
from jaxref.study.report.claims_paper import where
from jaxref.study.report.select import is_half, of_kind, scores, times
from jaxref.study.schema import ByLength, Difference, OwnError, Results, ShiftPairs


def context_claims(results: Results) -> list[Claim]:
    """All of them, also those that this study did not measure."""
    return [
        distance_only(results),
        zero_is_privileged(results),
        grows_with_position(results),
        grows_with_length(results),
        more_than_its_mass(results),
        sink_removed(results),
    ]


def distance_only(results: Results) -> Claim:
    """The grid."""
    cases = []
    for r in of_kind(results, ShiftPairs):
        if r.mode != "local" or r.model != "pretrained" or not is_half(r.condition):
            continue
        groups: dict[int, list] = {}
        for pair in r.pairs:
            groups.setdefault(pair.d2 - pair.d1, []).append(pair)
        for distance, pairs in groups.items():
            if distance > 0 and len(pairs) > 1 and r.sequences > 1:
                low = min(pairs, key=lambda pair: pair.difference.d.mean)
                high = max(pairs, key=lambda pair: pair.difference.d.mean)
                d = [pair.difference.d for pair in (high, low)]
                yes = d[0].mean - d[1].mean <= max(stat.std for stat in d)
                cases.append(Case(where(r, distance=str(distance)), yes, times(d[0].mean, d[1].mean)))
    return Claim(
        "distance",
        "D is a function of |d1 - d2| alone",
        "own finding",
        "Of all pairs of shifts at one distance, the largest D and the smallest lie within one standard deviation over sequences.",
        "largest over smallest D at one distance",
        "grid",
        cases,
    )


def _own_errors(results: Results) -> Iterator[OwnError]:
    for r in of_kind(results, OwnError):
        if any(p.shift == 0 for p in r.points) and len(r.points) > 1:
            yield r


def zero_is_privileged(results: Results) -> Claim:
    """Small shifts beside float64."""
    cases = []
    for r in _own_errors(results):
        zero = next(p for p in r.points if p.shift == 0)
        cases += [
            Case(where(r, mode=r.mode, shift=f"{p.shift:,}"), paired(moved(zero.error), moved(p.error), lambda x, y: x < y),
                 times(p.error.row.mean, zero.error.row.mean))
            for p in r.points
            if p.shift > 0 and is_half(r.condition)
        ]  # fmt: skip
    return Claim(
        "zero",
        "Shift 0 is privileged: every other shift is farther from float64",
        "own finding",
        "The distance from float64 at the shift exceeds that at shift 0 in every sequence.",
        "distance from float64 at the shift over that at shift 0",
        "position",
        cases,
    )


def grows_with_position(results: Results) -> Claim:
    """Offsets up to the largest."""
    cases = []
    for r in _own_errors(results):
        zero, last = (f(r.points, key=lambda p: p.shift) for f in (min, max))
        yes = paired(moved(zero.error), moved(last.error), lambda x, y: y > 2 * x)
        cases.append(Case(where(r, mode=r.mode), yes, times(last.error.row.mean, zero.error.row.mean)))
    last = max((p.shift for r in _own_errors(results) for p in r.points), default=0)
    return Claim(
        "position",
        "The error grows with the position",
        "own finding",
        f"At the largest shift{f' ({last:,})' if last else ''} the distance from float64 is more than twice that at shift 0, in every sequence.",
        "distance from float64 at the largest shift over that at shift 0",
        "position",
        cases,
    )


def grows_with_length(results: Results) -> Claim:
    """Per query, which does not grow by counting."""
    cases = []
    for r in of_kind(results, ByLength):
        points = [p for p in r.points if p.error is not None]
        if r.model == "pretrained" and len(points) > 1:
            first, last = points[0], points[-1]
            for what, a, b in (
                ("shift error", first.shift, last.shift),
                ("error against float64", first.error, last.error),
            ):
                assert a is not None
                assert b is not None
                yes = agreed(y > 2 * x for x, y in zip(a.row.values, b.row.values, strict=True))
                cases.append(Case(where(r, mode=r.mode, measure=what), yes, times(b.row.mean, a.row.mean)))
    return Claim(
        "by-length",
        "The error of a query grows with the length",
        "own finding",
        "At the longest length the probability moved per query is more than twice that at the shortest, in every sequence.",
        "longest over shortest",
        "length",
        cases,
    )


def more_than_its_mass(results: Results) -> Claim:
    """Difference over mass."""
    cases = []
    for r in scores(results, "first_token"):
        if r.text == "first" and is_half(r.condition):
            cases += [_per_mass(where(r, mode=mode, text="BOS first"), f) for mode, f in r.shift.items()]
    return Claim(
        "mass",
        "The first token's part is more than the attention it receives explains",
        "own finding",
        "The difference per unit of attention received is larger for the first column than for all others together, in every sequence.",
        "difference per mass, first column over all others",
        "first-token",
        cases,
        about_shares=True,
    )


def _per_mass(factors: dict[str, str], f: Difference) -> Case:
    yes = paired(f.first_per_mass, f.rest_per_mass, lambda x, y: x > y)
    return Case(factors, yes, times(f.first_per_mass.mean, f.rest_per_mass.mean))


def sink_removed(results: Results) -> Claim:
    """No BOS, BOS in the middle, a sink logit."""
    cases, rows = [], scores(results, "first_token")
    for r in rows:
        base = next(
            (b for b in rows if (b.base, b.text, b.tokens) == (r.base, "first", r.tokens) and b.condition == b.base),
            None,
        )
        if base and r is not base:
            text = {"none": "no BOS", "middle": "BOS in the middle"}[r.text] + (
                ", sink logit" if r.condition != r.base else ""
            )
            cases += [
                Case({"arithmetic": r.base or "", "mode": mode, "sink": text},
                     paired(moved(r.shift[mode]), moved(base.shift[mode]), lambda x, y: x < y),
                     times(r.shift[mode].row.mean, base.shift[mode].row.mean))
                for mode in r.shift
            ]  # fmt: skip
    return Claim(
        "sink",
        "Without the first token as a sink the deviation is smaller",
        "own finding",
        "A query moves less between the shifts than with the BOS first, in every sequence.",
        "shift error over that with the BOS first",
        "first-token",
        cases,
    )
