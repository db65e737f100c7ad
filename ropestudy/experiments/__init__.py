"""The experiments of a study: each is a section of its configuration, asks for cells and makes records of them.

`shifts` compares pairs of shifts, lengths, positions and rotary pairs; `scores` puts one condition on every scale;
`outcomes` looks at the outputs alone; `bias` at the sign of errors.
"""

from collections.abc import Sequence

from ropestudy.cells import Experiment
from ropestudy.experiments.bias import Bias
from ropestudy.experiments.outcomes import Outcomes
from ropestudy.experiments.scores import Controls, Factorial, FirstToken, MaskPairs, Masks, Remedies
from ropestudy.experiments.shifts import Frequency, Lengths, OwnErrorExperiment, ShiftPairsExperiment
from ropestudy.spec import StudyConfig


def make_experiments(config: StudyConfig, wavelengths: Sequence[float]) -> list[Experiment]:
    """Return the experiments of a study in their order. wavelengths: of each rotary pair, in tokens."""
    make = {
        "shift_pairs": lambda section: [ShiftPairsExperiment(section)],
        "lengths": lambda section: [Lengths(section)],
        "factorial": lambda section: [Factorial(section)],
        "remedies": lambda section: [Remedies(section)],
        "controls": lambda section: [Controls(section, config.seed)],
        "first_token": lambda section: [FirstToken(section)],
        "masks": lambda section: [Masks(section), MaskPairs(section)],
        "own_error": lambda section: [OwnErrorExperiment(section)],
        "setups": lambda section: [Outcomes(section, "setups", "setup")],
        "bias": lambda section: [Bias(section)],
        "dose": lambda section: [Outcomes(section, "dose", "dose")],
        "sites": lambda section: [Outcomes(section, "sites", "site")],
        "frequency": lambda section: [Frequency(section, tuple(wavelengths))],
    }
    return [experiment for name, section in config.experiments.items() for experiment in make[name](section)]
