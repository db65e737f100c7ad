"""A bfloat16 model is its own master: updates below 1/256 of a weight are lost."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import swap
from torchtrain.training.optimizer import _master

BUG = Bug(
    what="AdamW in bf16 without master weights",
    where="AReaL issue 1292 (loss three times higher), apex issue 1728 (FusedAdam), NeMo Automodel PR 3444",
    stage="step",
    apply=lambda: swap(_master, lambda parameter: parameter),
    likely={"dtype": "bfloat16"},
)
