"""What to do, wherever the study looked: the top of docs/precision.md; and tables of outcomes. KL is compared
by the geometric mean of the quotients of the same texts, because a few texts hold most of a mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ropestudy.report.effects import (
    LEVEL,
    Effect,
    bootstrap,
    common_share,
    difference_of,
    fold_of,
    known,
    mean_of,
    rms_of,
    student,
    typical_of,
)
from ropestudy.report.select import number, of_kind
from ropestudy.schema import Outcome, Results, SignedBias, Stat

BETTER, WORSE = 0.8, 1.25  # a fifth: what is closer to 1 makes no difference worth an action
HALF = 0.5
SETTLED = ("do", "do not", "no matter")
EAGER, FLASH, FP8 = "hf_eager_bf16", "flash_bf16", "fa3_fp8"


@dataclass(frozen=True)
class SetupAction:
    """What somebody may do: from one condition to another, in words, and what it costs."""

    words: str
    before: str
    after: str
    cost: str


@dataclass(frozen=True)
class KernelSetup:
    """A way to compute attention, and what may be done about it."""

    words: str
    actions: tuple[SetupAction, ...]


SETUPS = (
    KernelSetup(
        "transformers, eager, bf16",
        (
            SetupAction("take FlashAttention-2", EAGER, FLASH, "its package, and a GPU"),
            SetupAction("keep inv_freq in float32", f"{EAGER}_inv_freq", EAGER, "load with dtype=, not model.to()"),
            SetupAction("keep positions out of TF32", f"{EAGER}_tf32", EAGER, "no TF32 where angles are made"),
        ),
    ),
    KernelSetup(
        "FlashAttention-2, bf16 (FlashAttention-3 in bf16 rounds alike)",
        (
            SetupAction(
                "rotate in float32, round q and k once", FLASH, "paper_bf16",
                "`model.rotation: float32` here, or a fused rotary kernel",
            ),
            SetupAction("that, with angles in float64", FLASH, "paper_bf16_angles64", "that, and a table made once"),
            SetupAction("never round q and k", FLASH, "flash_bf16_fp32_qk", "no kernel takes them; twice the bytes"),
        ),
    ),
    KernelSetup(
        "FlashAttention-3, fp8",
        (
            SetupAction("go back to bf16", FP8, FLASH, "matrix products at half the speed"),
            SetupAction(
                "round before RoPE", FP8, f"{FP8}_before", "a kernel that rotates what it reads; q k^T stays in bf16"
            ),
        ),
    ),
)  # fmt: skip


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
    """Say whether something should be done that leaves so many times the KL. `may help` and `may harm`: the interval
    reaches over one margin alone.
    """
    if effect.high < BETTER:
        return "do"
    if effect.low > WORSE:
        return "do not"
    if effect.within(BETTER, WORSE):
        return "no matter"
    return "may help" if effect.high <= WORSE else "may harm" if effect.low >= BETTER else "not settled"


@dataclass(frozen=True)
class ActionCase:
    """What an action does in a setting: how many times the KL it leaves, what it adds to the loss, and whether the
    verdict holds with all intervals of a table at once.
    """

    kl: Effect
    loss: Effect | None
    holds_with_all: bool

    def written(self, digits: int = 3) -> str:
        """`**do** 0.0595 (0.05 to 0.07), loss -0.02 (-0.03 to -0.01)`: bold is what holds with all."""
        word = advise(self.kl)
        said = f"{f'**{word}**' if self.holds_with_all else word} {self.kl.written(digits)}"
        return said if self.loss is None else f"{said}, loss {self.loss.written(digits)}"


def actions(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the whole table from setup to action: what each leaves of the KL wherever it was
    measured away from position 0.
    """
    away = away_from_0(results)
    places = [where_of(*at, next(iter(here.values())).tokens) for at, here in away]
    tried = _Tried([here for _, here in away])
    own = [_own_loss(here) for _, here in away]
    return _from_setup_to_action(places, own, lambda action: [_one(tried, action, here) for _, here in away])


def brief_actions(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the same by how long a row is, for the lengths of which both were measured: its last tokens, whose keys
    are near, and its ends, whose keys are as far away as they can be. Where a study has no such length, all of it.
    """
    whole = _by_length(results)
    if not whole:
        return actions(results)
    tried = _Tried([here for cases in whole.values() for _, here in cases])

    def cells(action: SetupAction) -> list[str]:
        return [
            "<br>".join(f"{side} {said}" for side, here in cases if (said := _one(tried, action, here, 2)))
            for cases in whole.values()
        ]

    own = ["<br>".join(f"{side} {_own_loss(here, 2)}" for side, here in cases) for cases in whole.values()]
    return _from_setup_to_action([f"{length:,} positions" for length in whole], own, cells)


def in_short(results: Results) -> str:
    """Return what the brief table comes to: which actions help wherever they were tried, which somewhere, which
    nowhere; by the verdicts that hold with all intervals at once.
    """
    places = [here for cases in _by_length(results).values() for _, here in cases]
    places = places or [here for _, here in away_from_0(results)]
    tried, told = _Tried(places), dict[str, list[str]]()
    for setup in SETUPS:
        for action in setup.actions:
            cases = [case for here in places if (case := tried.case(action, here))]
            if not cases:
                continue
            helps = sum(case.holds_with_all and advise(case.kl) == "do" for case in cases)
            harms = sum(case.holds_with_all and advise(case.kl) == "do not" for case in cases)
            rank = "harm" if harms else "all" if helps == len(cases) else "some" if helps else "none"
            in_some = f" ({helps} of {len(cases)})" if rank == "some" else ""
            told.setdefault(rank, []).append(f"{action.words}{in_some}")
    heads = {
        "all": "Shown to help wherever it was tried",
        "some": "Shown to help in some of these cases, to harm in none",
        "harm": "Shown to harm somewhere",
        "none": "Not shown to help anywhere",
    }
    return " ".join(f"**{head}:** {'; '.join(told[rank])}." for rank, head in heads.items() if rank in told)


class _Tried:
    """Every case of some settings, which know how many they are together."""

    def __init__(self, places: Sequence[Mapping[str, Outcome]]) -> None:
        asked = [(action, here) for setup in SETUPS for action in setup.actions for here in places]
        self.number = sum({action.before, action.after} <= here.keys() for action, here in asked)

    def case(self, action: SetupAction, here: Mapping[str, Outcome]) -> ActionCase | None:
        """What an action does in a setting; None where one of both was not measured."""
        if not {action.before, action.after} <= here.keys():
            return None
        before, after = here[action.before].outputs, here[action.after].outputs
        kl = fold_of(after.kl.values, before.kl.values)
        strict = fold_of(after.kl.values, before.kl.values, 1 - (1 - LEVEL) / max(1, self.number))
        loss = difference_of(after.nll_q.values, before.nll_q.values) if after.nll_q and before.nll_q else None
        return ActionCase(kl, loss, advise(strict) == advise(kl) in SETTLED)


def _one(tried: _Tried, action: SetupAction, here: Mapping[str, Outcome], digits: int = 3) -> str:
    case = tried.case(action, here)
    return case.written(digits) if case else ""


def _by_length(results: Results) -> dict[int, list[tuple[str, dict[str, Outcome]]]]:
    """Settings by how long a row is, near first, where there are both."""
    found: dict[int, list[tuple[str, dict[str, Outcome]]]] = {}
    for (start, gap), here in away_from_0(results):
        length = start + gap + next(iter(here.values())).tokens
        found.setdefault(length, []).append(("far" if gap else "near", here))
    return {length: sorted(cases, key=lambda case: case[0] == "far") for length, cases in sorted(found.items())
            if len(cases) == 2}  # fmt: skip


def _own_loss(here: Mapping[str, Outcome], digits: int = 3) -> str:
    """Float64's loss, the same beside every condition."""
    stats = [one.outputs.nll_p for one in here.values() if one.outputs.nll_p]
    return student(stats[0].values).written(digits) if stats else ""


def own_loss(results: Results) -> str:
    """Say in a sentence how well the model foretells the text at all, where its rows stand nearest to position 0; empty
    where no loss was taken.
    """
    near = [here for at, here in away_from_0(results) if not at[1]]
    vocabulary = results.model.config.get("vocab_size")
    if not near or not _own_loss(near[0]) or not isinstance(vocabulary, int):
        return ""
    return (
        f" Float64 itself has a loss of {_own_loss(near[0])} nats a token on this text; guessing has "
        f"{number(math.log(vocabulary))}."
    )


OWN_LOSS = "float64's own loss, nats a token"


def _from_setup_to_action(
    places: Sequence[str], own: Sequence[str], cells: Callable[[SetupAction], list[str]]
) -> tuple[list[str], list[list[str]]]:
    made = [(setup, action, cells(action)) for setup in SETUPS for action in setup.actions]
    rows = [[setup.words, action.words, *told, action.cost] for setup, action, told in made if any(told)]
    if rows and any(own):
        rows.insert(0, [OWN_LOSS, "", *own, ""])
    return ["setup", "action", *places, "cost (not measured)"], rows


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
