"""The experiment over places: the error of one document at 0 and elsewhere, with a BOS, an anchor or neither."""

from collections.abc import Iterator

from ropestudy.cells import Question
from ropestudy.compute.conditions import EXACT, condition
from ropestudy.compute.engine import Run
from ropestudy.experiments.attention import Comparison, Runs, make_question
from ropestudy.spec import PlacesConfig


def places(section: PlacesConfig, seed: int) -> Iterator[Question]:
    """Every length in every place. Rows that differ by a shift share one float64 run, at the first of their starts."""
    for place, tokens in ((one, tokens) for one in section.places for tokens in one.lengths):
        truth, first = Run(0, 0), place.starts[0]
        streams, comparisons = [Runs(EXACT, (first,))], []
        for number, one in enumerate(map(condition, section.conditions), start=1):
            streams.append(Runs(one, tuple(place.starts)))
            for k, start in enumerate(place.starts):
                own = Run(number, k)
                comparisons.append(
                    Comparison("place", one, "exact", start, first, own, truth, ("propagated",), (truth, own))
                )
        rest = {"opening": place.opening, "gap": place.gap}
        of_row = tokens + (place.opening != "none")
        yield make_question("places", "pretrained", of_row, section.sequences, streams, comparisons, **rest)
