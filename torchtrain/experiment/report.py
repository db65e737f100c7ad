"""What an experiment came to: report.md and recall.svg in its folder, and the same inside a document.

A report is made of whatever has been measured; it says how far that is.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from anchorline.files import replace_file, save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page import figure_style
from anchorline.page.figures import SERIES
from torchtrain.experiment.effects import (
    CONTROL,
    OTHERS,
    PRECISION,
    RELATIVITY,
    SINK,
    Estimate,
    estimate,
    log_probability_at,
    read_precision,
    read_relativity,
    read_sink,
    recall_at,
    seeds_for_power,
    summarise,
)
from torchtrain.experiment.measuring import Measurement
from torchtrain.experiment.running import Folder, check_folder
from torchtrain.experiment.spec import Run, TrainingExperiment

ANSWER = MarkedPlace("<!-- answer made by torchtrain experiment -->", "<!-- end of the answer -->")
RESULTS = MarkedPlace("<!-- made by torchtrain experiment -->", "<!-- end of torchtrain experiment -->")
FIGURE = "recall.svg"

Measured = Mapping[Run, Measurement]


def write_report(experiment: TrainingExperiment, folder: Folder, document: Path | None = None) -> Path:
    """Write the report of what has been measured; return report.md.

    Args:
        experiment: whose.
        folder: its own.
        document: a Markdown file with the marks of answer and results; its figure goes into `figures/` next to it.

    Raises:
        UserError: the folder is of another experiment, or the document lacks the marks.
    """
    check_folder(experiment, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    measured = folder.measured(experiment)
    drawn = _draw(experiment, measured).encode()
    answer = "\n".join(_answer(experiment, measured))
    if document is not None:
        text, figure = read_marked(document, [ANSWER, RESULTS]), Path("figures") / f"{document.stem}.svg"
        (document.parent / figure).parent.mkdir(exist_ok=True)
        save(document.parent / figure, drawn)
        text = RESULTS.put(ANSWER.put(text, answer), "\n".join(_results(experiment, measured, str(figure))))
        save(document, text.encode())
    replace_file(folder.path / FIGURE, drawn)
    parts = [f"# {experiment.title}", "", answer, "", *_results(experiment, measured, FIGURE), ""]
    replace_file(folder.path / "report.md", "\n".join(parts).encode())
    return folder.path / "report.md"


def _answer(experiment: TrainingExperiment, measured: Measured) -> Iterator[str]:
    contrasts = (RELATIVITY, SINK, PRECISION, CONTROL)
    relativity, sink, precision, control = (estimate(one, measured, log_probability_at()) for one in contrasts)
    rows = [
        ("Does broken relativity hurt?", relativity, read_relativity(relativity, control, experiment.margin)),
        ("Does an anchor help in exact arithmetic?", sink, read_sink(sink)),
        ("Does it help more in bfloat16, where relativity is broken?", precision, read_precision(precision)),
        ("Positive control: 1 bit against exact", control, "detected" if _is_below(control) else "not detected"),
    ]
    shown = [[question, "-" if of is None else str(of), said if of else "not yet run"] for question, of, said in rows]
    yield from _table(["question", "effect on the answers' log-probability, 95% interval", "answer"], shown)


def _is_below(of: Estimate | None) -> bool:
    return of is not None and of.high < 0


def _results(experiment: TrainingExperiment, measured: Measured, figure: str) -> Iterator[str]:
    runs = list(experiment.runs())
    yield f"{sum(run in measured for run in runs)} of {len(runs)} runs are measured."
    if not measured:
        return
    yield ""
    yield f"![Recall by distance, arithmetic and mask, with 95% intervals]({figure})"
    distances = sorted(experiment.measure.distances)
    numbers = range(len(distances))
    yield ""
    head = [
        "arithmetic",
        "mask",
        "seeds",
        *(f"recall at {distance}" for distance in distances),
        "mean",
        "log-probability",
    ]
    yield from _table(head, [_cell(measured, cell, numbers) for cell in _cells(experiment, measured)])
    yield ""
    rows = []
    for contrast in (RELATIVITY, SINK, PRECISION, CONTROL, *OTHERS):
        outcomes = [log_probability_at(), recall_at(), *map(log_probability_at, numbers)]
        taken = [of for outcome in outcomes if (of := estimate(contrast, measured, outcome)) is not None]
        if taken and len(taken[0].each) > 1:
            spread = taken[0].deviation
            power = f"{spread:.4f}, {seeds_for_power(spread, experiment.margin)}"
            rows.append([contrast.name, str(taken[0]), str(taken[1]), power, *(f"{of.mean:+.4f}" for of in taken[2:])])
    power = f"deviation, seeds for 80% power at {experiment.margin:g}"
    at = (f"at {distance}" for distance in distances)
    yield from _table(["contrast", "log-probability", "recall", power, *at], rows)


def _cells(experiment: TrainingExperiment, measured: Measured) -> list[tuple[str, str]]:
    cells = [(arithmetic, variant) for arithmetic, variants in experiment.cells.items() for variant in variants]
    return [cell for cell in cells if any(run[:2] == cell for run in measured)]


def _over_seeds(measured: Measured, cell: tuple[str, str], number: int | None = None) -> Estimate:
    return summarise("", [recall_at(number)(found) for run, found in measured.items() if run[:2] == cell])


def _cell(measured: Measured, cell: tuple[str, str], numbers: Sequence[int]) -> list[str]:
    found = [_over_seeds(measured, cell, number) for number in (*numbers, None)]
    nats = summarise("", [log_probability_at()(of) for run, of in measured.items() if run[:2] == cell])
    return [*cell, f"{len(found[0].each)}", *(f"{of.mean:.3f}" for of in found), f"{nats.mean:.4f}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _draw(experiment: TrainingExperiment, measured: Measured) -> str:
    """Draw recall by distance, an arithmetic to a panel, a mask to a line, with intervals."""
    drawn, distances = io.StringIO(), sorted(experiment.measure.distances)
    variants = list(dict.fromkeys(variant for of in experiment.cells.values() for variant in of))
    with matplotlib.rc_context(figure_style("experiment")):
        canvas = Figure(figsize=(8.4, 3.0), layout="constrained")
        panels = canvas.subplots(1, len(experiment.cells), sharey=True, squeeze=False)[0]
        for axes, arithmetic in zip(panels, experiment.cells, strict=True):
            for cell in _cells(experiment, measured):
                if cell[0] != arithmetic:
                    continue
                number = variants.index(cell[1])
                found = [_over_seeds(measured, cell, place) for place in range(len(distances))]
                half = [of.high - of.mean if len(of.each) > 1 else 0.0 for of in found]
                shifted = [distance + 8 * (number - 1.5) for distance in distances]
                means = [of.mean for of in found]
                style = {"color": SERIES[number], "label": cell[1], "marker": "o", "markersize": 3, "capsize": 2}
                axes.errorbar(shifted, means, yerr=half, linewidth=1.2, **style)
            axes.set_title(arithmetic, fontsize=8.5)
            axes.set_xlabel("distance, tokens")
            axes.set_xticks(distances)
        panels[0].set_ylabel("recall")
        if measured:
            lines = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels)
            named = {label: line for panel in lines for line, label in panel}
            canvas.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), fontsize=7)
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()
