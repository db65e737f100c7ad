"""A strategy that has made updates, and checkpoints of it without a run."""

import pytest
import torch

from anchorline.files import FileEntry
from torchtrain.checkpoint.manifest import Manifest, ProcessLayout, RunProgress, versions
from torchtrain.checkpoint.state import RankState, state_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import TrainConfig
from torchtrain.distributed.world import ALONE
from torchtrain.tests.tiny import tiny_model
from torchtrain.training.strategy import Replicated

TRAIN = TrainConfig()
LAYOUT = ProcessLayout(
    processes=1,
    sequence_parallel=1,
    zero_stage=0,
    offload="none",
    micro_batch=1,
    loss_chunk=7,
    device="cpu",
    attention="sdpa",
)
IDENTITY = {"tokenizer": "t", "model": {"rope": 1.0}, "data": {"sources": [{"files": "a"}]}, "weights": {"sha256": "d"}}


def make_strategy(dtype: torch.dtype = torch.bfloat16, updates: int = 2) -> Replicated:
    """A strategy that has made updates with random gradients."""
    strategy = Replicated(tiny_model("llama", dtype=dtype), TRAIN)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        for master in strategy.optimizer.masters:
            master.grad = torch.randn(master.shape, generator=generator)
        strategy.step(1e-2)
    return strategy


def contents(strategy: Replicated) -> dict[str, torch.Tensor]:
    state = state_of(strategy)
    found = {f"{kind}:{f.parameter}": x.clone() for f in state.fragments() for kind, x in f.tensors.items()}
    found |= {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    return found | {"updates": torch.tensor(state.updates)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints")


def save(checkpoints: Checkpoints, step: int, strategy: Replicated, keep: int = 9, config: dict | None = None) -> None:
    state = state_of(strategy)
    checkpoints.folder.parent.mkdir(exist_ok=True)
    progress = RunProgress(
        step=step,
        updates=state.updates,
        tokens_seen=7 * step,
        skipped_steps=0,
        recent_losses=[0.1, 1 / 3],
        before=[(1.1, 3)],
        metrics=FileEntry(bytes=0, sha256=""),
    )

    def manifest(entries):
        own = {"progress": progress, "layout": LAYOUT, "config": config or {}, "identity": IDENTITY}
        return Manifest(**own, versions=versions(), parameters=state.parameters, files=entries)

    checkpoints.save(RankState(state, ALONE), manifest, step, keep, ALONE)
