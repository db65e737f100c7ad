"""The tables of an experiment, made of the runs that have been measured."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from benchmarks.experiment.effects import Estimate, correct, detectable, estimate, log_probability, read, table_of
from benchmarks.experiment.recall import Measurement
from benchmarks.experiment.spec import Contrast, Run, TrainingExperiment

Measured = Mapping[Run, Measurement]
Bases = Mapping[str, dict[str, Any]]


def places_of(name: str) -> list[MarkedPlace]:
    """Return where an experiment's answers and results stand in a page."""
    parts = [f"{part} of {name}" for part in ("answers", "results")]
    return [MarkedPlace(f"<!-- {part}, made by benchmarks.experiment -->", f"<!-- end of {part} -->") for part in parts]


def write_report(
    experiment: TrainingExperiment, measured: Measured, bases: Bases, document: Path | None, name: str
) -> None:
    """Print the tables of what has been measured, or write them into a document.

    document: a Markdown file with the marks of answers and results.
    name: of the experiment, in the marks.
    Raises UserError: the document lacks the marks.
    """
    answers = "\n".join(_answers(experiment, measured, bases))
    results = "\n".join(_results(experiment, measured, bases))
    if document is None:
        print(answers, results, sep="\n\n")
        return
    places = places_of(name)
    save(document, places[1].put(places[0].put(read_marked(document, places), answers), results).encode())


def _answers(experiment: TrainingExperiment, measured: Measured, bases: Bases) -> Iterator[str]:
    failed, left = sum(not base["passed"] for base in bases.values()), _left(experiment, measured, bases)
    runs = sum(run in measured for run in experiment.runs())
    done = f"{runs} of {runs + len(left)} runs are measured"
    yield f"{done}; {failed} of {len(bases)} bases did not pass the gate: {len(bases) - failed} seeds are left."
    yield ""
    effects = [_estimate(experiment, contrast, measured) for contrast in experiment.contrasts]
    corrected = correct([1.0 if effect is None else effect.p for effect in effects])
    rows = []
    for contrast, effect, p in zip(experiment.contrasts, effects, corrected, strict=True):
        if effect is None or effect.seeds < 2:
            shown = ["-", "-", "-", read(contrast, effect, p)]
        else:
            said = f"interim, {effect.seeds} seeds" if left else read(contrast, effect, p)
            shown = [str(effect), f"{p:.4f}", f"{detectable(effect):.5f}", said]
        rows.append([contrast.question, *shown])
    head = ["question", "effect, nats, 95% interval", "p by Holm", "80% power at", "answer"]
    yield from _table(head, rows)


def _estimate(
    experiment: TrainingExperiment, contrast: Contrast, measured: Measured, opening: str = "bos"
) -> Estimate | None:
    distances = sorted(experiment.measure.distances)
    place = None if contrast.distance is None else distances.index(contrast.distance)
    return estimate(table_of(contrast, measured, opening, place), experiment.level)


def _left(experiment: TrainingExperiment, measured: Measured, bases: Bases) -> list[Run]:
    """The runs that are still to come. Until there is none, what the others show is interim."""
    passed = {seed: base["passed"] for seed, base in bases.items()}
    return [run for run in experiment.runs() if run not in measured and passed.get(str(run.seed), True)]


def _results(experiment: TrainingExperiment, measured: Measured, bases: Bases) -> Iterator[str]:
    if left := _left(experiment, measured, bases):
        yield f"{len(left)} runs are still to be measured; the tables by cell follow then."
        return
    distances = sorted(experiment.measure.distances)
    cells, kinds = _cells(experiment, measured), ["arithmetic", "mask"][len(experiment.cells) == 1 :]
    head = [*kinds, *(f"at {distance}" for distance in distances), "mean", "without BOS", "sink"]
    yield from _table(head, [_cell(measured, cell, len(distances))[-len(head) :] for cell in cells])
    if starts := sorted({int(start) for one in measured.values() for start in one.contexts}):
        yield ""
        yield "Held-out loss, without weights, by the tokens that a prediction sees under the mask of training:"
        yield ""
        rows = []
        for cell in cells:
            each = [[one.contexts.get(f"{n}") for run, one in measured.items() if run[:2] == cell] for n in starts]
            rows.append([*cell[-len(kinds) :], *("-" if None in of else f"{np.mean(of):.4f}" for of in each)])
        yield from _table([*kinds, *(f"{start:,} on" for start in starts)], rows)
    if set(experiment.cells) != {"exact"}:
        yield from _rounding(experiment, measured, bases)
    yield ""
    sinks, nats = ([base[name] for base in bases.values()] for name in ("sink", "nats"))
    yield (
        f"Of {len(bases)} bases: the largest share of attention on BOS in a head is {min(sinks):.2f} to "
        f"{max(sinks):.2f}, the loss at answers {min(nats):.4f} to {max(nats):.4f}."
    )


def _rounding(experiment: TrainingExperiment, measured: Measured, bases: Bases) -> Iterator[str]:
    """The contrasts read in other ways, and what the roundings move."""
    yield ""
    head, rows = ["contrast", "in rows without BOS", "read without rounding (not registered)"], []
    for contrast in experiment.contrasts:
        effects = [_estimate(experiment, contrast, measured, rows_of) for rows_of in ("no_bos", "exact")]
        rows.append([contrast.question, *("-" if effect is None else str(effect) for effect in effects)])
    yield from _table(head, rows)
    yield ""
    head = ["bits", "logits' error, rounded before RoPE", "after RoPE", "probabilities moved, before", "after"]
    rows = []
    for bits in experiment.noise:
        names = [f"bits{bits}_{place}{what}" for what in ("", " probabilities") for place in ("before", "after")]
        means = [np.mean([base["noise"][name] for base in bases.values()]) for name in names]
        rows.append([f"{bits}", *(f"{mean:.3g}" for mean in means)])
    yield from _table(head, rows)


def _cells(experiment: TrainingExperiment, measured: Measured) -> list[tuple[str, str]]:
    cells = [(arithmetic, variant) for arithmetic, variants in experiment.cells.items() for variant in variants]
    return [cell for cell in cells if any(run[:2] == cell for run in measured)]


def _of(measured: Measured, cell: tuple[str, str], *of: Any) -> np.ndarray:
    return np.array([log_probability(one, *of) for run, one in measured.items() if run[:2] == cell])


def _cell(measured: Measured, cell: tuple[str, str], distances: int) -> list[str]:
    at = [_of(measured, cell, "bos", number).mean() for number in range(distances)]
    both = [_of(measured, cell, opening).mean() for opening in ("bos", "no_bos")]
    sinks = [one.sink for run, one in measured.items() if run[:2] == cell]
    return [*cell, *(f"{of:.4f}" for of in (*at, *both)), f"{np.mean(sinks):.2f}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
