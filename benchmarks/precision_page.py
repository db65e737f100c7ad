"""Fill docs/precision.md and README.md with the numbers of the kept studies. Nothing is computed again.

    python -m benchmarks.precision_page          # write the numbers into both
    python -m benchmarks.precision_page --keys   # print every key and its text

The page holds markers, `<!--n:key-->0.79 (0.7 to 0.9)<!--/n-->`. `fill_page` writes the text of each key between them.
Each function below makes the keys of one kind of record. A key with one effect gets the effect with its
interval. A key with several effects gets the range of their values.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from anchorline.errors import UserError
from anchorline.files import save
from ropestudy.report.effects import Effect, difference_of, exponent_of, fold_of, format_number, mean_of, typical_of
from ropestudy.schema import Against, AttentionRecord, Columns, OutputsRecord, Record, Results, read_results

ROOT = Path(__file__).resolve().parents[1]
PAGE, README, KEPT = ROOT / "docs" / "precision.md", ROOT / "README.md", ROOT / "benchmarks" / "results"
# The prefix of keys, and the kept study that they are made from.
STUDIES = {
    "": "precision.json.xz",
    "second.": "precision-second.json.xz",
    "fp8.": "precision-fp8.json.xz",
    "places.": "precision-places.json.xz",
    "places.long.": "precision-places-long.json.xz",
    "places.second.": "precision-places-second.json.xz",
    "places.trained.": "precision-places-trained.json.xz",
    "places.second.trained.": "precision-places-second-trained.json.xz",
}

MARKER = re.compile(r"<!--n:(?P<key>[^ >]+)-->.*?<!--/n-->", re.DOTALL)
EAGER, FLASH, PAPER, FP8 = "hf_eager_bf16", "flash_bf16", "paper_bf16", "fa3_fp8"
BF16 = (EAGER, FLASH, PAPER)
# Actions that a reader may take: from one condition to another.
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
MASKS = (("anchor", "full"), ("intra", "full"))
# A document in one place over the same in another: opening, position of the row's first token, gap behind an anchor.
PLACES = {
    "reset": (("bos", 0, 0), ("bos", 4096, 0)),
    "bare": (("none", 4097, 0), ("bos", 4096, 0)),
    "bare_reset": (("none", 0, 0), ("none", 4097, 0)),
    "anchor": (("anchor", 0, 4096), ("bos", 4096, 0)),
    "anchor_over_bare": (("anchor", 0, 4096), ("none", 4097, 0)),
    "anchor_over_reset": (("anchor", 0, 4096), ("bos", 0, 0)),
    "anchor_moved": (("anchor", 4096, 4096), ("anchor", 0, 4096)),
    "anchor_near": (("anchor", 0, 512), ("bos", 512, 0)),
    **{f"at_{start}": (("bos", start, 0), ("bos", 0, 0)) for start in (16, 512, 4096, 32752, 131056)},
}
MOST_POSITION, TRAINED = 2**20, 8192  # beyond a million positions float32's own angles err as much as bf16

Numbers = dict[str, str]
Effects = Iterator[tuple[str, Effect]]  # a key, and one effect of it
Place = tuple[object, ...]


def fill_page(page: str, numbers: Numbers) -> str:
    """Return the page with the text of each marker's key. Raises UserError: a marker's key is unknown."""

    def fill(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in numbers:
            raise UserError(
                f"page: the key {key!r} is unknown; `python -m benchmarks.precision_page --keys` prints all"
            )
        return f"<!--n:{key}-->{numbers[key]}<!--/n-->"

    return MARKER.sub(fill, page)


def kept_numbers() -> Numbers:
    """Return the text of every key, from the kept studies, the paper's tables and the times on a GPU."""
    numbers = _published() | _on_gpu()
    for prefix, name in STUDIES.items():
        numbers |= make_numbers(read_results(KEPT / name), prefix)
    return numbers


def _published() -> Numbers:
    """What the paper's table 5 says of resets and anchors: the mean over the lengths, one number for each training."""
    published = yaml.safe_load((ROOT / "configs/paper/results.yaml").read_text(encoding="utf-8"))
    rows = [table["rows"] for table in published["tables"] if table["table"] == 5]
    contrasts = {"reset": ("intra_reset", "intra"), "anchor": ("anchor", "intra_reset")}
    each = {name: [float(np.mean(np.subtract(run[a], run[b]))) for run in rows] for name, (a, b) in contrasts.items()}
    return {f"paper.{name}": mean_of(values).written() for name, values in each.items()}


def _on_gpu() -> Numbers:
    """Return times of attention under an anchor over full attention, and tokens a second of steps, by length."""
    attention, steps = (
        json.loads((KEPT / f"{name}-h200.json").read_text(encoding="utf-8"))["rows"] for name in ("attention", "step")
    )
    anchored = (row for row in attention if row["name"] == "flash, anchor")
    times = {f"h200.{row['tokens']}": format_number(row["of_full"]["median"]) for row in anchored}
    return times | {
        f"h200.{row['tokens']}.{row['loop'].replace(', ', '_')}": f"{row['tokens_per_second']:,.0f}" for row in steps
    }


def make_numbers(results: Results, prefix: str = "") -> Numbers:
    """Return the text of every key that a study has records for. prefix: of every key, `second.` for instance."""
    effects: dict[str, list[Effect]] = defaultdict(list)
    for make in (_actions, _fp8_sums, _doses, _sites, _shifts, _lengths, _models, _masks, _places, _causes):
        for key, effect in make(results):
            effects[key].append(effect)
    numbers = {key: _format(several) for key, several in effects.items()}
    numbers |= {f"{key}.cases": str(len(several)) for key, several in effects.items() if len(several) > 1}
    numbers |= _counts(effects) | _first_token(results) | _sizes(results)
    return {prefix + key: text for key, text in numbers.items()}


def _format(effects: Sequence[Effect], write: Callable[[float], str] = format_number) -> str:
    if len(effects) == 1 and write is format_number:
        return effects[0].written()
    low, high = (write(pick(one.value for one in effects)) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _percent(effects: Sequence[Effect]) -> str:
    text = _format(effects, lambda value: f"{round(100 * value)}%")
    return text.replace("% to ", " to ")


def _counts(effects: dict[str, list[Effect]]) -> Numbers:
    """Return in how many cases of each action an interval excludes no change."""
    numbers = {}
    for key, several in effects.items():
        label, _, kind = key.rpartition(".")
        if kind in ("left", "error"):
            numbers[f"{label}.cases"] = str(len(several))
            numbers[f"{label}.excludes_1"] = str(sum(one.high < 1 or one.low > 1 for one in several))
        if kind == "left":
            numbers[f"{label}.less"] = _percent([Effect(1 - one.value, 1 - one.high, 1 - one.low) for one in several])
        elif kind in ("harm", "loss"):
            numbers[f"{label}.loss_moved"] = str(sum(one.low > 0 or one.high < 0 for one in several))
    return numbers


def _actions(results: Results) -> Effects:
    """What each action leaves of the KL (`.left`), how many times larger the KL is without it (`.times`), what it adds
    to the loss (`.loss`) and what its absence adds (`.harm`). Labels name an action and a place, or all of a side.
    """
    by_place: dict[tuple[str, int], dict[str, OutputsRecord]] = {}
    for one in _outputs(results, "setup"):
        if one.task == "text":
            by_place.setdefault(("far" if one.gap else "near", one.d1 + one.gap + one.tokens), {})[one.condition] = one
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
    setups = _outputs(results, "setup")
    exact_sums = {_setting_of(one): one for one in setups if one.condition == FP8}
    for one in setups:
        if one.condition.startswith(f"{FP8}_acc") and _setting_of(one) in exact_sums:
            bits, exact = one.condition.removeprefix(f"{FP8}_acc"), exact_sums[_setting_of(one)]
            yield f"sums{bits}.{one.task}.times", fold_of(one.outputs.kl.values, exact.outputs.kl.values)


def _doses(results: Results) -> Effects:
    """How much of a copied key float64 gives (`.before`), and which share of that a number of bits loses (`.lost`)."""
    for one in _outputs(results, "dose"):
        if one.outputs.right_p and one.outputs.right_q and one.task == "copy":
            key = f"copy.{(one.site or '').replace(' ', '_')}.{one.mantissa_bits}.{one.gap}"
            before, after = np.array(one.outputs.right_p.values), np.array(one.outputs.right_q.values)
            yield f"{key}.before", mean_of(before.tolist())
            if before.mean() > 0:
                yield f"{key}.lost", mean_of(((before - after) / before.mean()).tolist())


def _sites(results: Results) -> Effects:
    """KL of each site that is rounded alone, and what is left of a preset's shift error without one site."""
    for one in _outputs(results, "site"):
        place = f"{'far' if one.gap else 'near'}.{one.d1 + one.gap + one.tokens}"
        yield f"site.{one.condition.replace(' ', '_')}.{place}", typical_of(one.outputs.kl.values)
    shifts = _attention(results, "shift")
    whole = _baselines(shifts)
    for one in (one for one in shifts if one.group == "off_alone" and _far_from_0(one)):
        if (one.base, *_setting_of(one)) in whole:
            several = ", " in (one.site or "")
            yield f"left_out.{'row' if several else 'one'}", _fold(one, whole[one.base, *_setting_of(one)])


def _shifts(results: Results) -> Effects:
    for one in _attention(results, "shift"):
        if one.group == "shift_pairs" and one.model == "pretrained" and 16 in (one.d1, one.d2):
            yield f"moved.{'bf16' if one.condition in BF16 else one.condition}", mean_of(_moved(one))


def _first_token(results: Results) -> Numbers:
    """Two tests of "the first token contributes most": its column is the largest, and it holds more than half."""
    shifts = [one for mode in ("local", "propagated") for one in _attention(results, "shift", mode)]
    records = [one for one in shifts if one.columns and one.model == "pretrained" and one.condition in BF16]
    if not records:
        return {}
    columns = [one.columns for one in records if one.columns]
    place = next((i for i, one in enumerate(records) if (one.condition, one.mode) == (EAGER, "propagated")), 0)
    shown, d, logits = records[place], columns[place].d, columns[place].d_logit
    return {
        "first.cases": str(len(records)),
        "first.largest": str(sum(max(one.d) == one.d[0] for one in columns)),
        "first.above_half": str(sum(one.difference.first_share.mean > 0.5 for one in records)),
        "first.least_logits": str(sum(min(one.d_logit) == one.d_logit[0] for one in columns)),
        "first.columns": str(len(d)),
        "first.share": _percent([mean_of(one.difference.first_share.values) for one in records]),
        "first.unweighted": _percent([_unweighted(one) for one in columns]),
        "first.last_32": _percent([mean_of([sum(one.d[-32:]) / sum(one.d)]) for one in columns]),
        "d.texts": _percent([mean_of([_spread(one.difference.d.values)]) for one in records]),
        "first.d": format_number(d[0], 2),
        "first.next_d": format_number(max(d[1:]), 2),
        "first.attention": f"{100 * shown.difference.first_mass_unweighted.mean:.0f}%",
        "first.logits": format_number(logits[0]),
        "first.median_logits": format_number(float(np.median(logits))),
    }


def _unweighted(columns: Columns) -> Effect:
    """Return the first column's share of all differences, each counted once."""
    unweighted = np.array(columns.d) * np.arange(len(columns.d), 0, -1)
    return mean_of([unweighted[0] / unweighted.sum()])


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.mean(values))


def _by_length(results: Results) -> dict[str, list[AttentionRecord]]:
    series: dict[str, list[AttentionRecord]] = {}
    for mode in ("local", "propagated"):
        for one in _attention(results, "shift", mode):
            if one.group == "lengths":
                series.setdefault(f"length.{one.condition}.{mode}", []).append(one)
    return series


def _lengths(results: Results) -> Effects:
    """How D_logit grows with the length: of the first column, and of the others."""
    for key, points in _by_length(results).items():
        if points[0].condition in BF16:
            first = [one.difference.d_logit_first.values for one in points]
            rest = [one.difference.d_logit_rest.values for one in points]
            growth = fold_of(first[-1], first[0])
            yield from (("length.growth", growth), (f"{key}.growth", growth))
            yield "length.others", fold_of(rest[-1], rest[0])
            yield f"{key}.exponent", exponent_of([one.tokens for one in points], first)


def _sizes(results: Results) -> Numbers:
    """Sizes of the study, and single numbers without an interval."""
    seconds = results.seconds
    numbers = {"seconds": f"{seconds / 3600:.1f}" if seconds > 7200 else f"{seconds / 60:.0f}"}
    for key, points in _by_length(results).items():
        numbers[f"{key}.texts"] = str(points[0].sequences)
        for one in points:
            numbers[f"{key}.{one.tokens}"] = format_number(one.difference.d_logit_first.mean, 4)
            numbers[f"{key}.{one.tokens}.share"] = f"{100 * one.difference.first_share.mean:.2g}%"
    for one in _attention(results, "shift", "local"):
        if one.group == "shift_pairs" and one.d2 == one.d1 + 16 and one.model == "pretrained":
            first, rest = one.difference.d_logit_first.mean, one.difference.d_logit_rest.mean
            numbers[f"d.{one.condition}.{one.d1}"] = format_number(one.difference.d.mean)
            numbers[f"logits.{one.condition}.{one.d1}"] = format_number(first / rest, 2)
    for one in _outputs(results, "setup"):
        if one.condition.startswith(f"{FP8}_acc"):
            numbers |= {"sums.tokens": f"{one.tokens:,}", "sums.texts": str(one.sequences)}
    return numbers


def _models(results: Results) -> Effects:
    """How many times more a shift moves the pretrained model than each of the other weights."""
    shifts = [one for one in _attention(results, "shift") if one.condition in BF16]
    controls = [one for one in shifts if one.group in ("control", "baseline")]
    for one in controls:
        for own in controls:
            if (
                own.model == "pretrained" != one.model
                and own.condition == one.condition
                and _setting_of(own) == _setting_of(one)
            ):
                yield f"pretrained_over.{one.model}", _fold(own, one)


def _masks(results: Results) -> Effects:
    """Errors under one mask over those under another; and what resetting positions moves."""
    attention = [one for one in _attention(results, "exact") if one.group == "mask"]
    outputs = [one for one in _outputs(results, "mask") if one.against == "exact"]
    for name, records in (("error", attention), ("kl", outputs)):
        by_mask = {(one.mask, one.condition, one.d1): one for one in records}
        for one in (one for one in records if one.condition in BF16 and _far_from_0(one)):
            for mask, over in MASKS:
                other = by_mask.get((over, one.condition, one.d1))
                if one.mask == mask and other:
                    yield f"mask.{mask}.{over}.{name}", _fold(one, other)
    for one in _attention(results, "reset"):
        yield f"reset.moved.{'bf16' if one.condition in BF16 else one.condition}", mean_of(_moved(one))


def _places(results: Results) -> Effects:
    """Errors of a document in one place over those in another, by its length; the first token's attention; the loss."""
    records = [one for one in results.records if one.group == "place"]
    by_place: dict[Place, AttentionRecord | OutputsRecord] = {}
    for one in records:
        tokens = one.tokens - (one.opening != "none")
        by_place[one.kind, tokens, one.condition, one.opening, one.d1, one.gap] = one
        if isinstance(one, AttentionRecord) and one.condition == FLASH:
            yield f"share.{one.opening}.{one.gap}.{tokens}", mean_of(one.difference.first_mass_unweighted.values)
        if isinstance(one, OutputsRecord) and one.condition == FLASH and one.outputs.nll_p is not None:
            yield f"nll.{one.opening}.{one.gap}.{tokens}", mean_of(one.outputs.nll_p.values)
    for (kind, tokens, condition, *place), one in by_place.items():
        for name, (a, b) in PLACES.items():
            other = by_place.get((kind, tokens, condition, *b))
            if tuple(place) != a or other is None:
                continue
            measure = "error" if kind == "attention" else "kl"
            if isinstance(one, AttentionRecord) and isinstance(other, AttentionRecord):
                for text in np.divide(_moved(one), _moved(other)):
                    yield f"{name}.{tokens}.texts", mean_of([float(text)])
            for key in (f"{name}.{tokens}", f"{name}.{tokens}.{condition}"):
                yield f"{key}.{measure}", _fold(one, other)
                if isinstance(one, OutputsRecord) and isinstance(other, OutputsRecord):
                    yield f"{key}.loss", difference_of(_lost(one), _lost(other))


def _lost(one: OutputsRecord) -> list[float]:
    """Return what the roundings add to the loss, text by text."""
    assert one.outputs.nll_p is not None
    assert one.outputs.nll_q is not None
    return np.subtract(one.outputs.nll_q.values, one.outputs.nll_p.values).tolist()


def _causes(results: Results) -> Effects:
    """Controls and remedies, away from position 0 and propagated."""
    kinds: tuple[tuple[str, Against], ...] = (("moved", "shift"), ("error", "exact"))
    for name, against in kinds:
        own = [one for one in _attention(results, against) if _far_from_0(one) and one.model == "pretrained"]
        whole = _baselines(own)
        after = {_setting_of(one): one for one in own if one.condition == "q, k rounded after RoPE"}
        for one in own:
            if one.condition == "q, k rounded before RoPE":
                if name == "error":
                    yield "before_rope.error", _fold(one, after[_setting_of(one)])
                else:
                    yield "before_rope.moved", mean_of(_moved(one))
                    yield "after_rope.moved", mean_of(_moved(after[_setting_of(one)]))
            if one.group == "remedy" and "inverse" not in one.condition and (one.base, *_setting_of(one)) in whole:
                yield f"remedy.{name}", _fold(one, whole[one.base, *_setting_of(one)])
    whole = {key[:-1]: one for key, one in _baselines(_attention(results, "shift")).items()}
    for one in _attention(results, "phases"):
        base = whole.get((one.base, *_setting_of(one)[:-1]))
        if base and base.d2 == one.d1 + 16 and one.base in BF16 and _far_from_0(one):
            yield "phases", _fold(one, base)


def _attention(results: Results, against: Against, mode: str = "propagated") -> list[AttentionRecord]:
    kinds = (one for one in results.records if isinstance(one, AttentionRecord) and one.attention_from == "oracle")
    return [one for one in kinds if (one.against, one.mode) == (against, mode)]


def _outputs(results: Results, group: str) -> list[OutputsRecord]:
    return [one for one in results.records if isinstance(one, OutputsRecord) and one.group == group]


def _setting_of(one: Record) -> Place:
    """Return what must be the same for two records to be compared."""
    task = one.task if isinstance(one, OutputsRecord) else "text"
    return (one.tokens, task, one.mask, one.gap, one.d1, one.d2)


def _baselines(records: Sequence[AttentionRecord]) -> dict[Place, AttentionRecord]:
    """Return the record of each whole preset, by its name and place."""
    return {(one.condition, *_setting_of(one)): one for one in records if one.group == "baseline"}


def _far_from_0(one: Record) -> bool:
    return one.d1 > 0 or one.gap > 0


def _moved(one: AttentionRecord) -> list[float]:
    """Return how much probability moves between the two runs, text by text: from 0 to 1 (all of it)."""
    return [difference / 2 for difference in one.difference.row.values]


def _fold(one: AttentionRecord | OutputsRecord, other: AttentionRecord | OutputsRecord) -> Effect:
    """Return the quotient of the differences in two records, text by text."""
    a, b = (x.outputs.kl.values if isinstance(x, OutputsRecord) else _moved(x) for x in (one, other))
    return fold_of(a, b)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", action="store_true", help="print the key and the text of every number")
    if parser.parse_args().keys:
        print("\n".join(f"{key}: {text}" for key, text in kept_numbers().items()))
    else:
        numbers = kept_numbers()
        for page in (PAGE, README):
            save(page, fill_page(page.read_text(encoding="utf-8"), numbers).encode())
