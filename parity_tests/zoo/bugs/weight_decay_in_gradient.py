"""Weight decay is added to the gradient (L2) and goes through Adam's moments."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug

BUG = Bug(
    what="weight decay through Adam's moments (L2)",
    where="every framework's Adam(weight_decay=...) before arXiv 1711.05101 told the two apart",
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", torch.optim.Adam),
)
