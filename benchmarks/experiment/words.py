"""The words of an experiment's documents: special ones, filler of a Markov chain, and a task's own."""

import numpy as np

from benchmarks.experiment.spec import FactsConfig, Task
from torchtrain.data.streams import random_stream

SPECIAL = BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
TAG = "source"  # what opens a document under +tag
FIRST_FILLER = len(SPECIAL)
SUCCESSORS = 4  # of each filler word
_CHAIN = 0  # what a random stream is for


def vocabulary(task: Task) -> list[str]:
    """Return every word by its token id."""
    filler = [f"f{n}" for n in range(task.filler)]
    if isinstance(task, FactsConfig):
        keys = [f"k{n}" for n in range(task.keys)]
        own = [*keys, *(f"v{key}.{n}" for key in range(task.keys) for n in range(task.values))]
    else:
        own = [f"back{distance}" for distance in task.distances]
    return [*SPECIAL, *filler, *own, TAG]


def chain_of(task: Task) -> np.ndarray:
    """Return what may follow each filler word, int [filler, 4]."""
    random = random_stream(task.seed, _CHAIN)
    return np.array([random.choice(task.filler, SUCCESSORS, replace=False) for _ in range(task.filler)])
