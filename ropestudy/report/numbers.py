"""The numbers of a page that is written by hand, and how they come into it.

A page holds markers, `<!--n:key-->0.79 (0.7 to 0.9)<!--/n-->`. `fill_page` writes the text of each
key between them. Every key is made here from kept studies; `python -m ropestudy.report --keys` prints them all.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from anchorline.errors import UserError
from ropestudy.report.effects import (
    Effect,
    difference_of,
    exponent_of,
    fold_of,
    format_number,
    mean_of,
    typical_of,
)
from ropestudy.schema import (
    ByLength,
    MaskPair,
    Outcome,
    PerToken,
    Record,
    Results,
    Score,
    ShiftPairs,
)

MARKER = re.compile(r"<!--n:(?P<key>[^ >]+)-->.*?<!--/n-->", re.DOTALL)
EAGER, FLASH, PAPER, FP8 = "hf_eager_bf16", "flash_bf16", "paper_bf16", "fa3_fp8"
BF16 = (EAGER, FLASH, PAPER)
# What somebody may do: from one condition to another.
ACTIONS = {
    "flash": (EAGER, FLASH),
    "inv_freq": (f"{EAGER}_inv_freq", EAGER),
    "tf32": (f"{EAGER}_tf32", EAGER),
    "rotate32": (FLASH, PAPER),
    "angles64": (FLASH, "paper_bf16_angles64"),
    "unrounded": (FLASH, "flash_bf16_fp32_qk"),
    "bf16": (FP8, FLASH),
    "before": (FP8, f"{FP8}_before"),
}
Numbers = dict[str, str]
R = TypeVar("R", bound=Record)


def fill_page(page: str, numbers: Numbers) -> str:
    """Return the page with the text of each marker's key.

    Raises UserError: a marker's key is unknown.
    """

    def fill(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in numbers:
            raise UserError(f"page: the key {key!r} is unknown; `python -m ropestudy.report --keys` prints all")
        return f"<!--n:{key}-->{numbers[key]}<!--/n-->"

    return MARKER.sub(fill, page)


def make_numbers(results: Results, prefix: str = "") -> Numbers:
    """Return the text of every key that a study has records for. prefix: of every key, `second.` for instance."""
    found: Numbers = {}
    for make in (_actions, _fp8_sums, _doses, _sites, _shifts, _first_token, _lengths, _models, _masks, _causes, _rest):
        found |= make(results)
    return {prefix + key: text for key, text in found.items()}


def _actions(results: Results) -> Numbers:
    """What each action leaves of the KL (`KEY.near.8192.left`), how many times larger it is without (`.times`), and
    what it adds to the loss (`.loss`); over several lengths the range of the values.
    """
    found: Numbers = {}
    outcomes = [one for one in _of(results, Outcome) if (one.group, one.task) == ("setup", "text")]
    by_place: dict[str, dict[str, Outcome]] = {}
    for one in outcomes:
        place = f"{'far' if one.gap else 'near'}.{one.start + one.gap + one.tokens}"
        by_place.setdefault(place, {})[one.condition] = one
    for place, here in by_place.items():
        losses = [one.outputs.nll_p for one in here.values() if one.outputs.nll_p]
        found[f"loss.{place}"] = mean_of(losses[0].values).written() if losses else ""
    for name, (before, after) in ACTIONS.items():
        cases = {
            place: (here[before], here[after]) for place, here in by_place.items() if {before, after} <= here.keys()
        }
        for side in ("near", "far", ""):
            # Rows that hold positions of their own tokens alone say little of long contexts, and beyond a million
            # positions float32's own angles err as much as bf16.
            inside = {p: c for p, c in cases.items() if c[0].tokens < int(p.split(".")[1]) <= 2**20}
            own = {p: c for p, c in inside.items() if p.startswith(side)}
            trained = {p: c for p, c in own.items() if int(p.split(".")[1]) <= 8192}
            for label, some in ((f"{name}.{side or 'all'}", own), (f"{name}.{side or 'all'}.trained", trained)):
                if some:
                    found |= _action(label, list(some.values()))
        for place, case in cases.items():
            found |= _action(f"{name}.{place}", [case])
    return found


def _action(label: str, cases: Sequence[tuple[Outcome, Outcome]]) -> Numbers:
    kl = [(before.outputs.kl.values, after.outputs.kl.values) for before, after in cases]
    left = [fold_of(after, before) for before, after in kl]
    loss = [
        difference_of(after.outputs.nll_q.values, before.outputs.nll_q.values)
        for before, after in cases
        if before.outputs.nll_q and after.outputs.nll_q
    ]
    found = {f"{label}.left": _format(left), f"{label}.times": _format([fold_of(b, a) for b, a in kl])}
    saved = [Effect(1 - one.value, 1 - one.high, 1 - one.low) for one in left]
    found[f"{label}.less"] = _percent(saved)
    if loss:
        found[f"{label}.loss"] = _format(loss)
        found[f"{label}.harm"] = _format([Effect(-one.value, -one.high, -one.low) for one in loss])
    found[f"{label}.cases"] = str(len(cases))
    found[f"{label}.excludes_1"] = str(sum(one.high < 1 or one.low > 1 for one in left))
    found[f"{label}.loss_moved"] = str(sum(one.low > 0 or one.high < 0 for one in loss))
    return found


def _fp8_sums(results: Results) -> Numbers:
    found: Numbers = {}
    outcomes = [one for one in _of(results, Outcome) if one.group == "setup"]
    for one in outcomes:
        plain = [x for x in outcomes if x.condition == FP8 and _place(x) == _place(one)]
        if one.condition.startswith(f"{FP8}_acc") and plain:
            bits = one.condition.removeprefix(f"{FP8}_acc")
            found[f"sums{bits}.{one.task}.times"] = fold_of(one.outputs.kl.values, plain[0].outputs.kl.values).written()
            if one.outputs.nll_q and plain[0].outputs.nll_q:
                loss = difference_of(one.outputs.nll_q.values, plain[0].outputs.nll_q.values)
                found[f"sums{bits}.{one.task}.loss"] = loss.written()
            found["sums.tokens"], found["sums.texts"] = f"{one.tokens:,}", str(one.sequences)
    return found


def _doses(results: Results) -> Numbers:
    found: Numbers = {}
    for one in _of(results, Outcome):
        if one.group == "dose" and one.outputs.right_p and one.outputs.right_q and one.task == "copy":
            key = f"copy.{(one.site or '').replace(' ', '_')}.{one.mantissa_bits}.{one.gap}"
            before, after = np.array(one.outputs.right_p.values), np.array(one.outputs.right_q.values)
            found[f"{key}.before"] = mean_of(before.tolist()).written()
            if before.mean() > 0:
                found[f"{key}.lost"] = mean_of(((before - after) / before.mean()).tolist()).written()
    return found


def _sites(results: Results) -> Numbers:
    """KL of each site that is rounded alone, and what is left of a preset's shift error without one site."""
    found: Numbers = {}
    for one in _of(results, Outcome):
        if one.group == "site":
            name = one.condition.replace(" ", "_")
            found[f"site.{name}.{'far' if one.gap else 'near'}.{one.start + one.gap + one.tokens}"] = typical_of(
                one.outputs.kl.values
            ).written()
    baselines = [one for one in _of(results, Score) if one.group == "baseline"]
    whole: dict[tuple[object, ...], Score] = {(one.condition, *_place(one)): one for one in baselines}
    single: list[Effect] = []
    rows: list[Effect] = []
    for one in (one for one in _of(results, Score) if one.group == "off_alone" and _far_from_0(one)):
        base = whole.get((one.base, *_place(one)))
        if base:
            left = fold_of(one.shift["propagated"].row.values, base.shift["propagated"].row.values)
            (rows if ", " in (one.site or "") else single).append(left)
    return found | _ranges({"left_out.one": single, "left_out.row": rows})


def _shifts(results: Results) -> Numbers:
    found: Numbers = {}
    moved: dict[str, list[Effect]] = {"bf16": [], "fp32": []}
    for one in _of(results, ShiftPairs):
        for pair in one.pairs:
            if one.model == "pretrained" and one.mode == "propagated" and 16 in (pair.d1, pair.d2):
                form = "bf16" if one.condition in BF16 else "fp32" if one.condition == "fp32" else ""
                if form and one.attention_from == "oracle":
                    moved[form].append(mean_of(pair.difference.row.values))
    return found | _ranges({f"moved.{form}": effects for form, effects in moved.items()})


def _first_token(results: Results) -> Numbers:
    """Two tests of "the first token contributes most": its column is the largest, and it holds more than half."""
    own = [one for one in _of(results, PerToken) if one.model == "pretrained" and one.condition in BF16]
    records = [one for one in own if one.attention_from == "oracle"]  # torch's are the same cases again
    if not records:
        return {}
    found = {
        "first.cases": str(len(records)),
        "first.largest": str(sum(max(one.columns.d) == one.columns.d[0] for one in records)),
        "first.above_half": str(sum(one.difference.first_share.mean > 0.5 for one in records)),
        "first.least_logits": str(sum(min(one.columns.d_logit) == one.columns.d_logit[0] for one in records)),
        "first.columns": str(len(records[0].columns.d)),
        "first.share": _percent([mean_of(one.difference.first_share.values) for one in records]),
        "first.rest": _percent([mean_of([1 - x for x in one.difference.first_share.values]) for one in records]),
    }
    shown = next((one for one in records if (one.condition, one.mode) == (EAGER, "propagated")), records[0])
    d, logits = shown.columns.d, shown.columns.d_logit
    found |= {
        "first.d": format_number(d[0], 2),
        "first.next_d": format_number(max(d[1:]), 2),
        "first.attention": f"{100 * shown.difference.first_mass_unweighted.mean:.0f}%",
        "first.logits": format_number(logits[0]),
        "first.median_logits": format_number(float(np.median(logits))),
    }
    return found


def _lengths(results: Results) -> Numbers:
    found: Numbers = {}
    growth: list[Effect] = []
    others: list[Effect] = []
    for one in (one for one in _of(results, ByLength) if one.condition in BF16):
        a, b = one.points[0], one.points[-1]
        key = f"length.{one.condition}.{one.mode}"
        growth.append(fold_of(b.shift.d_logit_first.values, a.shift.d_logit_first.values))
        others.append(fold_of(b.shift.d_logit_rest.values, a.shift.d_logit_rest.values))
        sizes = [point.tokens for point in one.points]
        exponent = exponent_of(sizes, [point.shift.d_logit_first.values for point in one.points])
        found |= {f"{key}.growth": growth[-1].written(), f"{key}.texts": str(one.sequences)}
        found |= {f"{key}.exponent": exponent.written()}
        for point in one.points:
            found[f"{key}.{point.tokens}"] = format_number(point.shift.d_logit_first.mean, 4)
    return found | _ranges({"length.growth": growth, "length.others": others})


def _models(results: Results) -> Numbers:
    """How many times more the pretrained model is moved by a shift than each of the other weights."""
    effects: dict[str, list[Effect]] = {}
    scores = [one for one in _of(results, Score) if one.condition in BF16]
    controls = [one for one in scores if one.group in ("control", "baseline")]
    for one in controls:
        for own in controls:
            if own.model == "pretrained" != one.model and own.condition == one.condition and _place(own) == _place(one):
                pair = fold_of(own.shift["propagated"].row.values, one.shift["propagated"].row.values)
                effects.setdefault(f"pretrained_over.{one.model}", []).append(pair)
    return _ranges(effects)


def _masks(results: Results) -> Numbers:
    effects: dict[str, list[Effect]] = {}
    scores = [one for one in _of(results, Score) if one.group == "mask" and one.condition in BF16 and _far_from_0(one)]
    for a, b in (("intra_reset", "intra"), ("anchor", "full"), ("anchor", "intra"), ("intra", "full")):
        for one in (one for one in scores if one.mask == a):
            other = next((x for x in scores if (x.mask, x.condition, x.d1) == (b, one.condition, one.d1)), None)
            if other:
                error = fold_of(one.error["propagated"].row.values, other.error["propagated"].row.values)
                effects.setdefault(f"mask.{a}.{b}.error", []).append(error)
                kl = fold_of(one.kl_error.kl.values, other.kl_error.kl.values)
                effects.setdefault(f"mask.{a}.{b}.kl", []).append(kl)
    for one in _of(results, MaskPair):
        if (one.a, one.b, one.mode) == ("intra", "intra_reset", "propagated"):
            form = "bf16" if one.condition in BF16 else one.condition
            effects.setdefault(f"reset.moved.{form}", []).append(mean_of(one.difference.row.values))
    return _ranges(effects)


def _causes(results: Results) -> Numbers:
    """Controls and remedies, away from position 0 and propagated."""
    effects: dict[str, list[Effect]] = {}
    scores = [one for one in _of(results, Score) if _far_from_0(one) and one.model == "pretrained"]
    baselines = [one for one in scores if one.group == "baseline"]
    whole: dict[tuple[object, ...], Score] = {(one.condition, *_place(one)): one for one in baselines}
    after = {_place(one): one for one in scores if one.condition == "q, k rounded after RoPE"}
    for one in scores:
        moved, error = one.shift["propagated"].row, one.error["propagated"].row
        if one.condition == "q, k rounded before RoPE" and _place(one) in after:
            other = after[_place(one)]
            effects.setdefault("before_rope.error", []).append(
                fold_of(error.values, other.error["propagated"].row.values)
            )
            effects.setdefault("before_rope.moved", []).append(mean_of(moved.values))
            effects.setdefault("after_rope.moved", []).append(mean_of(other.shift["propagated"].row.values))
        base = whole.get((one.base, one.tokens, one.mask, one.text, one.d1, one.d1 + 16, one.gap))
        if base and "random phases" in one.condition and one.base in BF16:
            effects.setdefault("phases", []).append(fold_of(moved.values, base.shift["propagated"].row.values))
        if base and one.group == "remedy" and "inverse" not in one.condition:
            effects.setdefault("remedy.moved", []).append(fold_of(moved.values, base.shift["propagated"].row.values))
            effects.setdefault("remedy.error", []).append(fold_of(error.values, base.error["propagated"].row.values))
    return _ranges(effects)


def _rest(results: Results) -> Numbers:
    found: Numbers = {}
    found["seconds"] = f"{results.seconds / 3600:.1f}" if results.seconds > 7200 else f"{results.seconds / 60:.0f}"
    return found


def _of(results: Results, kind: type[R]) -> list[R]:
    return [record for record in results.records if isinstance(record, kind)]


def _place(one: Score | Outcome) -> tuple[object, ...]:
    """Return what must be the same for two scores to be compared."""
    if isinstance(one, Outcome):
        return (one.tokens, one.task, one.start, one.gap)
    return (one.tokens, one.mask, one.text, one.d1, one.d2, one.gap)


def _far_from_0(one: Score) -> bool:
    return one.d1 > 0 or one.gap > 0


def _ranges(effects: dict[str, list[Effect]]) -> Numbers:
    found: Numbers = {}
    for key, own in effects.items():
        if own:
            found[key], found[f"{key}.cases"] = _format(own), str(len(own))
    return found


def _format(effects: Sequence[Effect]) -> str:
    """Return one effect with its interval, or the range of the values of several."""
    return effects[0].written() if len(effects) == 1 else _between([one.value for one in effects])


def _percent(effects: Sequence[Effect]) -> str:
    low, high = (round(100 * pick(one.value for one in effects)) for pick in (min, max))
    return f"{low}%" if low == high else f"{low} to {high}%"


def _between(values: Iterable[float], write: Callable[[float], str] = format_number) -> str:
    given = list(values)
    low, high = write(min(given)), write(max(given))
    return low if low == high else f"{low} to {high}"
