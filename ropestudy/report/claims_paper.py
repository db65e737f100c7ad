"""What the paper claims (arXiv 2411.13476, abstract, section 2 and appendix), claim by claim, tried on a study's
records.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import log

from ropestudy.report.claims import Claim, Comparison, above, agree, compare_each, moved
from ropestudy.report.select import at_other_end, is_half, of_kind, one_rounding, paper_shift, scores, times
from ropestudy.schema import ByLength, Difference, MaskPair, PerToken, Record, Results, Score, ShiftPairs

ONE_ROUNDING = (
    "one rounding of every probability to the half precision moves in the mean (of bf16 2^-8 / (4 ln 2) = 0.00141 per "
    "query, as a row of attention sums to one)"
)
FP32 = ("fp32", "flash_fp32", "fp32_sites", "fp32_angles64")
FP32_ROUNDOFF = 2.0**-24


def paper_claims(results: Results) -> list[Claim]:
    """All of them, also those that this study did not measure."""
    return [
        not_relative(results),
        fp32_relative(results),
        samples_agree(results),
        amplified(results),
        first_most(results),
        grows(results),
        only_the_first_grows(results),
        reset_matters(results),
        reset_helps(results),
        anchor_helps(results),
        anchor_helps_beyond_isolation(results),
    ]


def where(record: Record, **more: str) -> dict[str, str]:
    """The factors that every record has."""
    found = {"model": record.model} if record.model != "pretrained" else {}
    found |= {"arithmetic": record.condition}
    if record.attention_from != "oracle":
        found["attention"] = record.attention_from
    return found | more


def _points(results: Results) -> Iterator[tuple[ShiftPairs, int, Difference]]:
    """Every (record, d1, difference from the paper's d2)."""
    for record in of_kind(results, ShiftPairs):
        for d, difference in at_other_end(record, paper_shift(results)):
            yield record, d, difference


def not_relative(results: Results) -> Claim:
    """Abstract; figure 1, left."""
    cases = [
        Comparison(where(r, mode=r.mode, shift=f"d1 = {d}"), above(moved(f), one_rounding(r.condition)), f.row.mean)
        for r, d, f in _points(results)
        if r.model == "pretrained" and is_half(r.condition)
    ]
    return Claim(
        "not-relative",
        "In bf16, RoPE deviates from being relative: shifting all positions changes the attention",
        "the paper's abstract and figure 1, left",
        f"At every shift the attention of the pretrained model moves more than {ONE_ROUNDING}.",
        "probability moved per query",
        "shift",
        cases,
    )


def fp32_relative(results: Results) -> Claim:
    """Figure 1, left: the line of float32."""
    cases = [
        Comparison(
            where(r, mode=r.mode, shift=f"d1 = {d}"),
            agree(v <= one_rounding("bf16") for v in f.row.values),
            f.row.mean,
        )
        for r, d, f in _points(results)
        if r.model == "pretrained" and r.condition in FP32
    ]
    largest = max((d for r, d, _ in _points(results) if r.condition in FP32), default=0)
    return Claim(
        "fp32-relative",
        "In float32 it does not",
        "the paper's figure 1, left",
        "At every shift the attention moves no more than one rounding of every probability to bf16 moves (0.00141 per "
        "query): less than a bf16 model could show.",
        "probability moved per query",
        "shift",
        cases,
        note=f"Tried for shifts up to {largest:,}; float32's own angles err with the position, see the figure on "
        "position."
        if cases
        else "",
    )


def samples_agree(results: Results) -> Claim:
    """The appendix' single samples."""
    oracles = [(r, d, f) for r, d, f in _points(results) if r.attention_from == "oracle"]
    lows = {(r.mode, d): f for r, d, f in oracles if r.model == "pretrained" and r.condition == "fp32"}
    cases = []
    for r, d, f in oracles:
        low = lows.get((r.mode, d))
        if r.model == "pretrained" and is_half(r.condition) and low and len(low.d.values) == len(f.d.values):
            ratio = min(times(a, b) for a, b in zip(f.d.values, low.d.values, strict=True))
            cases.append(
                Comparison(
                    where(r, mode=r.mode, shift=f"d1 = {d}"), compare_each(f.d, low.d, lambda a, b: a > b), ratio
                )
            )
    return Claim(
        "samples",
        "Single samples show the same as their mean: bf16 above float32 at every shift",
        "the paper's appendix",
        "In each sequence by itself D in half precision exceeds D in float32, at every shift.",
        "smallest quotient over the sequences",
        "samples",
        cases,
    )


def amplified(results: Results) -> Claim:
    """Figure 1, left: pretrained above random."""
    cases = []
    points = [(r, d, f) for r, d, f in _points(results) if r.attention_from == "oracle"]
    own = {(r.condition, r.mode, d, r.tokens): f for r, d, f in points if r.model == "pretrained"}
    for r, d, f in points:
        trained = own.get((r.condition, r.mode, d, r.tokens))
        if r.model != "pretrained" and is_half(r.condition) and trained:
            cases += _more(r, trained, f, r.mode)
    controls = scores(results, "control")
    for r in controls:
        trained_score = next((s for s in scores(results, "control", "baseline") if _twin(s, r)), None)
        if r.model != "pretrained" and trained_score:
            for mode in r.shift:
                cases += _more(r, trained_score.shift[mode], r.shift[mode], mode)
    return Claim(
        "amplified",
        "Pretraining amplifies the deviation: a randomly initialised model shows less",
        "the paper's section 2 and figure 1, left",
        "The pretrained model moves more than the other weights in every sequence, at the same shift, length and "
        "arithmetic: by D, and per query.",
        "pretrained over the other",
        "models" if any(r.model != "pretrained" for r in controls) else "shift",
        cases,
        note="; ".join(f"{name}: {words}" for name, words in results.model.initialisations.items()),
    )


def _twin(s: Score, r: Score) -> bool:
    same = (s.condition, s.tokens, s.sequences, s.d1, s.d2) == (r.condition, r.tokens, r.sequences, r.d1, r.d2)
    return same and s.model == "pretrained" and s.mask == r.mask and s.text == r.text


def _more(record: Record, trained: Difference, other: Difference, mode: str) -> list[Comparison]:
    """By D, whose n weighs the last columns most, and by what moves per query."""
    made = []
    for name, a, b in (("D", trained.d, other.d), ("moved per query", moved(trained), moved(other))):
        n = min(len(a.values), len(b.values))
        yes = agree(x > y for x, y in zip(a.values[:n], b.values[:n], strict=True))
        made.append(Comparison(where(record, mode=mode, measure=name), yes, times(a.mean, b.mean)))
    return made


def first_most(results: Results) -> Claim:
    """Figure 1, middle."""
    cases = []
    for r in of_kind(results, PerToken):
        if r.model == "pretrained" and is_half(r.condition):
            for name, columns, part in (
                ("n as in eq. 5", r.columns.d, r.difference.first_share),
                ("every n = 1", r.columns.unweighted, r.difference.first_share_unweighted),
            ):
                cases.append(Comparison(where(r, mode=r.mode, weighting=name), columns[0] >= max(columns), part.mean))
    return Claim(
        "first-most",
        "The first token contributes most to the deviation",
        "the paper's abstract and figure 1, middle",
        "No column has a larger part of D than the first, in the mean over sequences.",
        "the first column's share of D",
        "tokens",
        cases,
        about_shares=True,
    )


def _exponent(points: list[tuple[int, float]]) -> float:
    """Of a power law through the first and the last point."""
    (t0, y0), (t1, y1) = points[0], points[-1]
    return log(times(y1, y0)) / log(t1 / t0) if y0 > 0 and y1 > 0 and t1 != t0 else 0.0


def _grows(points: list[tuple[int, list[float]]]) -> bool | None:
    """Whether the longest exceeds the shortest in every sequence, and the mean rises at most steps."""
    means = [sum(values) / len(values) for _, values in points]
    rises = sum(b > a for a, b in pairwise(means))
    ends = agree(b > a for a, b in zip(points[0][1], points[-1][1], strict=True))
    return ends and 2 * rises > len(points) - 1 if ends is not None else None


def _half_lengths(results: Results) -> list[ByLength]:
    found = [r for r in of_kind(results, ByLength) if r.model == "pretrained" and is_half(r.condition)]
    return [r for r in found if len(r.points) > 1]


def grows(results: Results) -> Claim:
    """Abstract; figure 1, right."""
    cases = []
    for r in _half_lengths(results):
        values = [(p.tokens, p.shift.d_logit_first.values) for p in r.points]
        exponent = _exponent([(p.tokens, p.shift.d_logit_first.mean) for p in r.points])
        cases.append(Comparison(where(r, mode=r.mode), _grows(values), exponent))
    return Claim(
        "grows",
        "The deviation of the first token grows with the length",
        "the paper's abstract and figure 1, right",
        "D_logit of the first column at the longest length exceeds that at the shortest in every sequence, and its "
        "mean rises at more than half of the steps.",
        "exponent of the length between shortest and longest (0: no growth, 1: in proportion)",
        "length",
        cases,
    )


def only_the_first_grows(results: Results) -> Claim:
    """Figure 1, right, says it of the first alone."""
    cases = []
    for r in _half_lengths(results):
        first = _exponent([(p.tokens, p.shift.d_logit_first.mean) for p in r.points])
        for j in sorted(set(r.points[0].columns) & set(r.points[-1].columns) - {0}):
            other = _exponent([(p.tokens, p.columns[j]) for p in r.points if j in p.columns])
            cases.append(Comparison(where(r, mode=r.mode, column=f"column {j + 1}"), first > other, other - first))
        rest = _exponent([(p.tokens, p.shift.d_logit_rest.mean) for p in r.points])
        cases.append(Comparison(where(r, mode=r.mode, column="mean of all others"), first > rest, rest - first))
    return Claim(
        "only-first",
        "It is the first token whose deviation grows: it grows faster than that of any other column",
        "the paper's abstract (the first token contributes significantly as context grows)",
        "The exponent of D_logit with the length is larger for the first column than for the other (of means over "
        "sequences: columns are recorded without a spread).",
        "the other column's exponent minus the first one's",
        "length",
        cases,
    )


def reset_matters(results: Results) -> Claim:
    """Section 3: the same function in exact arithmetic."""
    cases = []
    for r in of_kind(results, MaskPair):
        if (r.a, r.b) != ("intra", "intra_reset"):
            continue
        row = moved(r.difference)
        if is_half(r.condition):
            cases.append(Comparison(where(r, mode=r.mode), above(row, one_rounding(r.condition)), row.mean))
        elif r.condition == "exact":
            cases.append(Comparison(where(r, mode=r.mode), agree(v <= FP32_ROUNDOFF for v in row.values), row.mean))
    return Claim(
        "reset-matters",
        "Resetting positions in every document changes nothing in exact arithmetic, and something in bf16",
        "the paper's section 3",
        (
            "Intra against intra_reset: in float64 it moves less than 2^-24 per query, in half precision more than "
            f"{ONE_ROUNDING}."
        ),
        "probability moved per query",
        "masks",
        cases,
    )


def reset_helps(results: Results) -> Claim:
    """Section 3."""
    return _closer(
        results,
        "reset-helps",
        "Resetting positions helps: attention is closer to float64",
        "intra_reset",
        "intra",
        "section 3",
    )


def anchor_helps(results: Results) -> Claim:
    """Section 4."""
    return _closer(
        results,
        "anchor-helps",
        "Anchoring helps: attention is closer to float64 than full attention's",
        "anchor",
        "full",
        "section 4",
    )


def anchor_helps_beyond_isolation(results: Results) -> Claim:
    """Section 4, with what isolation alone does taken off: under full a query sees more keys."""
    return _closer(
        results,
        "anchor-over-intra",
        "Anchoring helps beyond isolating documents: attention is closer to float64 than intra's",
        "anchor",
        "intra",
        "section 4, held against isolation alone",
    )


def _closer(results: Results, key: str, says: str, mask: str, than: str, section: str) -> Claim:
    rows, cases = scores(results, "mask"), []
    for r in rows:
        other = next((s for s in rows if s.mask == than and (s.condition, s.tokens) == (r.condition, r.tokens)), None)
        if r.mask == mask and other and is_half(r.condition):
            for what, a, b in (("error against float64", r.error, other.error), ("shift error", r.shift, other.shift)):
                cases += [
                    Comparison(
                        where(r, mode=mode, measure=what),
                        compare_each(moved(a[mode]), moved(b[mode]), lambda x, y: x < y),
                        times(a[mode].row.mean, b[mode].row.mean),
                    )
                    for mode in a
                ]
    return Claim(
        key,
        says,
        f"the paper's {section}",
        f"Under {mask} a query moves less than under {than}, in every sequence: from float64 under the same mask, and "
        "between two shifts of the whole row.",
        f"{mask} over {than}",
        "masks",
        cases,
        note="What is judged is rounding. What training makes of a mask is not measured here." if cases else "",
    )
