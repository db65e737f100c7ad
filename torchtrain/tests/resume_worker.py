"""What the processes of a test of checkpoints run: `torchrun ... -m torchtrain.tests.resume_worker CASES`.

CASES is a JSON list of the cases of `distributed_worker`, each with a `folder`. All ranks take a case's checkpoint of
step `load` (a folder and a step), if it names one, write it anew as that step, then make `steps` steps and save after
each; with `bad_steps`, first two that must not update. Rank 0 leaves in `folder`:

    checkpoints/        one a step
    arrays.npz          loss.N          [sum, tokens] of step N
                        weight.NAME     after loading, as `Strategy.weights` gathers them
                        read, held      [ranks]: bytes of state files each read then, and of state each writes
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anchorline.files import FileEntry
from torchtrain.checkpoint.manifest import Manifest, ProcessLayout, RunProgress, versions
from torchtrain.checkpoint.state import RankState, state_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config
from torchtrain.distributed.world import World
from torchtrain.tests import distributed_worker as worker
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Strategy, make_strategy


def save(checkpoints: Checkpoints, strategy: Strategy, step: int) -> None:
    """Save with a manifest that says nothing of a run."""
    state, world = state_of(strategy), strategy.world
    none = FileEntry(bytes=0, sha256="")
    counts = {"step": step, "updates": state.updates, "tokens_seen": 0, "skipped_steps": 0}
    progress = RunProgress(**counts, recent_losses=[], before=[], metrics=none)
    spread = {"processes": world.size, "sequence_parallel": world.sequence_parallel, "zero_stage": 0, "offload": "none"}
    layout = ProcessLayout(**spread, micro_batch=1, loss_chunk=1, device="cpu", attention=worker.ENGINE)

    def manifest(files: dict[str, FileEntry]) -> Manifest:
        content = {"progress": progress, "layout": layout, "config": {}, "identity": {}, "versions": versions()}
        return Manifest(**content, parameters=state.parameters, files=files)

    checkpoints.save(RankState(state, world), manifest, step, 99, world)


def _make_bad_steps(strategy: Strategy, batches: list[dict[str, torch.Tensor]], config: Config) -> None:
    """A step that is dropped, and one whose gradient is not a number."""
    rate, chunk = config.train.learning_rate, config.train.loss_chunk
    ready = make_micro_batches(batches, worker.DOMAINS, strategy.world)
    accumulate(strategy, ready, worker.DOMAINS, chunk)
    strategy.drop()
    real = strategy.backward
    strategy.backward = lambda loss, last: real(loss * float("nan"), last)  # type: ignore[method-assign]
    accumulate(strategy, ready, worker.DOMAINS, chunk)
    strategy.backward = real  # type: ignore[method-assign]
    assert not math.isfinite(strategy.step(rate))


def run(case: dict[str, Any], rank: int, size: int) -> None:
    """One case on this rank."""
    config = worker.config_of(case)
    world = World(rank, size, config.distributed.sequence_parallel)
    strategy = make_strategy(worker.load(case), worker.ENGINE, config.distributed, config.train, world)
    batches = worker.micro_batches(case, config, world)
    folder = Path(case["folder"])
    checkpoints = Checkpoints(folder / "checkpoints")
    if rank == 0:
        folder.mkdir()
    world.gather(None)
    arrays: dict[str, Any] = {}
    first = 0
    if case.get("load"):
        source, first = case["load"]
        manifest = Checkpoints(Path(source) / "checkpoints").open(first, world)
        assert manifest is not None
        torch.manual_seed(rank)  # so that what is restored is not what was there
        Checkpoints(Path(source) / "checkpoints").load(state_of(strategy), manifest, world)
        save(checkpoints, strategy, first)
    weights = strategy.weights()
    if weights is not None:
        arrays |= {f"weight.{name}": x.float().numpy().copy() for name, x in weights.items()}
    if case.get("bad_steps"):
        _make_bad_steps(strategy, batches, config)
    for step in range(first + 1, first + 1 + case["steps"]):
        ready = make_micro_batches(batches, worker.DOMAINS, world)
        losses, _ = accumulate(strategy, ready, worker.DOMAINS, config.train.loss_chunk)
        strategy.step(config.train.learning_rate)
        arrays[f"loss.{step}"] = [losses.overall.total, losses.overall.tokens]
        save(checkpoints, strategy, step)
    if rank == 0:
        np.savez(folder / "arrays.npz", **{name: np.asarray(x) for name, x in arrays.items()})  # type: ignore[arg-type]
    if size > 1:
        worker.forget(strategy)


def main() -> None:
    """Run all cases."""
    worker.run_cases(run)


if __name__ == "__main__":
    main()
