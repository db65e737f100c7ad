"""How far the same training runs end from one another when they are made again: their losses, run by run.

python -m benchmarks.training_again --document docs/training-experiment.md

The runs stand in `results/training-experiment.json`. They were made in two other ways: earlier, which stands in
`results/training-experiment-earlier.csv` (losses by position, means over documents, as the document then had them); and
with the loss in chunks of another size, in `results/training-experiment-chunks.json`.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from torchtrain.experiment.effects import loss_from
from torchtrain.experiment.records import read_records
from torchtrain.experiment.spec import PairedRun, load_experiment

EXPERIMENT = Path(__file__).resolve().parents[1] / "configs" / "experiments" / "rope_training.yaml"
RESULTS = Path(__file__).resolve().parent / "results"
EARLIER, LATER = RESULTS / "training-experiment-earlier.csv", RESULTS / "training-experiment.json"
CHUNKS, CHUNK = RESULTS / "training-experiment-chunks.json", "run.train.loss_chunk=128"
PLACE = MarkedPlace("<!-- made by benchmarks/training_again -->", "<!-- end of benchmarks/training_again -->")
FROM = 256  # position


def main() -> None:
    """Put the table into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, required=True)
    document = parser.parse_args().document
    text = read_marked(document, [PLACE])
    again = {
        "another processor, an earlier trainer": read_earlier(EARLIER),
        "the loss in chunks of 128 tokens for 256": read_later(CHUNKS, CHUNK),
    }
    save(document, PLACE.put(text, "\n".join(tables(again, read_later(LATER)))).encode())


def read_earlier(path: Path) -> dict[PairedRun, float]:
    """Return the loss at positions from 256 on of each run."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    bands = [(name, *map(int, name.split("-"))) for name in rows[0] if name[0].isdigit()]
    widths = {name: last - first + 1 for name, first, last in bands if first >= FROM}
    return {
        PairedRun(row["arithmetic"], row["variant"], int(row["seed"])): float(
            np.average([float(row[name]) for name in widths], weights=list(widths.values()))
        )
        for row in rows
    }


def read_later(path: Path, *overrides: str) -> dict[PairedRun, float]:
    """Return the same of an experiment's measurements after its first stage, which is the earlier runs' last."""
    experiment = load_experiment(EXPERIMENT, list(overrides))
    measured = read_records(experiment, path).measured
    named = {cell: f"{cell.name}-step-{experiment.stages[0]}" for cell in experiment.cells()}
    losses = loss_from(FROM)
    return {cell: float(np.mean(losses(measured[name]))) for cell, name in named.items() if name in measured}


def tables(again: Mapping[str, Mapping[PairedRun, float]], later: Mapping[PairedRun, float]) -> list[str]:
    """Return what runs differ by that were made in other ways again, and what a contrast then is in each."""
    lines = [
        "| made again by | arithmetic | runs | differ by, median | root of the mean square | most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    contrasts = ["", "| made again by | `anchor` - `intra` | seed | then | here |", "| --- | --- | --- | --- | --- |"]
    for way, others in again.items():
        both = [run for run in others if run in later]
        for arithmetic in dict.fromkeys(run.arithmetic for run in both):
            moved = np.abs([later[run] - others[run] for run in both if run.arithmetic == arithmetic])
            told = [np.median(moved), np.sqrt((moved**2).mean()), moved.max()]
            lines.append(f"| {way} | {arithmetic} | {len(moved)} | {' | '.join(f'{x:.5f}' for x in told)} |")
        for run in both:
            intra = run._replace(variant="intra")
            if run.variant == "anchor" and intra in both:
                told = [f"{times[run] - times[intra]:+.4f}" for times in (others, later)]
                contrasts.append(f"| {way} | {run.arithmetic} | {run.seed} | {' | '.join(told)} |")
        contrasts += _what_bf16_adds(way, both, others, later)
    return lines + contrasts


def _what_bf16_adds(
    way: str, both: Sequence[PairedRun], others: Mapping[PairedRun, float], later: Mapping[PairedRun, float]
) -> Iterator[str]:
    """Yield the page's main contrast as it was then and is here, of the seeds whose four runs were all made twice."""
    signs = {
        ("bfloat16", "anchor"): 1, ("bfloat16", "intra"): -1, ("float32", "anchor"): -1, ("float32", "intra"): 1,
    }  # fmt: skip
    each: list[list[float]] = []
    for seed in sorted({run.seed for run in both}):
        runs = {PairedRun(*of, seed): sign for of, sign in signs.items()}
        if all(run in both for run in runs):
            each.append([sum(sign * times[run] for run, sign in runs.items()) for times in (others, later)])
            yield f"| {way} | bfloat16 - float32 | {seed} | {' | '.join(f'{x:+.4f}' for x in each[-1])} |"
    if len(each) > 1:
        told = " | ".join(f"{x:+.4f}" for x in np.mean(each, axis=0))
        yield f"| {way} | bfloat16 - float32 | mean | {told} |"


if __name__ == "__main__":
    main()
