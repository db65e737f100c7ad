"""Whether what is trained is still made of numbers: nothing that is not finite is saved, exported, or trained on."""

from collections.abc import Iterator

from torch import Tensor

from anchorline.errors import UserError
from torchtrain.checkpoint.state import state_of
from torchtrain.modeling.finite import first_not_finite
from torchtrain.training.strategy import Strategy


def check_finite(strategy: Strategy, when: str, advice: str) -> None:
    """Check this rank's weights, masters and moments, between two steps.

    Args:
        strategy: holds them.
        when, advice: for the message.

    Raises:
        UserError: one is not finite: names the tensor.
    """
    if (name := first_not_finite(_tensors_of(strategy))) is not None:
        raise UserError(f"{name} is not finite {when}; {advice}")


def _tensors_of(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    yield from strategy.model.named_parameters()
    for fragment in state_of(strategy).fragments():
        for kind, x_n in fragment.tensors.items():
            yield f"{kind} of {fragment.parameter}", x_n
