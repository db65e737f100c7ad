"""The experiments of a study: each is a section of its configuration, asks for cells and makes records of them.

`shifts` compares pairs of shifts and lengths; `scores` puts one condition on every scale; `outcomes` looks at the
outputs alone.
"""

from ropestudy.cells import Question
from ropestudy.experiments import outcomes, scores, shifts
from ropestudy.spec import StudyConfig


def make_questions(config: StudyConfig) -> dict[str, list[Question]]:
    """Return the questions of each section, in their order."""
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
    }
    return {name: list(make[name](section)) for name, section in config.experiments.items()}
