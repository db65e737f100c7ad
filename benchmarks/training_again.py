"""How far the same training runs end from one another when they are made again: their losses, run by run.

python -m benchmarks.training_again --document docs/training-experiment.md

The earlier runs stand in `results/training-experiment-earlier.csv` (losses by position, means over documents), the
later ones in `results/training-experiment.json`.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from torchtrain.experiment.effects import loss_from
from torchtrain.experiment.measuring import Measurement

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


def read_earlier(path: Path) -> dict[tuple[str, str, int], float]:
    """Return the loss at positions from 256 on of each (arithmetic, variant, seed)."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    bands = [(name, *map(int, name.split("-"))) for name in rows[0] if name[0].isdigit()]
    kept = [(name, last - first + 1) for name, first, last in bands if first >= FROM]
    widths = [width for _, width in kept]
    return {
        (row["arithmetic"], row["variant"], int(row["seed"])): float(
            np.average([float(row[name]) for name, _ in kept], weights=widths)
        )
        for row in rows
    }


def read_later(path: Path, step: int = 32) -> dict[tuple[str, str, int], float]:
    """Return the same of an experiment's measurements after a step."""
    found = {}
    for name, measured in json.loads(path.read_text(encoding="utf-8"))["measured"].items():
        run, _, at = name.rpartition("-step-")
        arithmetic, variant, seed = run.rsplit("-", 2)
        if int(at) == step:
            losses = loss_from(FROM)(Measurement.model_validate(measured))
            found[arithmetic, variant, int(seed)] = float(np.mean(losses))
    return found


def tables(earlier: dict[tuple[str, str, int], float], later: dict[tuple[str, str, int], float]) -> list[str]:
    """Return what runs of both times differ by, and what a contrast is in each."""
    lines = [
        "| arithmetic | runs made twice | differ by, median | root of the mean square | most |",
        "| --- | --- | --- | --- | --- |",
    ]
    both = [run for run in earlier if run in later]
    for arithmetic in dict.fromkeys(run[0] for run in both):
        moved = np.abs([later[run] - earlier[run] for run in both if run[0] == arithmetic])
        rms = float(np.sqrt((moved**2).mean()))
        lines.append(f"| {arithmetic} | {len(moved)} | {np.median(moved):.5f} | {rms:.5f} | {moved.max():.5f} |")
    lines += ["", "| `anchor` - `intra` | seed | earlier | later |", "| --- | --- | --- | --- |"]
    for arithmetic, variant, seed in both:
        intra = (arithmetic, "intra", seed)
        if variant == "anchor" and intra in both:
            of = (arithmetic, variant, seed)
            told = [f"{times[of] - times[intra]:+.4f}" for times in (earlier, later)]
            lines.append(f"| {arithmetic} | {seed} | {' | '.join(told)} |")
    return lines


if __name__ == "__main__":
    main()
