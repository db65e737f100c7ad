"""Recompute the verdicts of docs/training-experiment.md from the stored results, with numpy alone and nothing of ours.

cd benchmarks/results && python ../sceptic.py experiment-offsets.json
cd benchmarks/results && python ../sceptic.py training-experiment.json training-experiment-{control,cost}.json
cd benchmarks/results && python ../sceptic.py weights-code/*.jsonl
"""

import json
import sys
from pathlib import Path

import numpy as np

HALF_LINE = np.concatenate([[0.0], np.geomspace(1e-6, 1e6, 200_001)])


def below(freedom: float) -> np.ndarray:
    """Odds that Student's t is between 0 and each place of HALF_LINE: the density's integral."""
    density = (1 + HALF_LINE**2 / freedom) ** (-(freedom + 1) / 2)
    integral = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(HALF_LINE))])
    return integral / integral[-1] / 2


def judge(table: np.ndarray) -> tuple[str, float]:
    """Mean, 95% interval, and odds of such a mean without an effect, of a table [seeds, rows] or of a number a seed."""
    if not np.any(table):
        return "+0.00000 [+0.00000, +0.00000]", 1.0
    parts = [table.mean(axis=1), table.mean(axis=0)] if table.ndim == 2 else [table]
    variances = np.array([part.var(ddof=1) / len(part) for part in parts])
    error, free = variances.sum() ** 0.5, np.array([len(part) - 1 for part in parts])
    shares = below(float(variances.sum() ** 2 / (variances**2 / free).sum()))
    mean, half = table.mean(), np.interp(0.475, shares, HALF_LINE) * error
    odds = 1 - 2 * float(np.interp(abs(mean) / error, HALF_LINE, shares))
    return f"{mean:+.5f} [{mean - half:+.5f}, {mean + half:+.5f}]", odds


def holm(odds: list[float]) -> list[float]:
    """Correct for the number of contrasts: the least is taken times n, the next times n - 1, and none gets smaller."""
    order = np.argsort(odds)
    steps = np.maximum.accumulate([min(1.0, (len(odds) - rank) * odds[one]) for rank, one in enumerate(order)])
    return [float(steps[list(order).index(one)]) for one in range(len(odds))]


def contrast(runs: dict, plus: list[str], minus: list[str], value) -> np.ndarray:
    """Sum of some cells (`exact-intra`) less that of others, for every seed that all of them have."""
    signs = {cell: 1 for cell in plus} | {cell: -1 for cell in minus}
    seeds = sorted({int(name.rsplit("-", 1)[1]) for name in runs})
    whole = [seed for seed in seeds if all(f"{cell}-{seed}" in runs for cell in signs)]
    return np.array([sum(sign * value(runs[f"{cell}-{seed}"]) for cell, sign in signs.items()) for seed in whole])


def show(runs: dict, rows: list[tuple], value) -> None:
    """Print every contrast with its odds after the correction."""
    tables = [contrast(runs, plus, minus, lambda run, more=more: value(run, *more)) for _, plus, minus, *more in rows]
    judged = [judge(table) if len(table) > 1 else ("-", 1.0) for table in tables]
    for (name, *_), table, (shown, _), p in zip(rows, tables, judged, holm([p for _, p in judged]), strict=True):
        print(f"{name}: {shown} | {p:.4f}" if len(table) > 1 else f"{name}: - | -")


UNREGISTERED = (  # name, cells, how rows open or are read, outcome
    ("bfloat16 - exact, intra", "bits7_after-intra exact-intra", "bos", "nats"),
    ("share recalled: full - intra, bfloat16", "bits7_after-full bits7_after-intra", "bos", "recall"),
    ("share recalled: anchor - intra, bfloat16", "bits7_after-anchor bits7_after-intra", "bos", "recall"),
    ("2 bits after - 7 bits after, read without rounding", "bits2_after-intra bits7_after-intra", "exact", "nats"),
    ("2 bits before - 7 bits before, read without rounding", "bits2_before-intra bits7_before-intra", "exact", "nats"),
    ("held-out, 512 tokens seen: positive control", "exact-intra+near exact-intra", "contexts", "512"),
    ("held-out, 512 tokens seen: weights, intra", "exact-intra+weighted exact-intra", "contexts", "512"),
    ("held-out, 512 tokens seen: weights, full", "exact-full+weighted exact-full", "contexts", "512"),
    ("held-out, 512 tokens seen: weights, anchor", "exact-anchor+weighted exact-anchor", "contexts", "512"),
    ("held-out, 512: weights less shuffled, intra", "exact-intra+weighted exact-intra+shuffled", "contexts", "512"),
    ("held-out, 512: weights less shuffled, anchor", "exact-anchor+weighted exact-anchor+shuffled", "contexts", "512"),
    ("held-out, 512 tokens seen: anchor - intra", "exact-anchor exact-intra", "contexts", "512"),
    ("held-out, 64 tokens seen: weights, intra", "exact-intra+weighted exact-intra", "contexts", "64"),
    ("held-out, 64 tokens seen: weights, full", "exact-full+weighted exact-full", "contexts", "64"),
    ("held-out, 16 tokens seen: weights, intra", "exact-intra+weighted exact-intra", "contexts", "16"),
)


def print_unregistered(runs: dict, bases: dict) -> None:
    """Print contrasts that were not registered, without a correction."""
    for name, cells, rows, outcome in UNREGISTERED:
        if not all(rows in run for run in runs.values()):
            continue
        plus, minus = cells.split()
        sign = 1 if outcome == "recall" else -1
        table = contrast(
            runs, [plus], [minus], lambda run, s=sign, r=rows, o=outcome: s * np.mean(np.atleast_1d(run[r][o]), axis=0)
        )
        if len(table) > 1:
            print(f"{name}: {judge(table)[0]}")
    # What 2 bits after RoPE cost beyond their larger error of the logits, or of the probabilities.
    names = [f"{cell}-intra" for cell in ("bits2_after", "bits2_before", "bits7_before")]
    whole = [seed for seed in bases if all(f"{name}-{seed}" in runs for name in names)]
    for what, power in ((" probabilities", 2), ("", 1), ("", 2)) if len(whole) > 1 else ():
        noise = [[bases[seed]["noise"][f"bits2_{place}{what}"] for place in ("after", "before")] for seed in whole]
        times = np.divide(*np.transpose(noise))
        a, b, c = (np.array([-np.mean(runs[f"{one}-{n}"]["bos"]["nats"], axis=0) for n in whole]) for one in names)
        size = f"{times.mean():.3f} times larger error" + (" of probabilities" if what else "")
        name = f"2 bits, after - before, less what a {size} explains" + (" in proportion" if power == 1 else "")
        print(f"{name}: {judge(a - b - (times**power - 1)[:, None] * (b - c))[0]}")


CODE = (  # name, arms, and which targets: by the tokens that a prediction sees
    ("weights, 2,048 tokens and more", ["weighted"], ["plain"], 2048, 4096),
    ("weights less the same on other targets, 2,048 and more", ["weighted"], ["shuffled"], 2048, 4096),
    ("cost near by: weights, 256 to 1,023", ["weighted"], ["plain"], 256, 1024),
    ("positive control: no weight from 256 on, 2,048 and more", ["near"], ["plain"], 2048, 4096),
    ("training itself, 2,048 and more", ["plain"], ["before"], 2048, 4096),
    ("training itself, 256 to 1,023", ["plain"], ["before"], 256, 1024),
)


def gain_of_targets(contexts: dict, least: int, most: int) -> float:
    """Log-probability of the held-out targets whose effective context is in a range, a mean over tokens."""
    chosen = [of for context, of in contexts.items() if least <= int(context) < most]
    return -sum(of["loss"] * of["labelled_tokens"] for of in chosen) / sum(of["labelled_tokens"] for of in chosen)


if sys.argv[1].endswith(".jsonl"):  # metrics.jsonl of the trainer, by arm and seed
    runs = {}
    for path in map(Path, sys.argv[1:]):
        events = [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == "evaluation"]
        runs[path.stem], runs["before-" + path.stem.rsplit("-", 1)[1]] = events[-1]["contexts"], events[0]["contexts"]
    show(runs, list(CODE[:4]), gain_of_targets)
    show(runs, list(CODE[4:]), gain_of_targets)  # what training does, for comparison: no question
    sys.exit()
content = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
if "bases" in content[0]:  # an experiment that states its contrasts: a loss for each distance and row of each run
    rows = [
        (
            one["question"],
            [cell.replace("/", "-") for cell in one["plus"]],
            [cell.replace("/", "-") for cell in one["minus"]],
            one.get("distance"),
        )
        for one in content[0]["experiment"]["contrasts"]
    ]
    runs, bases = content[0]["measured"], content[0]["bases"]
    distances = sorted(content[0]["experiment"]["measure"]["distances"])

    def gain(run: dict, distance: int | None) -> np.ndarray:
        """Log-probability of the answers by row, at a distance or in the mean over them."""
        nats = np.array(run["bos"]["nats"])
        return -(nats.mean(axis=0) if distance is None else nats[distances.index(distance)])

    show(runs, rows, gain)
    print_unregistered(runs, bases)
else:  # the experiment before it: a loss for each checkpoint and distance
    ROWS = [
        (
            "broken relativity, 7 bits",
            "bf16_after-intra_reset bf16_before-intra",
            "bf16_after-intra bf16_before-intra_reset",
        ),
        (
            "broken relativity, 1 bit",
            "bits1_after-intra_reset bits1_before-intra",
            "bits1_after-intra bits1_before-intra_reset",
        ),
        ("1 bit before RoPE - exact", "bits1_before-intra", "exact-intra"),
        ("1 bit after RoPE - exact", "bits1_after-intra", "exact-intra"),
        ("1 bit, after - before", "bits1_after-intra", "bits1_before-intra"),
        ("7 bits, after - before", "bf16_after-intra", "bf16_before-intra"),
        ("same function, 1 bit", "bits1_before-intra_reset", "bits1_before-intra"),
        ("same function, 7 bits", "bf16_before-intra_reset", "bf16_before-intra"),
        ("reset - intra, 1 bit after", "bits1_after-intra_reset", "bits1_after-intra"),
        ("reset - intra, 7 bits after", "bf16_after-intra_reset", "bf16_after-intra"),
        ("anchor - intra, exact", "exact-anchor", "exact-intra"),
        ("anchor - intra, more in 7 bits", "bf16_after-anchor exact-intra", "bf16_after-intra exact-anchor"),
        ("anchor - full, equal tokens", "exact-anchor", "exact-full"),
    ]
    measured = content[0]["measured"] | content[1]["measured"]
    show(
        measured, [(name, plus.split(), minus.split()) for name, plus, minus in ROWS], lambda run: -np.mean(run["nats"])
    )
    seconds = {row["loop"]: row["seconds"]["median"] for row in content[2][0]["rows"]}  # at 1,024 tokens
    ratio = seconds["torchtrain, full"] / seconds["torchtrain, anchor"]

    def at(step: float):
        """Log-probability at a step between two checkpoints."""
        return lambda run: -np.interp(step, np.arange(16, 33, 4), np.mean(run["nats"], axis=1))

    equal = contrast(measured, ["exact-anchor"], [], at(32)) - contrast(measured, ["exact-full"], [], at(32 / ratio))
    print(f"anchor - full, equal time ({ratio:.3f}): {judge(equal)[0]}")
    for place, distance in enumerate(content[0]["experiment"]["measure"]["distances"]):
        gain = contrast(
            measured, ["exact-anchor"], ["exact-intra"], lambda run, i=place: -np.mean(run["nats"], axis=0)[i]
        )
        print(f"anchor - intra, exact, at {distance}: {judge(gain)[0]}")
