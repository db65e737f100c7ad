"""What one rank writes of a checkpoint, as it is between two steps, or a copy of that in host memory."""

from torchtrain.checkpoint import rng
from torchtrain.checkpoint.fragments import share
from torchtrain.checkpoint.state import State
from torchtrain.distributed.world import World


class Part:
    """This rank's share of a state, and the states of its generators of random numbers.

    The fragments are views of what the strategy holds: they are written before the next step, or staged.

    Args:
        state: what the strategy holds, between two steps.
        world: this rank's place.
    """

    def __init__(self, state: State, world: World) -> None:
        held = state.fragments()
        self.parameters = state.parameters
        self.fragments = share(held, world.rank, world.size) if state.everywhere else held
        self.generators = rng.capture()

    def stage(self) -> None:
        """Copy the fragments to host memory: what the strategy does from here on does not reach them."""
        self.fragments = [fragment.copy() for fragment in self.fragments]
