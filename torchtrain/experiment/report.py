"""What an experiment came to: measurements.json, effects.svg and report.md, and the same inside a document.

A report is made of whatever has been measured; it says how far that is.
"""

import io
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from anchorline.errors import UserError, quoted
from anchorline.files import replace_file, save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page import figure_style
from anchorline.page.colours import SERIES
from torchtrain.experiment.effects import (
    CONFIDENCE,
    Contrast,
    Estimate,
    Outcome,
    contrasts,
    estimate,
    loss_from,
    loss_in,
    rounding_cost,
    second_time,
)
from torchtrain.experiment.measuring import Measurement, read_measurement
from torchtrain.experiment.records import NAME, write_records
from torchtrain.experiment.running import Folder, check_folder
from torchtrain.experiment.spec import PairedRun, TrainingExperiment

PLACE = MarkedPlace("<!-- made by torchtrain experiment -->", "<!-- end of torchtrain experiment -->")  # of a document
FIGURE = "effects.svg"

_Measured = dict[tuple[PairedRun, int], Measurement]


def write_report(experiment: TrainingExperiment, path: Path, document: Path | None = None) -> Path:
    """Write the report of what has been measured; return report.md.

    Args:
        experiment: whose.
        path: its folder.
        document: a Markdown file with the two marks, between which the report is put; its figure lies in `figures/`
            beside it.

    Raises:
        UserError: nothing is measured, a measurement is damaged or of other documents, the folder is of another
            experiment, or the document lacks the marks.
    """
    check_folder(experiment, Folder(path))
    measured = read_all(experiment, Folder(path))
    if not measured:
        raise UserError(f"--out {quoted(path)}: nothing is measured yet; run the experiment without --only-report")
    drawn = _draw(experiment, measured).encode()
    if document is not None:
        old = read_marked(document, [PLACE])
        figure = Path("figures") / f"{document.stem}.svg"
        (document.parent / figure).parent.mkdir(exist_ok=True)
        save(document.parent / figure, drawn)
        text = "\n".join(_lines(experiment, measured, str(figure)))
        save(document, PLACE.put(old, text).encode())
    replace_file(path / FIGURE, drawn)
    write_records(experiment, measured, path / NAME)
    text = "\n".join([f"# {experiment.title}", "", *_lines(experiment, measured, FIGURE), ""])
    replace_file(path / "report.md", text.encode())
    return path / "report.md"


def read_all(experiment: TrainingExperiment, folder: Folder) -> _Measured:
    """Return every measurement that is there.

    Raises:
        UserError: one is damaged, or of other documents than the others.
    """
    found: _Measured = {}
    for step in experiment.stages:
        for cell in experiment.cells():
            if (file := folder.measurement(cell, step)).is_file():
                found[cell, step] = one = read_measurement(file)
                if one.documents != next(iter(found.values())).documents:
                    raise UserError(f"{quoted(file)}: is of other documents than the others; remove it")
    return found


def _outcomes(experiment: TrainingExperiment) -> list[tuple[str, Outcome]]:
    """Return what is told of each contrast."""
    first = experiment.measure.bands[min(1, len(experiment.measure.bands) - 1)]
    again = "loss of a passage the second time, less the first"
    return [(f"loss at positions from {first:,} on", loss_from(first)), (again, second_time())]


def _estimates(experiment: TrainingExperiment, measured: _Measured, outcome: Outcome) -> Iterator[Estimate]:
    """Yield each contrast after the stage that most seeds have come to, the last of those."""
    for contrast in contrasts(experiment.arithmetics, experiment.variants):
        found = [one for step in experiment.stages if (one := estimate(contrast, measured, outcome, step)) is not None]
        if found:
            yield max(found, key=lambda one: (len(one.seeds), one.step))


def _lines(experiment: TrainingExperiment, measured: _Measured, figure: str) -> Iterator[str]:
    tokens = _tokens_of_a_step(experiment)
    all_runs = len(list(experiment.cells()))
    dates = sorted({of.date for of in measured.values()})
    where = "; ".join(sorted({of.environment for of in measured.values()}))
    yield f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {where}. How far it has come:"
    yield ""
    yield from _table(
        ["tokens a run", "runs measured", "of"],
        [
            [f"{step * tokens:,}", f"{sum(at == step for _, at in measured)}", f"{all_runs}"]
            for step in experiment.stages
        ],
    )
    yield ""
    yield f"![Each contrast with its interval]({figure})"
    margin = experiment.measure.margin
    over_seeds: list[Estimate] = []
    for title, outcome in _outcomes(experiment):
        yield ""
        yield f"### {title[0].upper()}{title[1:]}"
        yield ""
        rows = []
        for one in _estimates(experiment, measured, outcome):
            over_seeds += [one] if len(one.seeds) > 1 else []
            rows.append(
                [
                    one.contrast.name,
                    one.contrast.question,
                    f"{one.mean:+.4f}",
                    f"{one.low:+.4f} to {one.high:+.4f}",
                    one.over,
                    f"{one.step * tokens:,}",
                    one.verdict(margin),
                ]
            )
        yield from _table(
            ["contrast", "what it asks", "nats a token", "95 per cent", "over", "tokens a run", f"margin {margin:g}"],
            rows,
        )
    if over_seeds:
        beside = sum(one.low > 0 or one.high < 0 for one in over_seeds)
        yield ""
        yield (
            f"Of these {len(over_seeds)} intervals {beside} leave out 0; were all effects none, "
            f"{len(over_seeds) * (1 - CONFIDENCE):.1f} of them would by chance."
        )
    yield from _in_parts(experiment, measured)
    yield ""
    yield "### Every run"
    yield ""
    yield from _runs(experiment, measured, tokens)
    costs = [cost for of in measured.values() if (cost := rounding_cost(of)) is not None]
    if costs:
        yield ""
        yield (
            "Rounding the weights of the models trained in float32 to bfloat16, as the others are saved, adds "
            f"{min(costs):+.5f} to {max(costs):+.5f} nats ({len(costs)} models)."
        )


def _in_parts(experiment: TrainingExperiment, measured: _Measured) -> Iterator[str]:
    """Yield the same contrasts by position and by distance: effects that the means over these may hide."""
    some = next(iter(measured.values()))
    bands = [(_named(*band), loss_in(number)) for number, band in enumerate(some.bands)]
    distances = [(f"{distance:,} tokens", second_time(number)) for number, distance in enumerate(some.distances)]
    margin = experiment.measure.margin
    for title, outcomes in (
        ("Loss by position", bands),
        ("Loss of a passage the second time, less the first, by how far back the first stands", distances),
    ):
        yield ""
        yield f"### {title}"
        yield ""
        yield (
            f"Bold: the interval lies beyond {margin:g} on one side. It is not corrected for how many there are; of "
            "twenty one misses by chance."
        )
        yield ""
        columns = [
            {one.contrast.name: one for one in _estimates(experiment, measured, outcome)} for _, outcome in outcomes
        ]
        rows = [[name, *(_told(column[name], margin) for column in columns)] for name in columns[0]]
        yield from _table(["contrast", *(head for head, _ in outcomes)], rows)
    yield ""
    yield f"The same of single runs, the least and the most: {_least_and_most(measured)}."


def _least_and_most(measured: _Measured) -> str:
    """Tell by distance between what the means of single runs lie, in nats: whether any model copies."""
    told = []
    for number, distance in enumerate(next(iter(measured.values())).distances):
        means = [sum(values) / len(values) for values in map(second_time(number), measured.values())]
        told.append(f"{min(means):+.3f} to {max(means):+.3f} from {distance:,} tokens back")
    return ", ".join(told)


def _told(one: Estimate, margin: float) -> str:
    told = f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
    return f"**{told}**" if one.verdict(margin) in ("more", "less") else told


def _named(first: int, end: int) -> str:
    return f"{first:,}-{end - 1:,}"


def _runs(experiment: TrainingExperiment, measured: _Measured, tokens: int) -> Iterator[str]:
    bands = next(iter(measured.values())).bands
    distances = next(iter(measured.values())).distances
    rows = []
    for (cell, step), found in measured.items():
        means = [sum(column) / len(column) for column in zip(*found.losses, strict=True)]
        passage = sum(found.passages) / len(found.passages)
        copied = [sum(column) / len(column) for column in zip(*found.copies, strict=True)]
        rows.append(
            [cell.arithmetic, cell.variant, f"{cell.seed}", f"{step * tokens:,}"]
            + [f"{mean:.4f}" for mean in (*means, passage, *copied)]
        )
    head = [_named(*band) for band in bands] + ["passage", *(f"again {distance:,}" for distance in distances)]
    yield from _table(["arithmetic", "variant", "seed", "tokens", *head], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _tokens_of_a_step(experiment: TrainingExperiment) -> int:
    config = experiment.config(next(experiment.cells()), Path("runs"), Path("train.jsonl"))
    return config.train.sequences_per_step * config.pack.sequence_length


def _draw(experiment: TrainingExperiment, measured: _Measured) -> str:
    """Draw every contrast as a point with its interval, an outcome to a panel."""
    drawn = io.StringIO()
    outcomes = _outcomes(experiment)
    taken = [one.contrast for _, outcome in outcomes for one in _estimates(experiment, measured, outcome)]
    names: list[Contrast] = [one for one in contrasts(experiment.arithmetics, experiment.variants) if one in taken]
    with matplotlib.rc_context(figure_style("experiment")):
        canvas = Figure(figsize=(8.4, 0.9 + 0.22 * len(names)), layout="constrained")
        panels = canvas.subplots(1, len(outcomes), sharey=True, squeeze=False)[0]
        for axes, (title, outcome) in zip(panels, outcomes, strict=True):
            margin = experiment.measure.margin
            axes.axvspan(-margin, margin, color=SERIES[2], alpha=0.15, linewidth=0)
            axes.axvline(0, color=SERIES[0], linewidth=0.8)
            for one in _estimates(experiment, measured, outcome):
                at = names.index(one.contrast)
                single = len(one.seeds) == 1
                axes.errorbar(
                    one.mean,
                    at,
                    xerr=[[one.mean - one.low], [one.high - one.mean]],
                    color=SERIES[1],
                    marker="o",
                    markersize=3.5,
                    markerfacecolor="none" if single else SERIES[1],
                    capsize=2,
                    linewidth=1.2,
                )
            axes.set_title(textwrap.fill(title, 36), fontsize=8.5)
            axes.set_xlabel("nats a token")
        panels[0].set_yticks(range(len(names)), [one.name for one in names])
        panels[0].invert_yaxis()
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()
