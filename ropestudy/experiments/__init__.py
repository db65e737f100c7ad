"""The experiments of a study: each is a section of its configuration, asks for cells and makes records of them.

`shifts` compares pairs of shifts, lengths, positions and rotary pairs; `scores` puts one condition on every scale;
`outcomes` looks at the outputs alone.
"""

from collections.abc import Sequence

from ropestudy.cells import Question
from ropestudy.experiments import outcomes, scores, shifts
from ropestudy.spec import StudyConfig


def make_questions(config: StudyConfig, wavelengths: Sequence[float]) -> dict[str, list[Question]]:
    """Return the tasks of each section, in their order. wavelengths: of each rotary pair, in tokens."""
    make = {
        "shift_pairs": shifts.shift_pairs,
        "lengths": shifts.lengths,
        "factorial": scores.factorial,
        "remedies": scores.remedy,
        "controls": lambda section: scores.controls(section, config.seed),
        "masks": scores.masks,
        "setups": outcomes.setups,
        "dose": outcomes.doses,
        "sites": outcomes.sites,
        "frequency": lambda section: shifts.frequency(section, tuple(wavelengths)),
    }
    return {name: list(make[name](section)) for name, section in config.experiments.items()}
