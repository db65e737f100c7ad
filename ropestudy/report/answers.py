"""What to do, and what was found, each with one number and its interval: the top of docs/precision.md.

Every sentence here is a template: which of its words stand, and every number, follow from the records. KL is compared
by the geometric mean of the quotients of the same texts, because a few texts hold most of a mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ropestudy.report.effects import (
    Effect,
    bootstrap,
    common_share,
    difference_of,
    fold_of,
    known,
    mean_of,
    quotient_of,
    rms_of,
    slope,
    typical_of,
)
from ropestudy.report.select import baseline, between, number, of_kind, scores
from ropestudy.schema import Outcome, Results, SignedBias, Stat

BETTER, WORSE = 0.8, 1.25  # a fifth: what is closer to 1 makes no difference worth a change
MUCH = 2.0
ITEM = "\n   - "  # of a list inside a finding
HALF = 0.5
BF16_ALONE = "paper_bf16_angles64"  # bf16 without what float32 does to angles


@dataclass(frozen=True)
class Change:
    """What somebody may do to a setup: another condition, in words, and what it costs."""

    words: str
    condition: str
    cost: str


@dataclass(frozen=True)
class KernelSetup:
    """A way to compute attention, and what may be changed in it."""

    words: str
    condition: str
    changes: tuple[Change, ...]


SETUPS = (
    KernelSetup(
        "transformers, eager, bf16",
        "hf_eager_bf16",
        (
            Change("FlashAttention-2 instead", "flash_bf16", "none"),
            Change("let inv_freq become bf16", "hf_eager_bf16_inv_freq", "none"),
            Change("let TF32 multiply positions", "hf_eager_bf16_tf32", "none"),
        ),
    ),
    KernelSetup(
        "FlashAttention-2, bf16 (FlashAttention-3 in bf16 rounds alike)",
        "flash_bf16",
        (
            Change("rotate in float32, round once", "paper_bf16", "a fused rotary kernel"),
            Change("the same with float64 angles", "paper_bf16_angles64", "a table made once"),
            Change("keep q and k in float32", "flash_bf16_fp32_qk", "no kernel takes them; twice the bytes"),
        ),
    ),
    KernelSetup(
        "FlashAttention-3, fp8",
        "fa3_fp8",
        (
            Change("stay in bf16", "flash_bf16", "half the speed of the products"),
            Change("round before RoPE", "fa3_fp8_before", "a kernel that rotates what it reads; q k in bf16"),
        ),
    ),
)


def where_of(start: int, gap: int, tokens: int) -> str:
    """`64 tokens ending at 8,192`, `keys 8,128 farther away`: where a row of a setting stands."""
    if gap:
        return f"keys {gap:,} farther away"
    return f"{tokens:,} tokens ending at {start + tokens:,}"


def outcomes(results: Results, group: str, task: str = "text") -> list[Outcome]:
    """Return the outcomes of a group and a task."""
    return [one for one in of_kind(results, Outcome) if (one.group, one.task) == (group, task)]


def settings(records: Sequence[Outcome]) -> list[tuple[int, int]]:
    """Return (start, gap) of all of them, gaps behind, and positions from 0 last, where a rotation is almost the
    identity.
    """
    found = list(dict.fromkeys((one.start, one.gap) for one in records))
    return sorted(found, key=lambda at: (at == (0, 0), at[1] > 0, at[0] + at[1]))


def in_setting(records: Sequence[Outcome], at: tuple[int, int]) -> dict[str, Outcome]:
    """Return the outcomes of a setting by their conditions."""
    return {one.condition: one for one in records if (one.start, one.gap) == at}


def loss_added(one: Outcome) -> Effect | None:
    """Return the condition's loss less float64's, nats a token; None where no loss was taken."""
    p, q = one.outputs.nll_p, one.outputs.nll_q
    return difference_of(q.values, p.values) if p and q else None


def advise(effect: Effect) -> str:
    """Say whether a change should be made that leaves so many times the KL."""
    if effect.high < BETTER:
        return "do"
    if effect.low > WORSE:
        return "never" if effect.low > MUCH else "do not"
    return "no matter" if effect.within(BETTER, WORSE) else "not settled"


def actions(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table from setup to action: each change of each setup, and wherever it was measured
    away from position 0 what to do and how many times the KL it leaves.
    """
    away = _away(results)
    rows = []
    for setup in SETUPS:
        for change in setup.changes:
            cells = []
            for _, here in away:
                if setup.condition in here and change.condition in here:
                    after, before = (here[name].outputs.kl.values for name in (change.condition, setup.condition))
                    left = fold_of(after, before)
                    cells.append(f"**{advise(left)}** {left}")
                else:
                    cells.append("")
            if any(cells):
                rows.append([setup.words, change.words, *cells, change.cost])
    places = [where_of(*at, next(iter(here.values())).tokens) for at, here in away]
    return ["setup", "change", *places, "cost"], rows


def findings(results: Results) -> list[str]:
    """Return what was found, most useful first: as many as the study has records for."""
    asked: tuple[Callable[[Results], str], ...] = (_cliff, _rope_in_bf16, _angles, _bias, _fp8)
    return [found for found in (ask(results) for ask in asked) if found]


def _cliff(results: Results) -> str:
    """How many bits copying needs, at the farthest distance at which float64 copies."""
    rows = [one for one in outcomes(results, "dose", "copy") if one.site == "q and k" and copies(one)]
    if not rows:
        return ""
    gap = max(one.gap for one in rows)
    rows = sorted((one for one in rows if one.gap == gap), key=lambda one: one.mantissa_bits or 0)
    lost = {one.mantissa_bits: _copies_lost(one) for one in rows}
    tried, exact = _copies_right(rows[0]), mean_of(_values(rows[0].outputs.right_p))
    parts = [f"{one.mantissa_bits} bits {_lost_in_words(one)}" for one in rows]
    heads = [
        f"{bits} mantissa bits of q and k ({whose}) lost a net {lost[bits]:,.0f} of {tried:,.0f}"
        for bits, whose in ((7, "bf16's"), (3, "e4m3's, range not limited"))
        if bits in lost
    ]
    head = f"At {gap:,} positions, {', '.join(heads)} copies" if heads else "How many bits copying needs"
    failing = sorted({one.gap for one in outcomes(results, "dose", "copy") if not copies(one)})
    beyond = f" (At {' and '.join(f'{g:,}' for g in failing)} float64 itself copies less than half.)" if failing else ""
    return (
        f"**{head}.** With q and k rounded after the rotation and all else in float32, a key {gap:,} positions "
        f"before is copied in {exact} of cases in float64; of these rounding takes off, net of what it gains: "
        f"{'; '.join(parts)} (bf16 has 7, fp16 and TF32 10, e4m3 3, e5m2 2).{beyond}"
    )


def _lost_in_words(one: Outcome) -> str:
    """An interval over texts; where none lost a copy, what the number of copies leaves open (the rule of three)."""
    effect = _right_lost(one)
    if effect.low != 0 or effect.high != 0:
        return str(effect)
    tried = _copies_right(one)
    return f"0 (of {tried:,.0f}: below {number(3 / tried)} if copies were independent)"


def _copies_right(one: Outcome) -> float:
    """How many tokens float64 copies."""
    # `text.copy_row`: half a row but for the token that opens it and the first of the key.
    return one.sequences * (one.tokens // 2 - 2) * mean_of(_values(one.outputs.right_p)).value


def _copies_lost(one: Outcome) -> float:
    """How many fewer are copied after rounding."""
    return _copies_right(one) * _right_lost(one).value


def copies(one: Outcome) -> bool:
    """Return whether float64 copies most of the keys: where it does not, rounding has nothing to take off."""
    return one.outputs.right_p is not None and mean_of(one.outputs.right_p.values).low > HALF


def _right_lost(one: Outcome) -> Effect:
    """Net, as a part of what float64 copies; NaN where it copies nothing."""
    before, after = (np.asarray(_values(stat)) for stat in (one.outputs.right_p, one.outputs.right_q))
    if not before.any():
        return known(math.nan)

    def lost(chosen: np.ndarray) -> np.ndarray:
        right = before[chosen].mean(1)
        return np.where(right > 0, (before - after)[chosen].mean(1) / np.where(right > 0, right, 1.0), np.nan)

    return bootstrap(len(before), lost)


def _values(stat: Stat | None) -> list[float]:
    return stat.values if stat else []


def _rope_in_bf16(results: Results) -> str:
    """What the rotation's own roundings are worth, away from position 0."""
    told = []
    for r in scores(results, "remedy"):
        whole = baseline(results, r)
        if whole is None or not r.condition.endswith(": fp32 q and k") or (r.d1, r.gap) == (0, 0):
            continue
        error = quotient_of(r.error["local"].row.values, whole.error["local"].row.values)
        kl = fold_of(r.kl_error.kl.values, whole.kl_error.kl.values)
        told.append((f"{r.base}, {where_of(r.d1, r.gap, r.tokens)}", error, kl))
    outputs = [
        (fold_of(here["flash_bf16_fp32_qk"].outputs.kl.values, own.outputs.kl.values), where_of(*at, own.tokens))
        for at, here in _away(results)
        if (own := here.get("flash_bf16")) and "flash_bf16_fp32_qk" in here
    ]
    if not told and not outputs:
        return ""
    parts = [f"{error} of attention's own error and {kl} of the outputs' KL ({name})" for name, error, kl in told]
    parts += [f"{fold} of the outputs' KL (flash_bf16, {where})" for fold, where in outputs]
    rest = "".join(f"{ITEM}{part}" for part in parts[1:])
    return (
        f"**Rotation, q and k in float32 leave {parts[0]}: what the rest of the network rounds remains.**"
        f"{' They leave elsewhere:' if rest else ''}{rest}"
    )


def _angles(results: Results) -> str:
    """What must never be rounded."""
    told: dict[str, list[tuple[Effect, str]]] = {}
    for at, here in _away(results):
        own = here.get("hf_eager_bf16")
        for name, words in (("hf_eager_bf16_inv_freq", "bf16 inverse frequencies"), ("hf_eager_bf16_tf32", "TF32")):
            if own and name in here:
                fold = fold_of(here[name].outputs.kl.values, own.outputs.kl.values)
                told.setdefault(words, []).append((fold, where_of(*at, own.tokens)))
    if not told:
        return ""
    parts, heads = [], []
    for words, found in told.items():
        harmful = [one for one in found if advise(one[0]) in ("do not", "never")]
        if harmful:
            fold, where = max(harmful, key=lambda one: one[0].value)
            heads.append(f"{words} the KL is {fold} times as large ({where})")
        parts.append(f"{words}: " + "; ".join(f"{fold} ({where})" for fold, where in found))
    said = (
        f"What makes angles must not be rounded: in transformers' eager bf16, with {', with '.join(heads)}"
        if heads
        else "Rounding what makes angles is not seen to do harm"
    )
    return f"**{said}.** KL with over KL without. {'. '.join(parts)}.{_float32(results)}"


def _float32(results: Results) -> str:
    """Where float32's own angles reach bf16's KL: by the slope up to there, and measured where the study went."""
    found = [
        (at[0] + here["fp32"].tokens, here["fp32"].outputs.kl.values, here[BF16_ALONE].outputs.kl.values)
        for at, here in _away(results)
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


def _bias(results: Results) -> str:
    """The signed error of the first column."""
    rows = [one for one in of_kind(results, SignedBias) if (one.start, one.gap) != (0, 0)]
    if not rows:
        return ""
    first = rows[0]
    own, others = common_share(first.first), common_share(first.others)
    told, parts, changed = [], [], []
    for one in rows:
        line = f"{one.condition}, {where_of(one.start, one.gap, one.tokens)}: {common_share(one.first)} of it common"
        line += f", {rms_of(one.first)} logits"
        if one.alone and one.whole and one.alone.nll_p and one.alone.nll_q:
            added = difference_of(one.alone.nll_q.values, one.alone.nll_p.values)
            part = fold_of(one.alone.kl.values, one.whole.kl.values)
            parts.append(100 * part.value)
            if added.low > 0 or added.high < 0:
                changed.append(f"{added} nats ({one.condition}, {where_of(one.start, one.gap, one.tokens)})")
            line += f"; alone it adds {added} nats to the loss and makes {part} of the condition's KL"
        told.append(line)
    shares = f"{100 * own.value:.0f} % of the squared error; other tokens {100 * others.value:.0f} %"
    head = (
        f"bf16 errs on the first token's logit in the same direction in every text ({shares})."
        if own.low > HALF
        else f"bf16's error of the first token's logit has no direction that most texts share ({shares})."
    )
    if parts:
        loss = f"Alone it adds to the loss {'; '.join(changed)}" if changed else "No effect on the loss was seen"
        head += f" {loss}, and it makes {between(parts)} % of the KL."
    return (
        f"**{head}** The share of the mean square that all texts have in common (products of different texts; 0 is "
        f"noise) is {own}, of other tokens' {others}. {'. '.join(told)}."
    )


def _fp8(results: Results) -> str:
    """fp8 against bf16, and after against before the rotation."""
    told, orders = [], []
    for at, here in _away(results):
        if {"fa3_fp8", "fa3_fp8_before", "flash_bf16"} <= here.keys():
            after, before, bf16 = (here[name] for name in ("fa3_fp8", "fa3_fp8_before", "flash_bf16"))
            more, less = (
                fold_of(x.outputs.kl.values, y.outputs.kl.values) for x, y in ((after, bf16), (before, after))
            )
            orders.append((less, where_of(*at, after.tokens)))
            told.append((more, f"{where_of(*at, after.tokens)}: {more} and {less}"))
    if not told:
        return ""
    worst, best = max((one for one, _ in told), key=lambda e: e.value), min(orders, key=lambda one: one[0].value)
    helps = (
        f"Rounding before RoPE leaves {best[0]} of that ({best[1]})"
        if best[0].high < BETTER
        else "Rounding before RoPE is not seen to help"
    )
    unsettled = [where for less, where in orders if advise(less) == "not settled"]
    rest = f"; it is not settled for {' and '.join(unsettled)}" if unsettled and best[0].high < BETTER else ""
    return (
        f"**fp8 has up to {worst} times the KL of bf16. {helps}{rest}.** q, k and v in e4m3 with a scale a head, P in "
        f"e4m3. KL over that of bf16, and before RoPE over after: {'; '.join(line for _, line in told)}."
    )


def _away(results: Results) -> list[tuple[tuple[int, int], dict[str, Outcome]]]:
    """Return the setups in plain text by setting, wherever that is not position 0."""
    records = outcomes(results, "setup")
    return [(at, in_setting(records, at)) for at in settings(records) if at != (0, 0)]


def small_table(results: Results, group: str, task: str) -> list[list[str]]:
    """Return one line for each condition and setting of a group: KL, loss added, and how often the argmax differs or
    the copy fails.
    """
    records, rows = outcomes(results, group, task), []
    for at in settings(records):
        for one in in_setting(records, at).values():
            loss, kl = loss_added(one), one.outputs.kl
            copied = [str(mean_of(_values(one.outputs.right_p))), str(_right_lost(one))] if one.outputs.right_p else []
            differs = mean_of(one.outputs.argmax_differs.values)
            rows.append(
                [
                    one.condition, where_of(*at, one.tokens), str(typical_of(kl.values)), number(kl.mean),
                    str(loss) if loss else "", str(differs), *(copied if task == "copy" else []),
                ]
            )  # fmt: skip
    return rows


OUTCOME_HEADS = (
    *("condition", "where", "KL from float64, geometric mean", "KL, mean", "loss added, nats", "argmax differs"),
)
COPY_HEADS = ("copied in float64", "part of these lost, net")


def bias_rows(results: Results) -> list[list[str]]:
    """Return one line for each case of the signed error."""
    rows = []
    for one in of_kind(results, SignedBias):
        alone = one.alone.kl if one.alone else None
        added = (
            difference_of(one.alone.nll_q.values, one.alone.nll_p.values)
            if one.alone and one.alone.nll_p and one.alone.nll_q
            else None
        )
        rows.append(
            [
                f"{one.condition}, {one.mask}", where_of(one.start, one.gap, one.tokens),
                str(common_share(one.first)), str(common_share(one.others)), str(rms_of(one.first)),
                str(mean_of(one.first_abs.values)), str(mean_of(one.first_mass.values)),
                str(typical_of(alone.values)) if alone else "", str(added) if added else "",
            ]
        )  # fmt: skip
    return rows


BIAS_HEADS = (
    *("condition and mask", "where", "common to all texts, first column", "other columns"),
    *("signed error, RMS over heads, logits", "mean of |error|, logits", "attention it receives"),
    *("KL of the bias alone, nats", "loss of the bias alone, nats"),
)
