"""The experiments of a study. Each is a section of its configuration: it asks for cells and makes records of them.

`shifts` compares pairs of shifts and lengths. `scores` puts one condition on every scale. `outcomes` looks at the
outputs alone.
"""

from ropestudy.cells import Question
from ropestudy.experiments import outcomes, places, scores, shifts
from ropestudy.spec import StudyConfig

QUESTIONS = {
    "setups": outcomes.setups,
    "dose": outcomes.doses,
    "remedies": scores.remedy,
    "lengths": shifts.lengths,
    "shift_pairs": shifts.shift_pairs,
    "places": places.places,
    "masks": scores.masks,
    "sites": outcomes.sites,
    "factorial": scores.factorial,
    "controls": scores.controls,
}


def make_questions(config: StudyConfig) -> dict[str, list[Question]]:
    """Return the questions of each section, in the order in which they are computed."""
    return {name: list(QUESTIONS[name](section, config.seed)) for name, section in config.experiments.items()}
