"""How far the same training runs end from one another when they are made again: their losses, run by run.

python -m benchmarks.training_again --document docs/training-experiment.md

The earlier runs stand in `results/training-experiment-earlier.csv` (losses by position, means over documents, as the
document then had them), the later ones in `results/training-experiment.json`.
"""

import argparse
import csv
from collections.abc import Mapping
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
PLACE = MarkedPlace("<!-- made by benchmarks/training_again -->", "<!-- end of benchmarks/training_again -->")
FROM = 256  # position


def main() -> None:
    """Put the table into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, required=True)
    document = parser.parse_args().document
    text = read_marked(document, [PLACE])
    save(document, PLACE.put(text, "\n".join(tables(read_earlier(EARLIER), read_later(LATER)))).encode())


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


def read_later(path: Path) -> dict[PairedRun, float]:
    """Return the same of an experiment's measurements after its first stage, which is the earlier runs' last."""
    experiment = load_experiment(EXPERIMENT)
    measured = read_records(experiment, path).measured
    named = {cell: f"{cell.name}-step-{experiment.stages[0]}" for cell in experiment.cells()}
    losses = loss_from(FROM)
    return {cell: float(np.mean(losses(measured[name]))) for cell, name in named.items() if name in measured}


def tables(earlier: Mapping[PairedRun, float], later: Mapping[PairedRun, float]) -> list[str]:
    """Return what runs of both times differ by, and what a contrast is in each."""
    lines = [
        "| arithmetic | runs made twice | differ by, median | root of the mean square | most |",
        "| --- | --- | --- | --- | --- |",
    ]
    both = [run for run in earlier if run in later]
    for arithmetic in dict.fromkeys(run.arithmetic for run in both):
        moved = np.abs([later[run] - earlier[run] for run in both if run.arithmetic == arithmetic])
        rms = float(np.sqrt((moved**2).mean()))
        lines.append(f"| {arithmetic} | {len(moved)} | {np.median(moved):.5f} | {rms:.5f} | {moved.max():.5f} |")
    lines += ["", "| `anchor` - `intra` | seed | earlier | later |", "| --- | --- | --- | --- |"]
    for run in both:
        intra = run._replace(variant="intra")
        if run.variant == "anchor" and intra in both:
            told = [f"{times[run] - times[intra]:+.4f}" for times in (earlier, later)]
            lines.append(f"| {run.arithmetic} | {run.seed} | {' | '.join(told)} |")
    return lines


if __name__ == "__main__":
    main()
