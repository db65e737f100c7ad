"""The numbers of docs/precision.md, which a person writes around them.

The page holds markers, `<!--n:key-->0.79 (0.7 to 0.9)<!--/n-->`. `fill_page` writes the text of each key between them.
Each function below makes the keys of one kind of record; `python -m ropestudy.report --keys` prints them all. Where a
key has one effect its text is the effect with its interval; where it has several, it is the range of their values.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from anchorline.errors import UserError
from ropestudy.report.effects import Effect, difference_of, exponent_of, fold_of, format_number, mean_of, typical_of
from ropestudy.schema import ByLength, MaskPair, Outcome, PerToken, Record, Results, Score, ShiftPairs

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
MASKS = (("intra_reset", "intra"), ("anchor", "full"), ("anchor", "intra"), ("intra", "full"))
MOST_POSITION, TRAINED = 2**20, 8192  # beyond a million positions float32's own angles err as much as bf16

Numbers = dict[str, str]
Effects = Iterator[tuple[str, Effect]]  # a key, and one effect of it
Place = tuple[object, ...]
R = TypeVar("R", bound=Record)


def fill_page(page: str, numbers: Numbers) -> str:
    """Return the page with the text of each marker's key.

    Raises:
        UserError: a marker's key is unknown.
    """

    def fill(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in numbers:
            raise UserError(f"page: the key {key!r} is unknown; `python -m ropestudy.report --keys` prints all")
        return f"<!--n:{key}-->{numbers[key]}<!--/n-->"

    return MARKER.sub(fill, page)


def make_numbers(results: Results, prefix: str = "") -> Numbers:
    """Return the text of every key that a study has records for. prefix: of every key, `second.` for instance."""
    effects: dict[str, list[Effect]] = defaultdict(list)
    for make in (_actions, _fp8_sums, _doses, _sites, _shifts, _lengths, _models, _masks, _causes):
        for key, effect in make(results):
            effects[key].append(effect)
    numbers = {key: _format(several) for key, several in effects.items()}
    numbers |= {f"{key}.cases": str(len(several)) for key, several in effects.items() if len(several) > 1}
    numbers |= _counts(effects) | _first_token(results) | _sizes(results)
    return {prefix + key: text for key, text in numbers.items()}


def _format(effects: Sequence[Effect], write: Callable[[float], str] = format_number) -> str:
    """Return one effect with its interval, or the range of the values of several."""
    if len(effects) == 1 and write is format_number:
        return effects[0].written()
    low, high = (write(pick(one.value for one in effects)) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _percent(effects: Sequence[Effect]) -> str:
    text = _format(effects, lambda value: f"{round(100 * value)}%")
    return text.replace("% to ", " to ")


def _counts(effects: dict[str, list[Effect]]) -> Numbers:
    """Return what follows from an action's effects: in how many cases an interval excludes no change."""
    numbers = {}
    for key, several in effects.items():
        label, _, kind = key.rpartition(".")
        if kind == "left":
            numbers[f"{label}.cases"] = str(len(several))
            numbers[f"{label}.excludes_1"] = str(sum(one.high < 1 or one.low > 1 for one in several))
            numbers[f"{label}.less"] = _percent([Effect(1 - one.value, 1 - one.high, 1 - one.low) for one in several])
        elif kind == "harm":
            numbers[f"{label}.loss_moved"] = str(sum(one.low > 0 or one.high < 0 for one in several))
    return numbers


def _actions(results: Results) -> Effects:
    """What each action leaves of the KL (`.left`), how many times larger the KL is without it (`.times`), what it adds
    to the loss (`.loss`) and what its absence adds (`.harm`). Labels name an action and a place, or all of a side.
    """
    by_place: dict[tuple[str, int], dict[str, Outcome]] = {}
    for one in _of(results, Outcome):
        if (one.group, one.task) == ("setup", "text"):
            place = ("far" if one.gap else "near", one.start + one.gap + one.tokens)
            by_place.setdefault(place, {})[one.condition] = one
    for (side, end), here in by_place.items():
        any_outcome = next(iter(here.values()))
        if any_outcome.outputs.nll_p:
            yield f"loss.{side}.{end}", mean_of(any_outcome.outputs.nll_p.values)
        # A row that holds only the positions of its own tokens says little about long contexts.
        inside = any_outcome.tokens < end <= MOST_POSITION
        for name, (before, after) in ACTIONS.items():
            if not {before, after} <= here.keys():
                continue
            labels = [f"{name}.{side}.{end}"]
            labels += [f"{name}.{side}", f"{name}.all"] if inside else []
            labels += [f"{name}.{side}.trained", f"{name}.all.trained"] if inside and end <= TRAINED else []
            a, b = here[before].outputs, here[after].outputs
            for label in labels:
                yield f"{label}.left", fold_of(b.kl.values, a.kl.values)
                yield f"{label}.times", fold_of(a.kl.values, b.kl.values)
                if a.nll_q and b.nll_q:
                    yield f"{label}.loss", difference_of(b.nll_q.values, a.nll_q.values)
                    yield f"{label}.harm", difference_of(a.nll_q.values, b.nll_q.values)


def _fp8_sums(results: Results) -> Effects:
    """What shorter sums do to fp8 attention."""
    setups = [one for one in _of(results, Outcome) if one.group == "setup"]
    exact_sums = {_place(one): one for one in setups if one.condition == FP8}
    for one in setups:
        if one.condition.startswith(f"{FP8}_acc") and _place(one) in exact_sums:
            bits, exact = one.condition.removeprefix(f"{FP8}_acc"), exact_sums[_place(one)]
            yield f"sums{bits}.{one.task}.times", fold_of(one.outputs.kl.values, exact.outputs.kl.values)


def _doses(results: Results) -> Effects:
    """How much of a copied key float64 gives (`.before`), and which share of that a number of bits loses (`.lost`)."""
    for one in _of(results, Outcome):
        if one.group == "dose" and one.outputs.right_p and one.outputs.right_q and one.task == "copy":
            key = f"copy.{(one.site or '').replace(' ', '_')}.{one.mantissa_bits}.{one.gap}"
            before, after = np.array(one.outputs.right_p.values), np.array(one.outputs.right_q.values)
            yield f"{key}.before", mean_of(before.tolist())
            if before.mean() > 0:
                yield f"{key}.lost", mean_of(((before - after) / before.mean()).tolist())


def _sites(results: Results) -> Effects:
    """KL of each site that is rounded alone, and what is left of a preset's shift error without one site."""
    for one in _of(results, Outcome):
        if one.group == "site":
            place = f"{'far' if one.gap else 'near'}.{one.start + one.gap + one.tokens}"
            yield f"site.{one.condition.replace(' ', '_')}.{place}", typical_of(one.outputs.kl.values)
    scores = _of(results, Score)
    whole = _baselines(scores)
    for one in (one for one in scores if one.group == "off_alone" and _far_from_0(one)):
        if (one.base, *_place(one)) in whole:
            several = ", " in (one.site or "")
            yield f"left_out.{'row' if several else 'one'}", fold_of(_moved(one), _moved(whole[one.base, *_place(one)]))


def _shifts(results: Results) -> Effects:
    """How much probability a shift moves."""
    for one in _of(results, ShiftPairs):
        form = "bf16" if one.condition in BF16 else one.condition
        for pair in one.pairs:
            if one.model == "pretrained" and one.mode == "propagated" and 16 in (pair.d1, pair.d2):
                yield f"moved.{form}", mean_of(pair.difference.row.values)


def _first_token(results: Results) -> Numbers:
    """Two tests of "the first token contributes most": its column is the largest, and it holds more than half."""
    records = [one for one in _of(results, PerToken) if one.model == "pretrained" and one.condition in BF16]
    if not records:
        return {}
    shown = next((one for one in records if (one.condition, one.mode) == (EAGER, "propagated")), records[0])
    d, logits = shown.columns.d, shown.columns.d_logit
    return {
        "first.cases": str(len(records)),
        "first.largest": str(sum(max(one.columns.d) == one.columns.d[0] for one in records)),
        "first.above_half": str(sum(one.difference.first_share.mean > 0.5 for one in records)),
        "first.least_logits": str(sum(min(one.columns.d_logit) == one.columns.d_logit[0] for one in records)),
        "first.columns": str(len(d)),
        "first.share": _percent([mean_of(one.difference.first_share.values) for one in records]),
        "first.rest": _percent([mean_of([1 - x for x in one.difference.first_share.values]) for one in records]),
        "first.d": format_number(d[0], 2),
        "first.next_d": format_number(max(d[1:]), 2),
        "first.attention": f"{100 * shown.difference.first_mass_unweighted.mean:.0f}%",
        "first.logits": format_number(logits[0]),
        "first.median_logits": format_number(float(np.median(logits))),
    }


def _lengths(results: Results) -> Effects:
    """How D_logit grows with the length: of the first column, and of the others."""
    for one in (one for one in _of(results, ByLength) if one.condition in BF16):
        first, key = [point.shift.d_logit_first.values for point in one.points], f"length.{one.condition}.{one.mode}"
        rest = [point.shift.d_logit_rest.values for point in one.points]
        growth = fold_of(first[-1], first[0])
        yield from (("length.growth", growth), (f"{key}.growth", growth))
        yield "length.others", fold_of(rest[-1], rest[0])
        yield f"{key}.exponent", exponent_of([point.tokens for point in one.points], first)


def _sizes(results: Results) -> Numbers:
    """Sizes of the study, and single numbers without an interval."""
    seconds = results.seconds
    numbers = {"seconds": f"{seconds / 3600:.1f}" if seconds > 7200 else f"{seconds / 60:.0f}"}
    for one in _of(results, ByLength):
        key = f"length.{one.condition}.{one.mode}"
        numbers[f"{key}.texts"] = str(one.sequences)
        for point in one.points:
            numbers[f"{key}.{point.tokens}"] = format_number(point.shift.d_logit_first.mean, 4)
    for one in _of(results, Outcome):
        if one.condition.startswith(f"{FP8}_acc"):
            numbers |= {"sums.tokens": f"{one.tokens:,}", "sums.texts": str(one.sequences)}
    return numbers


def _models(results: Results) -> Effects:
    """How many times more a shift moves the pretrained model than each of the other weights."""
    controls = [one for one in _of(results, Score) if one.condition in BF16 and one.group in ("control", "baseline")]
    for one in controls:
        for own in controls:
            if own.model == "pretrained" != one.model and own.condition == one.condition and _place(own) == _place(one):
                yield f"pretrained_over.{one.model}", fold_of(_moved(own), _moved(one))


def _masks(results: Results) -> Effects:
    """Errors under one mask over those under another; and what resetting positions moves."""
    scores = [one for one in _of(results, Score) if one.group == "mask" and one.condition in BF16 and _far_from_0(one)]
    by_mask = {(one.mask, one.condition, one.d1): one for one in scores}
    for one in scores:
        for mask, over in MASKS:
            other = by_mask.get((over, one.condition, one.d1))
            if one.mask == mask and other:
                yield f"mask.{mask}.{over}.error", fold_of(_erred(one), _erred(other))
                yield f"mask.{mask}.{over}.kl", fold_of(one.kl_error.kl.values, other.kl_error.kl.values)
    for one in _of(results, MaskPair):
        if (one.a, one.b, one.mode) == ("intra", "intra_reset", "propagated"):
            form = "bf16" if one.condition in BF16 else one.condition
            yield f"reset.moved.{form}", mean_of(one.difference.row.values)


def _causes(results: Results) -> Effects:
    """Controls and remedies, away from position 0 and propagated."""
    scores = [one for one in _of(results, Score) if _far_from_0(one) and one.model == "pretrained"]
    whole = _baselines(scores)
    after = {_place(one): one for one in scores if one.condition == "q, k rounded after RoPE"}
    for one in scores:
        if one.condition == "q, k rounded before RoPE" and _place(one) in after:
            other = after[_place(one)]
            yield "before_rope.error", fold_of(_erred(one), _erred(other))
            yield "before_rope.moved", mean_of(_moved(one))
            yield "after_rope.moved", mean_of(_moved(other))
        base = whole.get((one.base, one.tokens, one.mask, one.d1, one.d1 + 16, one.gap))
        if base and "random phases" in one.condition and one.base in BF16:
            yield "phases", fold_of(_moved(one), _moved(base))
        if base and one.group == "remedy" and "inverse" not in one.condition:
            yield "remedy.moved", fold_of(_moved(one), _moved(base))
            yield "remedy.error", fold_of(_erred(one), _erred(base))


def _of(results: Results, kind: type[R]) -> list[R]:
    return [one for one in results.records if isinstance(one, kind) and one.attention_from == "oracle"]


def _place(one: Score | Outcome) -> Place:
    """Return what must be the same for two scores to be compared."""
    if isinstance(one, Outcome):
        return (one.tokens, one.task, one.start, one.gap)
    return (one.tokens, one.mask, one.d1, one.d2, one.gap)


def _baselines(scores: Iterable[Score]) -> dict[Place, Score]:
    """Return the score of each whole preset, by its name and place."""
    return {(one.condition, *_place(one)): one for one in scores if one.group == "baseline"}


def _far_from_0(one: Score) -> bool:
    return one.d1 > 0 or one.gap > 0


def _moved(one: Score) -> list[float]:
    """Return the probability that a shift moves, text by text."""
    return one.shift["propagated"].row.values


def _erred(one: Score) -> list[float]:
    """Return attention's distance from float64, text by text."""
    return one.error["propagated"].row.values
