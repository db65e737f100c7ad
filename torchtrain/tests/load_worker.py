"""What the processes of `test_load_cut.py` run: `load_worker CASES OUT`, CASES a JSON list as `distributed_worker`'s.

Each case is loaded twice, whole and then cut up by DeepSpeed's engine, and cut up as it is read; each takes a step. A
rank leaves what differs in OUT as NAME-RANK.json: a list of names, empty if all bits are the same. A case with
`mistake` is loaded the second way alone, and leaves what was said; one with `memory` leaves by how many bytes the
process grew at most, loaded the second way and then the first.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import core_model_loading
from transformers.models.mistral.modeling_mistral import MistralMLP

from anchorline.errors import UserError
from torchtrain.config import Config
from torchtrain.distributed.cut import Cutter
from torchtrain.distributed.world import World
from torchtrain.errors import OtherRankFailed
from torchtrain.modeling.load import check_same_files, load_for_training
from torchtrain.modeling.source import open_config
from torchtrain.tests.distributed_worker import DOMAINS, ENGINE, config_of, forget, micro_batches, write_json
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Zero, make_strategy

_MMAP_THRESHOLD = -3  # malloc.h: from how many bytes on memory comes from the system, page by page


def load(config: Config, world: World, cut: bool) -> Any:
    """Load a case's model as `set_up` does, whole or cut up."""
    source = config.model.source
    check_same_files(source, world)
    dtype = getattr(torch, config.model.dtype)
    cutter = Cutter(config.distributed, config.train, dtype, world) if cut else None
    return load_for_training(source, open_config(source), config.model, ENGINE, world.device, cutter)


def one_step(case: dict[str, Any], config: Config, world: World, cut: bool) -> dict[str, Tensor]:
    """Load and take a step; return every number that this rank had before it, of it and after it."""
    torch.manual_seed(0)  # before, as `set_up` does: a model may have dropout
    model = load(config, world, cut)
    found = {f"buffer {name}": x.clone() for name, x in model.named_buffers()}
    strategy = make_strategy(model, ENGINE, config.distributed, config.train, world)
    assert isinstance(strategy, Zero)

    def note(when: str) -> None:
        optimizer = strategy.deepspeed.optimizer
        for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            # What fills the last parts up was never set.
            found[f"{when}: masters {number}"] = torch.cat(
                [
                    x.detach()[: max(0, min(x.numel(), p.ds_numel - x.numel() * world.rank))]
                    for p, x in zip(optimizer.fp16_groups[number], master.split(sizes(optimizer, number)), strict=True)
                ]
            ).clone()
        for name, x in (strategy.weights() or {}).items():
            found[f"{when}: {name}"] = x

    note("before")
    losses, pairs = accumulate(
        strategy,
        make_micro_batches(micro_batches(case, config, world), DOMAINS, world),
        DOMAINS,
        config.train.loss_chunk,
    )
    found["losses"] = torch.tensor([losses.overall.total, losses.overall.tokens, pairs], dtype=torch.float64)
    found["norm"] = torch.tensor(strategy.step(config.train.learning_rate), dtype=torch.float64)
    note("after")
    forget(strategy)
    return found


def sizes(optimizer: Any, number: int) -> list[int]:
    """Elements of each parameter's part in a group's masters."""
    return [p.ds_tensor.numel() for p in optimizer.fp16_groups[number]]


def differences(case: dict[str, Any], config: Config, world: World) -> list[str]:
    """Names of what has other bits."""
    whole, cut = (one_step(case, config, world, cut) for cut in (False, True))
    assert whole.keys() == cut.keys()
    return [name for name in whole if not same(whole[name], cut[name])]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(x.flatten().view(torch.uint8) for x in (a, b)))


def growth(config: Config, world: World, cut: bool) -> int:
    """Bytes of its own that the process has more than before, when it has most: looked at as each weight comes.

    Pages of a mapped file are not its own: ranks of a machine share them, and the system takes them back.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 2**16)  # what is freed is given back, and not kept for later
    gc.collect()
    libc.malloc_trim(0)
    before = most = own_bytes()
    real = core_model_loading.set_param_for_module

    def look(*args: Any) -> None:
        nonlocal most
        real(*args)
        most = max(most, own_bytes())

    core_model_loading.set_param_for_module = look
    try:
        model = load(config, world, cut)
    finally:
        core_model_loading.set_param_for_module = real
    assert model.training
    return max(most, own_bytes()) - before


def own_bytes() -> int:
    """Memory of this process that no file stands behind."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def run(case: dict[str, Any], rank: int, size: int) -> list[Any]:
    """One case on this rank."""
    config = config_of(case)
    world = World(rank, size, config.distributed.sequence_parallel)
    if "memory" in case:
        return [growth(config, world, cut) for cut in (True, False)]
    if "mistake" not in case:
        return differences(case, config, world)
    if case["mistake"] == rank:
        config = config_of(case | {"model": case["broken"]})
    leak = MistralMLP.forward
    if case["name"] == "leaking":
        MistralMLP.forward = lambda self, x: leak(self, x) + x.roll(1, dims=1)
    try:
        with world.together():
            load(config, world, cut=True)
    except UserError as error:
        return [str(error)]
    except OtherRankFailed:
        return []
    finally:
        MistralMLP.forward = leak
    return ["nothing was found"]


def main() -> None:
    """Run all cases."""
    write_json(run)


if __name__ == "__main__":
    main()
