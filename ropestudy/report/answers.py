"""What to do, wherever the study looked: the top of docs/precision.md; and tables of outcomes. KL is compared
by the geometric mean of the quotients of the same texts, because a few texts hold most of a mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
    rms_of,
    typical_of,
)
from ropestudy.report.select import number, of_kind
from ropestudy.schema import Outcome, Results, SignedBias, Stat

BETTER, WORSE = 0.8, 1.25  # a fifth: what is closer to 1 makes no difference worth a change
MUCH = 2.0
HALF = 0.5


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
            Change("let inv_freq become bf16", "hf_eager_bf16_inv_freq", "none: model.to(bfloat16) does it"),
            Change("let TF32 multiply positions", "hf_eager_bf16_tf32", "none: a flag of torch allows it"),
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
    """Say whether a change should be made that leaves so many times the KL. An interval that spans a margin settles
    nothing there: `no harm` leaves open whether it helps, `no help` whether it harms.
    """
    if effect.high < BETTER:
        return "do"
    if effect.low > WORSE:
        return "never" if effect.low > MUCH else "do not"
    if effect.within(BETTER, WORSE):
        return "no matter"
    return "no harm" if effect.high <= WORSE else "no help" if effect.low >= BETTER else "not settled"


def actions(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the whole table from setup to action: each change of each setup, and wherever it was
    measured away from position 0 what to do and how many times the KL it leaves.
    """
    away = away_from_0(results)
    places = [where_of(*at, next(iter(here.values())).tokens) for at, here in away]

    def cells(setup: KernelSetup, change: Change) -> list[str]:
        left = [_left_by(setup, change, here) for _, here in away]
        return ["" if fold is None else f"**{advise(fold)}** {fold}" for fold in left]

    return _from_setup_to_action(places, cells)


def brief_actions(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the same by how long a row is, for the lengths of which both were measured: its last tokens, whose keys
    are near, and its ends, whose keys are as far away as they can be. Where a study has no such length, all of it.
    """
    away = away_from_0(results)
    by_length: dict[int, list[tuple[str, dict[str, Outcome]]]] = {}
    for (start, gap), here in away:
        length = start + gap + next(iter(here.values())).tokens
        by_length.setdefault(length, []).append(("far" if gap else "near", here))
    whole = {length: cases for length, cases in sorted(by_length.items()) if len(cases) == 2}
    if not whole:
        return actions(results)

    def cells(setup: KernelSetup, change: Change) -> list[str]:
        return [_near_and_far(setup, change, cases) for cases in whole.values()]

    return _from_setup_to_action([f"{length:,} positions" for length in whole], cells)


def _near_and_far(setup: KernelSetup, change: Change, cases: Sequence[tuple[str, dict[str, Outcome]]]) -> str:
    """`near **never** 626`, and below it what is far."""
    left = [(side, fold) for side, here in sorted(cases, reverse=True) if (fold := _left_by(setup, change, here))]
    return "<br>".join(f"{side} **{advise(fold)}** {fold}" for side, fold in left)


def _left_by(setup: KernelSetup, change: Change, here: Mapping[str, Outcome]) -> Effect | None:
    """How many times the KL a change leaves in a setting; None where one of both was not measured."""
    if setup.condition not in here or change.condition not in here:
        return None
    after, before = (here[name].outputs.kl.values for name in (change.condition, setup.condition))
    return fold_of(after, before)


def _from_setup_to_action(
    places: Sequence[str], cells: Callable[[KernelSetup, Change], list[str]]
) -> tuple[list[str], list[list[str]]]:
    made = [(setup, change, cells(setup, change)) for setup in SETUPS for change in setup.changes]
    rows = [[setup.words, change.words, *told, change.cost] for setup, change, told in made if any(told)]
    return ["setup", "change", *places, "cost"], rows


def away_from_0(results: Results) -> list[tuple[tuple[int, int], dict[str, Outcome]]]:
    """Return the setups in plain text by setting, wherever that is not position 0."""
    records = outcomes(results, "setup")
    return [(at, in_setting(records, at)) for at in settings(records) if at != (0, 0)]


def copies(one: Outcome) -> bool:
    """Return whether float64 copies most of the keys: where it does not, rounding has nothing to take off."""
    return one.outputs.right_p is not None and mean_of(one.outputs.right_p.values).low > HALF


def right_lost(one: Outcome) -> Effect:
    """Net, as a part of what float64 copies; NaN where it copies nothing."""
    before, after = (np.asarray(values_of(stat)) for stat in (one.outputs.right_p, one.outputs.right_q))
    if not before.any():
        return known(math.nan)

    def lost(chosen: np.ndarray) -> np.ndarray:
        right = before[chosen].mean(1)
        return np.where(right > 0, (before - after)[chosen].mean(1) / np.where(right > 0, right, 1.0), np.nan)

    return bootstrap(len(before), lost)


def values_of(stat: Stat | None) -> list[float]:
    """Return each text's own; none where nothing was taken."""
    return stat.values if stat else []


def small_table(results: Results, group: str, task: str) -> list[list[str]]:
    """Return one line for each condition and setting of a group: KL, loss added, and how often the argmax differs or
    the copy fails.
    """
    records, rows = outcomes(results, group, task), []
    for at in settings(records):
        for one in in_setting(records, at).values():
            loss, kl = loss_added(one), one.outputs.kl
            copied = [str(mean_of(values_of(one.outputs.right_p))), str(right_lost(one))] if one.outputs.right_p else []
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
