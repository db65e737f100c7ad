"""The tables and the figure of an experiment, made of the runs that have been measured."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page.figures import SERIES, draw_svg
from benchmarks.experiment.effects import (
    CONTROL,
    MARGIN,
    OTHERS,
    PRECISION,
    RELATIVITY,
    SINK,
    Estimate,
    Outcome,
    estimate,
    log_probability_at,
    read,
    read_relativity,
    recall_at,
    seeds_for_power,
    summarise,
)
from benchmarks.experiment.recall import Measurement
from benchmarks.experiment.spec import Run, TrainingExperiment

ANSWER = MarkedPlace("<!-- answer made by benchmarks.experiment -->", "<!-- end of the answer -->")
RESULTS = MarkedPlace("<!-- made by benchmarks.experiment -->", "<!-- end of benchmarks.experiment -->")
# What an effect above 0, below 0, or neither means, as was agreed before the runs.
SINK_READINGS = (
    *("the anchor helps without any rounding", "the anchor hurts"),
    "the anchor was not shown to help in exact arithmetic",
)
NO_PRECISION = "no part of its help was shown to be precision"
PRECISION_READINGS = ("part of its help is precision", NO_PRECISION, NO_PRECISION)
CONTROL_READINGS = ("not detected", "detected", "not detected")

Measured = Mapping[Run, Measurement]


def write_report(experiment: TrainingExperiment, measured: Measured, document: Path | None) -> None:
    """Print the tables of what has been measured, or write them and a figure into a document.

    Args:
        experiment: its settings.
        measured: its measurements.
        document: a Markdown file with the marks of answer and results; its figure goes into `figures/` next to it.

    Raises:
        UserError: the document lacks the marks.
    """
    answer = "\n".join(_answer(measured))
    if document is None:
        print("\n".join([answer, "", *_results(experiment, measured, "")]))
        return
    text, figure = read_marked(document, [ANSWER, RESULTS]), Path("figures") / f"{document.stem}.svg"
    (document.parent / figure).parent.mkdir(exist_ok=True)
    save(document.parent / figure, _draw(experiment, measured).encode())
    text = RESULTS.put(ANSWER.put(text, answer), "\n".join(_results(experiment, measured, str(figure))))
    save(document, text.encode())


def _answer(measured: Measured) -> Iterator[str]:
    contrasts = (RELATIVITY, SINK, PRECISION, CONTROL)
    relativity, sink, precision, control = (estimate(one, measured, log_probability_at()) for one in contrasts)
    rows = [
        ("Does broken relativity hurt?", relativity, read_relativity(relativity, control)),
        ("Does an anchor help in exact arithmetic?", sink, read(sink, *SINK_READINGS)),
        ("Does it help more in bfloat16, where relativity is broken?", precision, read(precision, *PRECISION_READINGS)),
        ("Positive control: 1 bit against exact", control, read(control, *CONTROL_READINGS)),
    ]
    shown = [[question, "-" if of is None else str(of), reading] for question, of, reading in rows]
    yield from _table(["question", "effect on the answers' log-probability, 95% interval", "answer"], shown)


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
    recalls = (f"recall at {distance}" for distance in distances)
    head = ["arithmetic", "mask", "seeds", *recalls, "mean", "log-probability"]
    yield from _table(head, [_cell(measured, cell, numbers) for cell in _cells(experiment, measured)])
    yield ""
    rows = []
    for contrast in (RELATIVITY, SINK, PRECISION, CONTROL, *OTHERS):
        outcomes = [log_probability_at(), recall_at(), *map(log_probability_at, numbers)]
        taken = [of for outcome in outcomes if (of := estimate(contrast, measured, outcome)) is not None]
        if taken and len(taken[0].each) > 1:
            spread = taken[0].deviation
            power = f"{spread:.4f}, {seeds_for_power(spread, MARGIN)}"
            rows.append([contrast.name, str(taken[0]), str(taken[1]), power, *(f"{of.mean:+.4f}" for of in taken[2:])])
    power = f"deviation, seeds for 80% power at {MARGIN:g}"
    at = (f"at {distance}" for distance in distances)
    yield from _table(["contrast", "log-probability", "recall", power, *at], rows)


def _cells(experiment: TrainingExperiment, measured: Measured) -> list[tuple[str, str]]:
    cells = [(arithmetic, variant) for arithmetic, variants in experiment.cells.items() for variant in variants]
    return [cell for cell in cells if any(run[:2] == cell for run in measured)]


def _over_seeds(measured: Measured, cell: tuple[str, str], outcome: Outcome) -> Estimate:
    return summarise("", [outcome(one) for run, one in measured.items() if run[:2] == cell])


def _cell(measured: Measured, cell: tuple[str, str], numbers: Sequence[int]) -> list[str]:
    recalls = [_over_seeds(measured, cell, recall_at(number)) for number in (*numbers, None)]
    nats = _over_seeds(measured, cell, log_probability_at())
    return [*cell, f"{len(nats.each)}", *(f"{of.mean:.3f}" for of in recalls), f"{nats.mean:.4f}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _draw(experiment: TrainingExperiment, measured: Measured) -> str:
    """Draw recall by distance with intervals: a panel for each arithmetic, a line for each mask."""
    distances = sorted(experiment.measure.distances)
    variants = list(dict.fromkeys(variant for of in experiment.cells.values() for variant in of))

    def put(canvas: Figure) -> None:
        panels = canvas.subplots(1, len(experiment.cells), sharey=True, squeeze=False)[0]
        for axes, arithmetic in zip(panels, experiment.cells, strict=True):
            for cell in _cells(experiment, measured):
                if cell[0] != arithmetic:
                    continue
                number = variants.index(cell[1])
                recalls = [_over_seeds(measured, cell, recall_at(place)) for place in range(len(distances))]
                half = [of.high - of.mean if len(of.each) > 1 else 0.0 for of in recalls]
                shifted = [distance + 8 * (number - 1.5) for distance in distances]
                means = [of.mean for of in recalls]
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

    return draw_svg("experiment", put, (8.4, 3.0))
