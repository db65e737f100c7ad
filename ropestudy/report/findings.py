"""What was found: five sentences with a number each and its interval, the range of the other cases, and all of them.

Every sentence here is a template: which of its words stand, and every number, follow from the records. KL is compared
by the geometric mean of the quotients of the same texts, because a few texts hold most of a mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ropestudy.report.answers import (
    BETTER,
    HALF,
    advise,
    away_from_0,
    copies,
    outcomes,
    right_lost,
    values_of,
    where_of,
)
from ropestudy.report.effects import (
    Effect,
    bootstrap,
    common_share,
    difference_of,
    fold_of,
    mean_of,
    quotient_of,
    rms_of,
    slope,
    typical_of,
)
from ropestudy.report.select import baseline, between, number, of_kind, scores
from ropestudy.schema import Outcome, Results, SignedBias

BF16_ALONE = "paper_bf16_angles64"  # bf16 without what float32 does to angles
FORMATS = "bf16 has 7 mantissa bits, fp16 and TF32 10, e4m3 3, e5m2 2"


@dataclass(frozen=True)
class FindingCase:
    """One number of a finding."""

    what: str
    where: str
    found: str  # with its interval


@dataclass(frozen=True)
class StudyFinding:
    """A sentence with its number, what it rests on in a few more, and every case that was measured."""

    head: str
    says: str
    cases: tuple[FindingCase, ...]


def findings(results: Results) -> list[StudyFinding]:
    """Return what was found, most useful first: as many as the study has records for."""
    asked: tuple[Callable[[Results], StudyFinding | None], ...] = (_cliff, _rope_in_bf16, _angles, _bias, _fp8)
    return [found for ask in asked if (found := ask(results)) is not None]


CASE_HEADS = ("finding", "number", "where", "found")


def case_rows(results: Results) -> list[list[str]]:
    """Return every case of every finding, a line each."""
    told = enumerate(findings(results), start=1)
    return [[str(place), case.what, case.where, case.found] for place, one in told for case in one.cases]


def spread(effects: Sequence[Effect]) -> str:
    """`0.621 to 1.05 in 21 cases (intervals from 0.41 to 2.56)`."""
    if len(effects) == 1:
        return str(effects[0])
    ends = between([end for one in effects for end in (one.low, one.high)])
    return f"{between([one.value for one in effects])} in {len(effects)} cases (intervals from {ends})"


def _cliff(results: Results) -> StudyFinding | None:
    """How many bits copying needs, at the farthest distance at which float64 copies."""
    rows = [one for one in outcomes(results, "dose", "copy") if one.site == "q and k" and copies(one)]
    if not rows:
        return None
    gap = max(one.gap for one in rows)
    rows = sorted((one for one in rows if one.gap == gap), key=lambda one: one.mantissa_bits or 0)
    by_bits = {one.mantissa_bits: one for one in rows}
    named = [
        f"{bits} ({whose}) lose {_lost_in_words(by_bits[bits])}"
        for bits, whose in ((7, "bf16's"), (3, "e4m3's, range not limited"))
        if bits in by_bits
    ]
    unseen = _bits_without_loss(rows)
    loses = "at every number of" if unseen is None else f"nothing that can be seen down to {unseen}"
    tried, exact = _copies_right(rows[0]), mean_of(values_of(rows[0].outputs.right_p))
    failing = sorted({one.gap for one in outcomes(results, "dose", "copy") if not copies(one)})
    beyond = f" At {' and '.join(f'{g:,}' for g in failing)} float64 itself copies less than half." if failing else ""
    return StudyFinding(
        f"Copying a key from {gap:,} positions before loses {loses} mantissa bits of q and k"
        f"{': ' if named else ''}{', '.join(named)}.",
        f"Parts of {tried:,.0f} copies that float64 gets right, net of what rounding gains (below 0 it gains more); "
        "q and k are rounded after the rotation, all else is float32. "
        f"Float64 copies {exact} of the keys.{beyond} {FORMATS}.",
        tuple(
            FindingCase(f"copies lost, {one.mantissa_bits} bits", f"key {gap:,} before", _lost_in_words(one))
            for one in rows
        ),
    )


def _bits_without_loss(rows: Sequence[Outcome]) -> int | None:
    """The fewest bits from which on no interval lies above 0; None where that of the most does. rows: by their bits."""
    fewest = None
    for one in reversed(rows):
        if right_lost(one).low > 0:
            break
        fewest = one.mantissa_bits
    return fewest


def _lost_in_words(one: Outcome) -> str:
    """An interval over texts; where none lost a copy, what the number of copies leaves open (the rule of three)."""
    effect = right_lost(one)
    if effect.low != 0 or effect.high != 0:
        return str(effect)
    tried = _copies_right(one)
    return f"0 (of {tried:,.0f}: below {number(3 / tried)} if copies were independent)"


def _copies_right(one: Outcome) -> float:
    """How many tokens float64 copies."""
    # `text.copy_row`: half a row but for the token that opens it and the first of the key.
    return one.sequences * (one.tokens // 2 - 2) * mean_of(values_of(one.outputs.right_p)).value


def _rope_in_bf16(results: Results) -> StudyFinding | None:
    """What the rotation's own roundings are worth, away from position 0."""
    of_error, of_kl = "left of attention's own error", "left of the outputs' KL"
    errors: list[tuple[Effect, str, str]] = []
    folds: list[tuple[Effect, str, str]] = []
    for r in scores(results, "remedy"):
        whole = baseline(results, r)
        if whole is None or not r.condition.endswith(": fp32 q and k") or (r.d1, r.gap) == (0, 0):
            continue
        where = where_of(r.d1, r.gap, r.tokens)
        errors.append((quotient_of(r.error["local"].row.values, whole.error["local"].row.values), r.base or "", where))
        folds.append((fold_of(r.kl_error.kl.values, whole.kl_error.kl.values), r.base or "", where))
    for at, here in away_from_0(results):
        if (own := here.get("flash_bf16")) and "flash_bf16_fp32_qk" in here:
            fold = fold_of(here["flash_bf16_fp32_qk"].outputs.kl.values, own.outputs.kl.values)
            folds.append((fold, "flash_bf16", where_of(*at, own.tokens)))
    if not folds:
        return None
    first, base, where = folds[0]
    less = f" Of attention's own error they leave {spread([one for one, *_ in errors])}." if errors else ""
    return StudyFinding(
        f"Rotation, q and k in float32 leave {first} of the outputs' distance from float64: what the rest of the "
        "network rounds remains.",
        f"KL, {base}, {where}. They leave {spread([one for one, *_ in folds])}.{less}",
        tuple(
            FindingCase(f"{what}, {base}", where, str(effect))
            for what, told in ((of_error, errors), (of_kl, folds))
            for effect, base, where in told
        ),
    )


def _angles(results: Results) -> StudyFinding | None:
    """What must never be rounded."""
    told: dict[str, list[tuple[Effect, str]]] = {}
    for at, here in away_from_0(results):
        own = here.get("hf_eager_bf16")
        for name, words in (("hf_eager_bf16_inv_freq", "bf16 inverse frequencies"), ("hf_eager_bf16_tf32", "TF32")):
            if own and name in here:
                fold = fold_of(here[name].outputs.kl.values, own.outputs.kl.values)
                told.setdefault(words, []).append((fold, where_of(*at, own.tokens)))
    if not told:
        return None
    heads, parts = [], []
    for words, found in told.items():
        harmful = [one for one in found if advise(one[0]) in ("do not", "never")]
        parts.append(f"{words}: {spread([fold for fold, _ in found])}, of which {len(harmful)} do harm")
        if harmful:
            fold, where = max(harmful, key=lambda one: one[0].value)
            heads.append(f"with {words} the outputs' KL is up to {fold} times as large ({where})")
    head = (
        f"What makes angles must not be rounded: {', '.join(heads)}."
        if heads
        else "Rounding what makes angles is not seen to do harm."
    )
    return StudyFinding(
        head,
        f"KL with over KL without, in transformers' eager bf16. {'; '.join(parts)}.{_float32(results)}",
        tuple(
            FindingCase(f"{words}: times the KL of hf_eager_bf16", where, str(fold))
            for words, found in told.items()
            for fold, where in found
        ),
    )


def _float32(results: Results) -> str:
    """Where float32's own angles reach bf16's KL: by the slope up to there, and measured where the study went."""
    found = [
        (at[0] + here["fp32"].tokens, here["fp32"].outputs.kl.values, here[BF16_ALONE].outputs.kl.values)
        for at, here in away_from_0(results)
        if not at[1] and {"fp32", BF16_ALONE} <= here.keys()
    ]
    found.sort()
    below = [one for one in found if typical_of(one[1]).value < typical_of(one[2]).value]
    if len(below) < 2:
        return ""
    ends = [end for end, *_ in below]
    # A line through the logarithms of each text's KL, and where it meets that text's KL in bf16 at the last of them.
    own, half = (np.log(np.array([one[side] for one in below])) for side in (1, 2))

    def crossing(chosen: np.ndarray) -> np.ndarray:
        exponent = slope(ends, np.exp(own[:, chosen].mean(-1)))
        return ends[-1] * np.exp((half[-1][chosen].mean(-1) - own[-1][chosen].mean(-1)) / exponent)

    grows = bootstrap(own.shape[1], lambda chosen: slope(ends, np.exp(own[:, chosen].mean(-1))))
    power = "about the square" if round(grows.value) == 2 else "a power"
    text = (
        f" float32 angles: the KL grows with {power} of the position (exponent {grows}, {ends[0]:,} to {ends[-1]:,}) "
        f"and equals that of bf16 with exact angles near {bootstrap(own.shape[1], crossing)} positions"
    )
    for end, values, bf16 in found:
        if end not in ends:
            text += f"; measured at {end:,} it is {fold_of(values, bf16)} times that"
    return f"{text}."


def _bias(results: Results) -> StudyFinding | None:
    """The signed error of the first column."""
    rows = [one for one in of_kind(results, SignedBias) if (one.start, one.gap) != (0, 0)]
    if not rows:
        return None
    own, others = common_share(rows[0].first), common_share(rows[0].others)
    first_where = where_of(rows[0].start, rows[0].gap, rows[0].tokens)
    cases, added, parts = [], [], []
    for one in rows:
        where = where_of(one.start, one.gap, one.tokens)
        of = f"{one.condition}, {one.mask}"
        cases.append(FindingCase(f"common to all texts, {of}", where, str(common_share(one.first))))
        cases.append(FindingCase(f"its size in logits, {of}", where, str(rms_of(one.first))))
        if one.alone and one.whole and one.alone.nll_p and one.alone.nll_q:
            added.append(difference_of(one.alone.nll_q.values, one.alone.nll_p.values))
            parts.append(fold_of(one.alone.kl.values, one.whole.kl.values))
            cases.append(FindingCase(f"loss that it adds alone, nats, {of}", where, str(added[-1])))
            cases.append(FindingCase(f"its part of the condition's KL, {of}", where, str(parts[-1])))
    head = (
        f"bf16 errs on the first token's logit in a direction that texts share: {own} of the mean square is common to "
        f"all, of other tokens' {others}."
        if own.low > HALF
        else f"bf16's error of the first token's logit has no direction that most texts share: {own} of the mean "
        "square is common to all."
    )
    says = f"{rows[0].condition}, {first_where}; by products of different texts, so that noise has 0."
    if parts:
        above, below = sum(one.low > 0 for one in added), sum(one.high < 0 for one in added)
        says += (
            f" Alone it adds to the loss, in nats, {spread(added)}; the interval lies above 0 in {above}, below it in "
            f"{below}. It makes {spread(parts)} of the condition's KL."
        )
    return StudyFinding(head, says, tuple(cases))


def _fp8(results: Results) -> StudyFinding | None:
    """fp8 against bf16, and after against before the rotation."""
    more: list[tuple[Effect, str]] = []
    orders: list[tuple[Effect, str]] = []
    for at, here in away_from_0(results):
        if {"fa3_fp8", "fa3_fp8_before", "flash_bf16"} <= here.keys():
            after, before, bf16 = (here[name].outputs.kl.values for name in ("fa3_fp8", "fa3_fp8_before", "flash_bf16"))
            where = where_of(*at, here["fa3_fp8"].tokens)
            more.append((fold_of(after, bf16), where))
            orders.append((fold_of(before, after), where))
    if not more:
        return None
    worst, where = max(more, key=lambda one: one[0].value)
    helps = sum(effect.high < BETTER for effect, _ in orders)
    return StudyFinding(
        f"fp8 has up to {worst} times the KL of bf16 ({where}).",
        f"q, k and v in e4m3 with a scale a head, P in e4m3. It has {spread([effect for effect, _ in more])}. Rounding "
        f"before RoPE leaves {spread([effect for effect, _ in orders])} of that: it helps in {helps} of {len(orders)}.",
        tuple(
            FindingCase(what, where, str(effect))
            for what, told in (("fp8: times the KL of bf16", more), ("rounding before RoPE: left of fp8's KL", orders))
            for effect, where in told
        ),
    )
