"""What was found: five sentences with a number each and its interval, the range of the other cases, and all of them.

Every sentence here is a template: which of its words stand, and every number, follow from the records. KL is compared
by the geometric mean of the quotients of the same texts, because a few texts hold most of a mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ropestudy.report.answers import (
    BETTER,
    EAGER,
    FLASH,
    FP8,
    HALF,
    WORSE,
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
from ropestudy.schema import Outcome, OutputDivergence, Results, SignedBias

BF16_ALONE = "paper_bf16_angles64"  # bf16 without what float32 does to angles


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


SITE = "all of RoPE"
MARGIN = 0.05  # of the copies


def _cliff(results: Results) -> StudyFinding | None:
    """How many bits copying needs, at the farthest distance at which float64 copies; and the outputs."""
    asked = [one for one in outcomes(results, "dose", "copy") if one.site == SITE]
    rows = [one for one in asked if copies(one)]
    if not rows:
        return None
    gap = max(one.gap for one in rows)
    rows = sorted((one for one in rows if one.gap == gap), key=lambda one: one.mantissa_bits or 0)
    fewest = _bits_without_loss(rows)
    down = "is excluded at no number of" if fewest is None else f"is excluded down to {fewest}"
    named = [
        f"{one.mantissa_bits} ({FORMAT_OF[bits]}) lose {_lost_in_words(one)}"
        for one in rows
        if (bits := one.mantissa_bits) in FORMAT_OF
    ]
    tried, exact = _copies_right(rows[0]), mean_of(values_of(rows[0].outputs.right_p))
    beyond = [
        f" {one.gap:,} positions before it copies {mean_of(values_of(one.outputs.right_p)).value:.0%}."
        for one in {one.gap: one for one in asked if not copies(one)}.values()
    ]
    return StudyFinding(
        f"Copying a key from {gap:,} positions before needs few bits: a loss of {MARGIN} of the copies {down} mantissa "
        f"bits in all of RoPE; bf16 has 7.",
        f"{', '.join(named)} of {tried:,.0f} copies that float64 gets right, net of what rounding gains; all else is "
        f"float32. Float64 copies {exact} of the keys.{''.join(beyond)}{_crossing(results, gap)}",
        tuple(
            FindingCase(f"copies lost, {one.mantissa_bits} bits in {SITE}", f"key {gap:,} before", _lost_in_words(one))
            for one in rows
        ),
    )


FORMAT_OF = {7: "bf16's", 3: "e4m3's, range not limited", 2: "e5m2's"}


def _bits_without_loss(rows: Sequence[Outcome]) -> int | None:
    """The fewest bits from which on every interval lies below the margin; None where that of the most does not.

    rows: by their bits.
    """
    fewest = None
    for one in reversed(rows):
        if not right_lost(one).high < MARGIN:
            break
        fewest = one.mantissa_bits
    return fewest


def _crossing(results: Results, gap: int) -> str:
    """Between which bits q and k alone make more of the outputs than all of bf16's roundings do."""
    whole = next(
        (one for one in outcomes(results, "setup") if (one.condition, one.start, one.gap) == (EAGER, 0, gap)), None
    )
    doses = [one for one in outcomes(results, "dose") if (one.site, one.gap) == ("q and k", gap)]
    if whole is None or not doses:
        return ""
    most = typical_of(whole.outputs.kl.values)
    less = [one.mantissa_bits or 0 for one in doses if typical_of(one.outputs.kl.values).value < most.value]
    more = [one.mantissa_bits or 0 for one in doses if (one.mantissa_bits or 0) not in less]
    if not less or not more or max(more) > min(less):
        return ""
    return (
        f" By the outputs, q and k alone make what all of bf16's roundings together make there (KL {most}) between "
        f"{max(more)} and {min(less)} bits."
    )


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
    folds: list[tuple[Effect, str, Effect | None]] = []
    for at, here in away_from_0(results):
        if (own := here.get(FLASH)) and f"{FLASH}_fp32_qk" in here:
            after = here[f"{FLASH}_fp32_qk"].outputs
            folds.append(
                (fold_of(after.kl.values, own.outputs.kl.values), where_of(*at, own.tokens), _loss(after, own.outputs))
            )
    if not folds:
        return None
    errors: list[tuple[Effect, str, str]] = []
    for r in scores(results, "remedy"):
        whole = baseline(results, r)
        # With a gap half of the queries see no far key: what they say is of position 0.
        if whole is None or not r.condition.endswith(": fp32 q and k") or r.gap or r.d1 == 0:
            continue
        quotient = quotient_of(r.error["local"].row.values, whole.error["local"].row.values)
        errors.append((quotient, r.base or "", where_of(r.d1, r.gap, r.tokens)))
    fold, where, _ = folds[0]
    less = f" Of attention's own error it leaves {spread([one for one, *_ in errors])}." if errors else ""
    return StudyFinding(
        f"Rotating in float32 and never rounding q and k leaves {fold} of FlashAttention-2's error in the outputs: "
        "most of it is the rest of the network's.",
        f"KL, {where}. It leaves {spread([one for one, *_ in folds])}, {_losses([loss for *_, loss in folds])}.{less}",
        (
            *(FindingCase(f"left of attention's own error, {base}", where, str(one)) for one, base, where in errors),
            *(FindingCase("left of the outputs' KL, flash_bf16", where, str(one)) for one, where, _ in folds),
        ),
    )


def _loss(after: OutputDivergence, before: OutputDivergence) -> Effect | None:
    """The loss of one condition less that of another, on the same texts."""
    return difference_of(after.nll_q.values, before.nll_q.values) if after.nll_q and before.nll_q else None


def _losses(found: Sequence[Effect | None]) -> str:
    """`and the loss changes by -0.002 to 0.003 nats (interval above 0 in 0, below in 1)`."""
    told = [one for one in found if one is not None]
    if not told:
        return "the loss not taken"
    above, below = sum(one.low > 0 for one in told), sum(one.high < 0 for one in told)
    return (
        f"and the loss changes by {between([one.value for one in told])} nats (interval above 0 in {above}, below in "
        f"{below})"
    )


def _angles(results: Results) -> StudyFinding | None:
    """What must never be rounded."""
    told: dict[str, list[tuple[Effect, str, Effect | None]]] = {}
    for at, here in away_from_0(results):
        own = here.get(EAGER)
        for name, words in ((f"{EAGER}_inv_freq", "bf16 inverse frequencies"), (f"{EAGER}_tf32", "TF32 positions")):
            if own and name in here:
                fold = fold_of(here[name].outputs.kl.values, own.outputs.kl.values)
                loss = _loss(here[name].outputs, own.outputs)
                told.setdefault(words, []).append((fold, where_of(*at, own.tokens), loss))
    if not told:
        return None
    heads, parts = [], []
    for words, found in told.items():
        harmful = [one for one in found if one[0].low > WORSE]
        parts.append(
            f"{words}: {spread([fold for fold, *_ in found])}, {_losses([loss for *_, loss in found])}; "
            f"harm in {len(harmful)}"
        )
        if harmful:
            fold, where, _ = max(harmful, key=lambda one: one[0].value)
            heads.append(f"{words} make the outputs' error up to {number(fold.value)} times as large ({where})")
    head = (
        f"What makes angles must stay in float32: {'; '.join(heads)}."
        if heads
        else "Rounding what makes angles is not seen to do harm."
    )
    return StudyFinding(
        head,
        f"KL with over KL without, in transformers' eager bf16. {'. '.join(parts)}."
        f"{_alone(results)}{_float32(results)}",
        tuple(
            FindingCase(f"{words}: times the KL of hf_eager_bf16", where, str(fold))
            for words, found in told.items()
            for fold, where, _ in found
        ),
    )


def _alone(results: Results) -> str:
    """The two casts that cost most, each alone."""
    rows = [one for one in outcomes(results, "site") if (one.start, one.gap) != (0, 0) and not one.gap]
    if not rows:
        return ""
    place = rows[0].start
    worst = sorted(
        (one for one in rows if one.start == place), key=lambda one: -typical_of(one.outputs.kl.values).value
    )
    named = [f"{one.about} {number(typical_of(one.outputs.kl.values).value)}" for one in worst[:2]]
    return f" Of all casts alone the costliest are {' and '.join(named)} nats ({where_of(place, 0, rows[0].tokens)})."


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
    cross = bootstrap(own.shape[1], crossing)
    text = (
        f" float32 angles: the KL grows with {power} of the position (exponent {grows}, {ends[0]:,} to {ends[-1]:,}) "
        f"and equals that of bf16 with exact angles near {cross.value / 1e6:.1f} million positions "
        f"({cross.low / 1e6:.1f} to {cross.high / 1e6:.1f}; near keys)"
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
    above, below = sum(one.low > 0 for one in added), sum(one.high < 0 for one in added)
    fixed = f"bf16's error of the first token's logit is the same in every text ({own} of its mean square)"
    head = (
        f"{fixed}, and alone it raises the loss in {above} of {len(added)} cases."
        if own.low > HALF and added
        else f"{fixed}."
        if own.low > HALF
        else f"bf16's error of the first token's logit has no direction that most texts share: {own} of the mean "
        "square is common to all."
    )
    says = (
        f"{rows[0].condition}, {first_where}; estimated from pairs of different texts, so that noise counts 0. That is "
        "nearly so by construction: the first token is the same in every text, stands at the same position and sees "
        f"itself alone, so that its key is rounded alike; other columns, which hold other tokens, share {others}."
    )
    if parts:
        says += (
            f" What it alone adds to the loss, in nats: {spread(added)}, the interval above 0 in {above}, below in "
            f"{below}; its part of the condition's KL: {spread(parts)}."
        )
    masked = [f"{one.mask} {rms_of(one.first)}" for one in of_kind(results, SignedBias) if one.mask != "full"]
    if masked:
        full = next(
            (one for one in of_kind(results, SignedBias) if one.mask == "full" and not one.start and not one.gap), None
        )
        said = [*([f"full {rms_of(full.first)}"] if full else []), *masked]
        says += f" Its size at position 0, in logits, by mask: {', '.join(said)}."
    return StudyFinding(head, says, tuple(cases))


def _fp8(results: Results) -> StudyFinding | None:
    """fp8 against bf16, and after against before the rotation."""
    more: list[tuple[Effect, str, Effect | None]] = []
    orders: list[tuple[Effect, str, Effect | None, bool]] = []
    for at, here in away_from_0(results):
        if {FP8, f"{FP8}_before", FLASH} <= here.keys():
            after, before, bf16 = (here[name].outputs for name in (FP8, f"{FP8}_before", FLASH))
            where = where_of(*at, here[FP8].tokens)
            more.append((fold_of(after.kl.values, bf16.kl.values), where, _loss(after, bf16)))
            orders.append((fold_of(before.kl.values, after.kl.values), where, _loss(before, after), bool(at[1])))
    if not more:
        return None
    worst, where, _ = max(more, key=lambda one: one[0].value)
    sides = []
    for side, far in (("near", False), ("far", True)):
        own = [one for one in orders if one[3] is far]
        if own:
            helps = sum(fold.high < BETTER for fold, *_ in own)
            sides.append(
                f"{side} {spread([fold for fold, *_ in own])}, helping in {helps}, {_losses([one[2] for one in own])}"
            )
    return StudyFinding(
        f"fp8 makes up to {worst} times the error of bf16 in the outputs ({where}).",
        "q, k and v in e4m3 with a scale a head, P in e4m3. Its KL over bf16's is "
        f"{spread([one for one, *_ in more])}, {_losses([loss for *_, loss in more])}. "
        f"Rounding before RoPE leaves of that {'; '.join(sides)}.",
        tuple(
            FindingCase(what, where, str(effect))
            for what, told in (("fp8: times the KL of bf16", more), ("rounding before RoPE: left of fp8's KL", orders))
            for effect, where, *_ in told
        ),
    )
