"""Beyond the paper: whether shift 0 is privileged, what grows with what, and what the first token's part is.

Legend: D eq. 5.
"""

from collections.abc import Iterator

from ropestudy.report.claims import Claim, Comparison, agree, compare_each, moved
from ropestudy.report.claims_paper import where
from ropestudy.report.select import is_half, of_kind, scores, share, times
from ropestudy.schema import ByLength, Difference, OwnError, Results, ShiftPairs

ONE_TENTH_MORE = 1.1


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
            if distance > 0 and len(pairs) > 1:
                low, high = (f(pairs, key=lambda pair: pair.difference.row.mean) for f in (min, max))
                a, b = moved(high.difference), moved(low.difference)
                starts = ", ".join(f"{pair.d1:,}" for pair in pairs)
                yes = compare_each(a, b, lambda x, y: x < ONE_TENTH_MORE * y)
                cases.append(Comparison(where(r, distance=f"{distance:,} from {starts}"), yes, times(a.mean, b.mean)))
    return Claim(
        "distance",
        "The deviation is a function of |d1 - d2| alone",
        "own finding",
        "Of all pairs of shifts at one distance, the one that moves most and the one that moves least differ by less "
        "than a tenth, in every sequence.",
        "most over least moved at one distance",
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
            Comparison(
                where(r, mode=r.mode, shift=f"{p.shift:,}"),
                compare_each(moved(zero.error), moved(p.error), lambda x, y: x < y),
                times(p.error.row.mean, zero.error.row.mean),
            )
            for p in r.points
            if p.shift > 0 and is_half(r.condition)
        ]
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
        zero = next(p for p in r.points if p.shift == 0)
        most = max(r.points, key=lambda p: p.error.row.mean)
        yes = compare_each(moved(zero.error), moved(most.error), lambda x, y: y > 2 * x)
        cases.append(Comparison(where(r, mode=r.mode), yes, times(most.error.row.mean, zero.error.row.mean)))
    last = max((p.shift for r in _own_errors(results) for p in r.points), default=0)
    return Claim(
        "position",
        "The error more than doubles with the position",
        "own finding",
        f"Of all shifts{f' up to {last:,}' if last else ''} the one farthest from float64 is more than twice as far "
        "as shift 0, in every sequence.",
        "largest distance from float64 over that at shift 0",
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
                yes = agree(y > 2 * x for x, y in zip(a.row.values, b.row.values, strict=True))
                cases.append(Comparison(where(r, mode=r.mode, measure=what), yes, times(b.row.mean, a.row.mean)))
    return Claim(
        "by-length",
        "The error of a query more than doubles with the length",
        "own finding",
        (
            "At the longest length the probability moved per query is more than twice that at the shortest, in every "
            "sequence."
        ),
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
        (
            "The difference per unit of attention received is larger for the first column than for all others "
            "together, in every sequence."
        ),
        "difference per mass, first column over all others",
        "first-token",
        cases,
        about_shares=True,
    )


def _per_mass(factors: dict[str, str], f: Difference) -> Comparison:
    yes = compare_each(f.first_per_mass, f.rest_per_mass, lambda x, y: x > y)
    return Comparison(factors, yes, times(f.first_per_mass.mean, f.rest_per_mass.mean))


def sink_removed(results: Results) -> Claim:
    """No BOS, BOS in the middle, a sink logit."""
    cases, rows, masses = [], scores(results, "first_token"), []
    for r in rows:
        base = next(
            (b for b in rows if (b.base, b.text, b.tokens) == (r.base, "first", r.tokens) and b.condition == b.base),
            None,
        )
        if base and r is not base:
            text = {"none": "no BOS", "middle": "BOS in the middle"}[r.text] + (
                ", sink logit" if r.condition != r.base else ""
            )
            mass, before = (s.shift["local"].first_mass_unweighted for s in (r, base))
            masses.append(f"{r.base}, {text}: {share(mass.mean)} (BOS first: {share(before.mean)})")
            if not compare_each(mass, before, lambda x, y: x < y):
                continue  # another token is the sink now
            cases += [
                Comparison(
                    {"arithmetic": r.base or "", "mode": mode, "sink": text},
                    compare_each(moved(r.shift[mode]), moved(base.shift[mode]), lambda x, y: x < y),
                    times(r.shift[mode].row.mean, base.shift[mode].row.mean),
                )
                for mode in r.shift
            ]
    return Claim(
        "sink",
        "Without the first token as a sink the deviation is smaller",
        "own finding",
        "Where the first column receives less attention than with the BOS first, a query moves less between the "
        "shifts than there; both in every sequence. Taking the BOS away does not take the sink away where another "
        "token becomes it: such texts are not judged.",
        "shift error over that with the BOS first",
        "first-token",
        cases,
        note=f"The first column's share of the attention: {'; '.join(masses)}." if masses else "",
    )
