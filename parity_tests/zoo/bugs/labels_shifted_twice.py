"""Labels that are already the next token are shifted once more."""

import torch.nn.functional as F
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import batches
from torchtrain.training.labels import IGNORE


def _shifted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"shift_labels": F.pad(batch["shift_labels"][:, 1:], (0, 1), value=IGNORE)}


BUG = Bug(
    what="labels shifted twice",
    where="transformers itself: GIT from 4.49 on (issue 47394), Florence-2 (PR 46898), Moonshine (PR 46784); users: issue 32944",
    stage="loss",
    apply=lambda: batches(_shifted),
)
