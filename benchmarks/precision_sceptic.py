"""Recompute the verdicts of docs/precision.md from the kept results with numpy alone, and nothing of Anchorline.

    python benchmarks/precision_sceptic.py [moved | relative | zero | places | first | tf32 | paper]    # default: all

A line is a number of the page: its key there, the value, and a 95% interval over texts or the range of several cases.
"""

import json
import lzma
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
STUDENT = {3: 4.302653, 8: 2.364624}  # 97.5% points, by the number of values
BF16 = ("hf_eager_bf16", "flash_bf16", "paper_bf16")


@cache
def kept(study: str) -> list[dict]:
    """Return the records of a kept study."""
    return json.loads(lzma.decompress((ROOT / "benchmarks" / "results" / f"{study}.json.xz").read_bytes()))["records"]


def find(study: str, **wanted) -> list[dict]:
    """Return the records that have these values."""
    return [one for one in kept(study) if all(one.get(name) == value for name, value in wanted.items())]


def values(record: dict, name: str = "row") -> np.ndarray:
    """Return a measure of each text."""
    return np.array((record.get("difference") or record["outputs"])[name]["values"])


def write(x: float) -> str:
    """Return a number with three digits, as the page has it."""
    mantissa, _, exponent = (f"{x:.3g}" if abs(x) >= 1e-3 else f"{x:.2e}").partition("e")
    return mantissa + (f"e{int(exponent)}" if exponent else "")


def interval(each: np.ndarray, back=lambda x: x) -> str:
    """Return the mean with Student's interval; `back` undoes a logarithm."""
    mean, half = each.mean(), STUDENT[len(each)] * each.std(ddof=1) / len(each) ** 0.5
    return "{} ({} to {})".format(*(write(back(x)) for x in (mean, mean - half, mean + half)))


def span(several: list[float], form=write) -> str:
    """Return the smallest and the largest."""
    low, high = form(min(several)), form(max(several))
    return low if low == high else f"{low} to {high}"


def show(key: str, text: str) -> None:
    """Print a line."""
    print(f"{key}: {text}")


def moved() -> None:
    """How much of a query's probability a shift moves: half the sum of absolute differences."""
    for key, conditions in (("bf16", BF16), ("fp32", ("fp32",))):
        about = {"group": "shift_pairs", "mode": "propagated", "model": "pretrained"}
        pairs = [one for name in conditions for one in find("precision", condition=name, **about)]
        show(f"moved.{key}", span([values(one).mean() / 2 for one in pairs if 16 in (one["d1"], one["d2"])]))


def relative() -> None:
    """Rounding before RoPE is relative, and errs nearly as much as rounding after it."""
    orders = ("q, k rounded before RoPE", "q, k rounded after RoPE")
    about = {"kind": "attention", "mode": "propagated", "model": "pretrained"}
    for key, against, scale in (("moved", "shift", 0.5), ("error", "exact", 1)):
        by_place = [
            {
                (one["d1"], one["gap"]): scale * values(one)
                for one in find("precision", condition=name, against=against, **about)
            }
            for name in orders
        ]
        far = [place for place in by_place[0] if place != (0, 0)]
        if key == "moved":
            for name, places_of in zip(("before_rope", "after_rope"), by_place, strict=True):
                show(f"{name}.moved", span([places_of[place].mean() for place in far]))
        else:
            quotients = [np.exp(np.log(by_place[0][place] / by_place[1][place]).mean()) for place in far]
            show("before_rope.error", span(quotients))


def zero() -> None:
    """A shift from 0 moves no more than one from 64; one from 4,080 moves twice as much."""
    for d1 in (0, 64, 4080):
        about = {"group": "shift_pairs", "condition": "hf_eager_bf16", "mode": "local", "model": "pretrained"}
        (one,) = find("precision", d1=d1, d2=d1 + 16, **about)
        show(f"d.hf_eager_bf16.{d1}", write(values(one, "d").mean()))


def places() -> None:
    """What resets and anchors leave of attention's error, of a document of 256 or 1,024 tokens at 4,097."""
    pairs = {
        "reset": (("bos", 0, 0), ("bos", 4096, 0)),
        "bare_reset": (("none", 0, 0), ("none", 4097, 0)),
        "anchor": (("anchor", 0, 4096), ("bos", 4096, 0)),
        "anchor_over_bare": (("anchor", 0, 4096), ("none", 4097, 0)),
    }
    for prefix in ("places.", "places.long.", "places.second.", "places.trained.", "places.second.trained."):
        study, length = "precision-" + prefix.rstrip(".").replace(".", "-"), 1024 if "long" in prefix else 256
        for name, ends in [("reset", pairs["reset"])] if length == 1024 else pairs.items():
            quotients = []
            for condition in BF16:
                about = {"kind": "attention", "condition": condition}
                a, b = (
                    find(study, opening=opening, d1=d1, gap=gap, tokens=length + (opening != "none"), **about)[0]
                    for opening, d1, gap in ends
                )
                logs = np.log(values(a) / values(b))
                show(f"{prefix}{name}.{length}.{condition}.error", interval(logs, np.exp))
                quotients.append(float(np.exp(logs.mean())))
            show(f"{prefix}{name}.{length}.error", span(quotients))
            if name in ("reset", "anchor"):
                show(
                    f"{prefix}{name}.{length}.loss",
                    span([_added_to_the_loss(study, length, one, ends) for one in BF16]),
                )


def _added_to_the_loss(study: str, length: int, condition: str, ends) -> float:
    """Return what rounding adds to the loss at the first end, less what it adds at the second."""
    added = []
    for opening, d1, gap in ends:
        about = {"kind": "outputs", "condition": condition, "opening": opening, "d1": d1, "gap": gap}
        (one,) = find(study, tokens=length + (opening != "none"), **about)
        added.append(values(one, "nll_q") - values(one, "nll_p"))
    return float((added[0] - added[1]).mean())


def first() -> None:
    """The first column's share of what a shift moves: of D, and of all differences counted once."""
    about = {"group": "shift_pairs", "model": "pretrained", "d1": 0, "d2": 16}
    columns = [np.array(one["columns"]["d"]) for name in BF16 for one in find("precision", condition=name, **about)]
    counted = [column * np.arange(len(column), 0, -1) for column in columns]
    percent = lambda x: f"{round(100 * x)}"  # noqa: E731
    show("first.unweighted", span([float(one[0] / one.sum()) for one in counted], percent) + "%")
    show("first.last_32", span([float(one[-32:].sum() / one.sum()) for one in columns], percent) + "%")


def tf32() -> None:
    """What TF32 positions add to the loss of rows that end at position 8,192."""
    for prefix, study in (("", "precision"), ("second.", "precision-second")):
        about = {"group": "setup", "d1": 8128, "gap": 0, "task": "text"}
        with_tf32, without = (
            values(find(study, condition=f"hf_eager_bf16{end}", **about)[0], "nll_q") for end in ("_tf32", "")
        )
        show(f"{prefix}tf32.near.8192.harm", interval(with_tf32 - without))


def paper() -> None:
    """Table 5 of the paper: the mean over the lengths of each of its three trainings."""
    text = (ROOT / "configs" / "paper" / "results.yaml").read_text()
    tables = [part for part in text.split("  - table: ") if part.startswith("5\n")]
    rows = [
        {name: np.array([float(x) for x in row.split(",")]) for name, row in re.findall(r"(\w+): \[(.+)\]", part)}
        for part in tables
    ]
    for key, a, b in (("reset", "intra_reset", "intra"), ("anchor", "anchor", "intra_reset")):
        show(f"paper.{key}", interval(np.array([(one[a] - one[b]).mean() for one in rows])))


if __name__ == "__main__":
    claims = {claim.__name__: claim for claim in (moved, relative, zero, places, first, tf32, paper)}
    for name in sys.argv[1:] or claims:
        claims[name]()
