"""What the paper claims (arXiv 2411.13476, abstract, section 2 and appendix), claim by claim, tried on a study's
records.
"""

from collections.abc import Iterator, Sequence

from ropestudy.report.claims import Claim, Comparison, above, below, moved, ratio
from ropestudy.report.effects import Effect, exponent_of, exponents_apart, fold_of, known, mean_of
from ropestudy.report.select import at_other_end, between, is_half, of_kind, one_rounding, paper_shift, scores, times
from ropestudy.schema import ByLength, Difference, MaskPair, PerToken, Record, Results, Score, ShiftPairs

ONE_ROUNDING = (
    "one rounding of every probability to the half precision moves in the mean (of bf16 2^-8 / (4 ln 2) = 0.00141 per "
    "query, as a row of attention sums to one)"
)
FP32 = ("fp32", "flash_fp32", "fp32_sites", "fp32_angles64")
FP32_ROUNDOFF = 2.0**-24
MOST = 0.5


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
        *closer(results),
    ]


def where(record: Record, **more: str) -> dict[str, str]:
    """The factors that every record has."""
    found = {"model": record.model} if record.model != "pretrained" else {}
    found |= {"arithmetic": record.condition}
    if record.attention_from != "oracle":
        found["attention"] = record.attention_from
    return found | more


def beginning(d: int, tokens: Sequence[int]) -> str:
    """`at position 0, 64 to 512 tokens`; empty of rows that stand elsewhere. d: the shift that is compared."""
    return f"at position 0, {between([float(size) for size in tokens])} tokens" if d == 0 else ""


def positions_of(score: Score) -> str:
    """`from 0`, `from 4,080`, `from 0, a gap of 8,128`: where a row's tokens stand."""
    gap = f"a gap of {score.gap:,}" if score.gap else ""
    return f"{gap}, from {score.d1:,}" if gap else f"from {score.d1:,}"


def _points(results: Results) -> Iterator[tuple[ShiftPairs, int, Difference]]:
    """Every (record, d1, difference from the paper's d2)."""
    for record in of_kind(results, ShiftPairs):
        for d, difference in at_other_end(record, paper_shift(results)):
            yield record, d, difference


def not_relative(results: Results) -> Claim:
    """Abstract; figure 1, left."""
    cases = [
        above(
            where(r, mode=r.mode, shift=f"d1 = {d}"),
            mean_of(f.row.values),
            one_rounding(r.condition),
            beginning(d, [r.tokens]),
        )
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
        below(
            where(r, mode=r.mode, shift=f"d1 = {d}"),
            mean_of(f.row.values),
            one_rounding("bf16"),
            beginning(d, [r.tokens]),
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
            each = [times(a, b) for a, b in zip(f.d.values, low.d.values, strict=True)]
            factors = where(r, mode=r.mode, shift=f"d1 = {d}")
            cases.append(above(factors, known(min(each)), 1, beginning(d, [r.tokens])))
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
            cases += _more(r, trained, f, r.mode, beginning(d, [r.tokens]))
    controls = scores(results, "control")
    for r in controls:
        trained_score = next((s for s in scores(results, "control", "baseline") if _twin(s, r)), None)
        if r.model != "pretrained" and trained_score:
            for mode in r.shift:
                cases += _more(r, trained_score.shift[mode], r.shift[mode], mode, beginning(r.d1, [r.tokens]))
    return Claim(
        "amplified",
        "Pretraining amplifies the deviation: a randomly initialised model shows less",
        "the paper's section 2 and figure 1, left",
        "The pretrained model moves more than the other weights (a quotient above 1, paired by text), at the same "
        "shift, length and arithmetic: by D, and per query.",
        "pretrained over the other",
        "models" if any(r.model != "pretrained" for r in controls) else "shift",
        cases,
        note="; ".join(f"{name}: {words}" for name, words in results.model.initialisations.items()),
        by="model",
        names=True,
    )


def _twin(s: Score, r: Score) -> bool:
    same = (s.condition, s.tokens, s.sequences, s.d1, s.d2) == (r.condition, r.tokens, r.sequences, r.d1, r.d2)
    same = same and s.gap == r.gap
    return same and s.model == "pretrained" and s.mask == r.mask and s.text == r.text


def _more(record: Record, trained: Difference, other: Difference, mode: str, at: str) -> list[Comparison]:
    """By D, whose n weighs the last columns most, and by what moves per query."""
    pairs = (("D", trained.d, other.d), ("moved per query", moved(trained), moved(other)))
    return [above(where(record, mode=mode, measure=name), ratio(a, b), 1, at) for name, a, b in pairs]


def first_most(results: Results) -> Claim:
    """Figure 1, middle."""
    cases = []
    for r in of_kind(results, PerToken):
        if r.model == "pretrained" and is_half(r.condition):
            cases.append(
                above(
                    where(r, mode=r.mode), mean_of(r.difference.first_share.values), MOST, beginning(r.d1, [r.tokens])
                )
            )
    return Claim(
        "first-most",
        "The first token accounts for most of the deviation",
        "the paper's abstract and figure 1, middle",
        "Its column has more than half of D (eq. 5), whatever the second largest has.",
        "the first column's share of D",
        "tokens",
        cases,
        about_shares=True,
    )


def _half_lengths(results: Results) -> list[ByLength]:
    found = [r for r in of_kind(results, ByLength) if r.model == "pretrained" and is_half(r.condition)]
    return [r for r in found if len(r.points) > 1]


def _place(record: ByLength) -> str:
    return beginning(record.d1, [p.tokens for p in record.points])


def grows(results: Results) -> Claim:
    """Abstract; figure 1, right."""
    cases = [
        above(where(r, mode=r.mode), _exponent(r, [p.shift.d_logit_first.values for p in r.points]), 0, _place(r))
        for r in _half_lengths(results)
    ]
    return Claim(
        "grows",
        "The deviation of the first token grows with the length",
        "the paper's abstract and figure 1, right",
        "The exponent of a power law of D_logit of the first column over all lengths is above 0.",
        "exponent of the length (0: no growth, 1: in proportion)",
        "length",
        cases,
        note=_growth(results),
    )


def _exponent(record: ByLength, values: list[list[float]]) -> Effect:
    return exponent_of([p.tokens for p in record.points], values)


def _growth(results: Results) -> str:
    """What the exponent comes to between the shortest and the longest length."""
    told = []
    for r in _half_lengths(results):
        a, b = r.points[0], r.points[-1]
        quotient = ratio(b.shift.d_logit_first, a.shift.d_logit_first)
        told.append(f"{r.condition}, {r.mode}: {quotient} times from {a.tokens:,} to {b.tokens:,} tokens")
    return "; ".join(told)


def only_the_first_grows(results: Results) -> Claim:
    """Figure 1, right, says it of the first alone."""
    cases = []
    for r in _half_lengths(results):
        first, rest = ([getattr(p.shift, name).values for p in r.points] for name in ("d_logit_first", "d_logit_rest"))
        cases.append(
            above(where(r, mode=r.mode), exponents_apart([p.tokens for p in r.points], first, rest), 0, _place(r))
        )
    return Claim(
        "only-first",
        "It is the first token whose deviation grows: it grows faster than that of the others",
        "the paper's abstract (the first token contributes significantly as context grows)",
        "The exponent of D_logit with the length is larger for the first column than for the mean of all others, "
        "paired by text.",
        "the first column's exponent less the others'",
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
            cases.append(above(where(r, mode=r.mode), mean_of(row.values), one_rounding(r.condition)))
        elif r.condition == "exact":
            cases.append(below(where(r, mode=r.mode), mean_of(row.values), FP32_ROUNDOFF))
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


def closer(results: Results) -> list[Claim]:
    """Sections 3 and 4: a mask against another, by the attention and by the outputs."""
    found = []
    for key, says, mask, than, section in (
        ("reset-helps", "Resetting positions helps", "intra_reset", "intra", "section 3"),
        ("anchor-helps", "Anchoring helps", "anchor", "full", "section 4"),
        # What isolation alone does taken off: under full a query sees more keys.
        (
            "anchor-over-intra", "Anchoring helps beyond isolating documents", "anchor", "intra",
            "section 4, held against isolation alone",
        ),
    ):  # fmt: skip
        found.append(
            _attention_closer(
                results, key, f"{says}: attention is closer to float64 than {than}'s", mask, than, section
            )
        )
        found.append(_outputs_closer(results, f"{key}-outputs", f"{says}: the outputs are, too", mask, than, section))
    return found


CAUTION = "What is judged is rounding. What training makes of a mask is not measured here."


def _pairs(results: Results, mask: str, than: str) -> Iterator[tuple[Score, Score]]:
    """Every score under one mask, and that of the same arithmetic and positions under another."""
    rows = scores(results, "mask")
    for r in rows:
        same = (r.condition, r.tokens, r.d1, r.gap)
        other = next((s for s in rows if s.mask == than and (s.condition, s.tokens, s.d1, s.gap) == same), None)
        if r.mask == mask and other and is_half(r.condition):
            yield r, other


def _outputs_closer(results: Results, key: str, says: str, mask: str, than: str, section: str) -> Claim:
    cases = [
        below(where(r, positions=positions_of(r)), fold_of(r.kl_error.kl.values, other.kl_error.kl.values), 1)
        for r, other in _pairs(results, mask, than)
    ]
    return Claim(
        key,
        says,
        f"the paper's {section}",
        f"The outputs under {mask} have less KL from float64's under the same mask than those under {than} (geometric "
        "mean of the texts' quotients, below 1).",
        f"KL, {mask} over {than}",
        "masks",
        cases,
        note=CAUTION if cases else "",
    )


def _attention_closer(results: Results, key: str, says: str, mask: str, than: str, section: str) -> Claim:
    cases = []
    for r, other in _pairs(results, mask, than):
        for what, a, b in (("error against float64", r.error, other.error), ("shift error", r.shift, other.shift)):
            cases += [
                below(
                    where(r, mode=mode, measure=what, positions=positions_of(r)),
                    ratio(moved(a[mode]), moved(b[mode])),
                    1,
                )
                for mode in a
            ]
    return Claim(
        key,
        says,
        f"the paper's {section}",
        f"Under {mask} a query moves less than under {than} (a quotient below 1, paired by text): from float64 under "
        "the same mask, and between two shifts of the whole row.",
        f"{mask} over {than}",
        "masks",
        cases,
        note=CAUTION if cases else "",
    )
