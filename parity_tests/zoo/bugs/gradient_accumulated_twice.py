"""A parameter's gradient is added to its master's and kept, so that the next micro-batch adds it again."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import swap
from torchtrain.training.optimizer import _move_gradient


def _keep_gradient(master, parameter):
    gradient = parameter.grad.float().clone()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


BUG = Bug(
    what="gradients of earlier micro-batches added twice",
    where="llm.c PR 548 (a step's gradients deposited twice); seen in reviews of hand-made float32 accumulation",
    stage="gradients",
    apply=lambda: swap(_move_gradient, _keep_gradient),
    likely={"dtype": "bfloat16"},
)
