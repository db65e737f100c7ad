"""Beyond the paper: whether shift 0 is privileged, what grows with what, and what the first token's part is.

Legend: D eq. 5.
"""

from collections.abc import Iterator

from ropestudy.report.claims import Claim, Comparison, above, below, moved, ratio
from ropestudy.report.claims_paper import beginning, positions_of, where
from ropestudy.report.effects import exponent_of
from ropestudy.report.select import is_half, of_kind, scores, share
from ropestudy.schema import ByLength, Difference, OwnError, Results, ShiftPairs

ONE_TENTH_MORE = 1.1
FARTHEST = 2**20  # tokens: the longest rows that anyone trains on


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
                cases.append(below(where(r, distance=f"{distance:,} from {starts}"), ratio(a, b), ONE_TENTH_MORE))
    return Claim(
        "distance",
        "The deviation is a function of |d1 - d2| alone",
        "own finding",
        "Of all pairs of shifts at one distance, the one that moves most and the one that moves least differ by less "
        "than a tenth.",
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
            above(where(r, mode=r.mode, shift=f"{p.shift:,}"), ratio(moved(p.error), moved(zero.error)), 1)
            for p in r.points
            if p.shift > 0 and is_half(r.condition)
        ]
    return Claim(
        "zero",
        "Shift 0 is privileged: every other shift is farther from float64",
        "own finding",
        "The distance from float64 at the shift exceeds that at shift 0.",
        "distance from float64 at the shift over that at shift 0",
        "position",
        cases,
    )


def grows_with_position(results: Results) -> Claim:
    """Offsets up to the largest."""
    cases = []
    for r in _own_errors(results):
        zero = next(p for p in r.points if p.shift == 0)
        for what, points in (
            (f"up to {FARTHEST:,}", [p for p in r.points if 0 < p.shift <= FARTHEST]),
            ("beyond", [p for p in r.points if p.shift > FARTHEST]),
        ):
            if points:
                most = max(points, key=lambda p: p.error.row.mean)
                cases.append(
                    above(where(r, mode=r.mode, position=what), ratio(moved(most.error), moved(zero.error)), 2)
                )
    last = max((p.shift for r in _own_errors(results) for p in r.points), default=0)
    return Claim(
        "position",
        "The error more than doubles with the position",
        "own finding",
        f"Of all shifts up to {FARTHEST:,}, and of those beyond{f' up to {last:,}' if last > FARTHEST else ''}, the "
        "one farthest from float64 is more than twice as far as shift 0.",
        "largest distance from float64 over that at shift 0",
        "position",
        cases,
        by="position",
    )


def grows_with_length(results: Results) -> Claim:
    """Per query, which does not grow by counting."""
    cases = []
    for r in of_kind(results, ByLength):
        points = [p for p in r.points if p.error is not None]
        if r.model == "pretrained" and len(points) > 1:
            sizes = [p.tokens for p in points]
            errors = [p.error.row.values for p in points if p.error is not None]
            for what, values in (
                ("shift error", [p.shift.row.values for p in points]),
                ("error against float64", errors),
            ):
                cases.append(
                    above(where(r, mode=r.mode, measure=what), exponent_of(sizes, values), 0, beginning(r.d1, sizes))
                )
    return Claim(
        "by-length",
        "The error of a query grows with the length",
        "own finding",
        "The exponent of a power law of the probability moved per query over all lengths is above 0.",
        "exponent of the length",
        "length",
        cases,
    )


def more_than_its_mass(results: Results) -> Claim:
    """Difference over mass."""
    cases = []
    for r in scores(results, "first_token"):
        if r.text == "first" and is_half(r.condition):
            cases += [_per_mass(where(r, mode=mode, positions=positions_of(r)), f) for mode, f in r.shift.items()]
    return Claim(
        "mass",
        "The first token's part is more than the attention it receives explains",
        "own finding",
        ("The difference per unit of attention received is larger for the first column than for all others together."),
        "difference per mass, first column over all others",
        "first-token",
        cases,
        about_shares=True,
    )


def _per_mass(factors: dict[str, str], f: Difference) -> Comparison:
    return above(factors, ratio(f.first_per_mass, f.rest_per_mass), 1)


def sink_removed(results: Results) -> Claim:
    """No BOS, BOS in the middle, a sink logit."""
    cases, rows, masses = [], scores(results, "first_token"), []
    for r in rows:
        base = next(
            (
                b
                for b in rows
                if (b.base, b.text, b.tokens, b.d1, b.gap) == (r.base, "first", r.tokens, r.d1, r.gap)
                and b.condition == b.base
            ),
            None,
        )
        if base and r is not base:
            text = {"none": "no BOS", "middle": "BOS in the middle"}[r.text] + (
                ", sink logit" if r.condition != r.base else ""
            )
            mass, before = (s.shift["local"].first_mass_unweighted for s in (r, base))
            masses.append(f"{r.base}, {text}: {share(mass.mean)} (BOS first: {share(before.mean)})")
            if not ratio(mass, before).high < 1:
                continue  # another token is the sink now
            cases += [
                below(
                    {"arithmetic": r.base or "", "mode": mode, "sink": text, "positions": positions_of(r)},
                    ratio(moved(r.shift[mode]), moved(base.shift[mode])),
                    1,
                )
                for mode in r.shift
            ]
    return Claim(
        "sink",
        "Without the first token as a sink the deviation is smaller",
        "own finding",
        "Where the first column receives less attention than with the BOS first, a query moves less between the "
        "shifts than there. Taking the BOS away does not take the sink away where another "
        "token becomes it: such texts are not judged.",
        "shift error over that with the BOS first",
        "first-token",
        cases,
        note=f"The first column's share of the attention: {'; '.join(masses)}." if masses else "",
    )
