"""What the processes of `test_allocation.py` run: `allocation_worker CASES OUT`, CASES a JSON list as
`distributed_worker`'s.

In each case two steps are taken, and after the last backward pass of the second all tensors of this process are found.
A rank leaves their bytes in OUT as NAME-RANK.json, by what they are for.
"""

import gc
from typing import Any

import torch
from torch import Tensor

from torchtrain.checkpoint.state import state_of
from torchtrain.distributed.world import World
from torchtrain.tests.distributed_worker import DOMAINS, ENGINE, config_of, forget, micro_batches, write_json
from torchtrain.tests.load_worker import load
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import make_strategy


def run(case: dict[str, Any], rank: int, size: int) -> dict[str, int]:
    """One case on this rank."""
    config = config_of(case)
    world = World(rank, size, config.distributed.sequence_parallel)
    gc.collect()
    before = {x.untyped_storage().data_ptr() for x in tensors()}
    strategy = make_strategy(load(config, world, config.distributed.zero_stage == 3), ENGINE, config, world)
    for number in range(2):
        accumulate(
            strategy,
            make_micro_batches(micro_batches(case, config, world), DOMAINS, world),
            DOMAINS,
            config.train.loss_chunk,
        )
        if number == 0:
            strategy.step(config.train.learning_rate)
    gc.collect()
    optimizer, masters = state_of(strategy)._adamw()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    parameters = list(strategy.model.parameters())
    kinds = {
        "weights": [getattr(p, "ds_tensor", p) for p in parameters],
        "optimizer": [*masters, *moments],
        "gathered": parameters,  # with ZeRO 3, what stays whole; else the weights, which are found already
        "buffers": list(strategy.model.buffers()),
        "gradients": [x for x in tensors() if x.is_floating_point()],
    }
    seen, found = set(before), {}
    for kind, of_kind in kinds.items():
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in of_kind}
        found[kind] = sum(size for address, size in storages.items() if address not in seen)
        seen |= storages.keys()
    forget(strategy)
    return found


def tensors() -> list[Tensor]:
    """All tensors of this process but the server's, which are frozen."""
    return [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]


def main() -> None:
    """Run all cases."""
    write_json(run)


if __name__ == "__main__":
    main()
