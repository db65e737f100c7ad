"""What DeepSpeed really allocates, in two processes on gloo with real numbers, is what `plan` counts for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtrain.planning import budget
from torchtrain.planning.memory import Shapes
from torchtrain.tests.distributed_worker import config_of
from torchtrain.tests.forks import forks
from torchtrain.tests.test_load_cut import SETTINGS, batch, write_model
from torchtrain.tests.tiny import tiny_config

PROCESSES = 2
PERSISTENT = 100_000  # weights of a parameter that stays whole; stage3_param_persistence_threshold
BUCKET = 100_000  # smaller than one weight, so that DeepSpeed's buffers do not hide what they hold
# An embedding that ZeRO 3 gathers, and others that stay whole.
OWN = tiny_config(hidden_size=128, vocab_size=1024, num_hidden_layers=1, tie_word_embeddings=False)
CASES = [(stage, dtype) for dtype in ("bfloat16", "float32") for stage in range(4)]


def case(stage: int, dtype: str) -> dict[str, Any]:
    distributed = {"zero_stage": stage, "sequence_parallel": 1, "offload": "none"}
    settings = SETTINGS | {"micro_batch": 1}  # two micro-batches
    return {"name": f"{stage}-{dtype}", "dtype": dtype, "settings": settings, "distributed": distributed}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a function from a case to the bytes of each rank, by kind."""
    folder: Path = tmp_path_factory.mktemp("allocation")
    write_model(OWN, torch.float32, folder / "model")
    torch.save(batch(), folder / "batch.pt")
    (folder / "out").mkdir()
    more = {"model": str(folder / "model"), "batch": str(folder / "batch.pt")}
    (folder / "cases.json").write_text(json.dumps([case(*arguments) | more for arguments in CASES]))
    done = forks().run(
        str(folder / "cases.json"),
        str(folder / "out"),
        main="torchtrain.tests.allocation_worker",
        processes=PROCESSES,
        log=folder / "log",
        set={"torchtrain.distributed.zero.BUCKET": BUCKET},
    )
    assert done["codes"] == [0] * PROCESSES, (folder / "log").read_text()[-6000:]

    def of(stage: int, dtype: str) -> list[dict[str, int]]:
        return [json.loads((folder / "out" / f"{stage}-{dtype}-{rank}.json").read_text()) for rank in range(PROCESSES)]

    return of


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_what_is_allocated_is_what_is_planned(found, monkeypatch, stage, dtype):
    monkeypatch.setattr(budget, "BUCKET", BUCKET)
    shapes = Shapes(OWN)
    config = config_of(case(stage, dtype) | {"model": "x"})
    planned = budget.count_memory(config, shapes, PROCESSES)
    sizes, each = [p.numel() for p in shapes.model(config.model).parameters()], getattr(torch, dtype).itemsize
    small = each * sum(size for size in sizes if size <= PERSISTENT)
    for rank in found(stage, dtype):
        assert rank["weights"] == each * sum(sizes) / (PROCESSES if stage == 3 else 1)
        assert rank["optimizer"] == planned.optimizer
        assert rank["gathered"] == (small if stage == 3 else 0)
        if (stage, dtype) == (1, "float32"):  # what it keeps of a micro-batch is gone when that is summed
            assert rank["gradients"] < planned.gradients
        elif stage < 3:
            assert rank["gradients"] == pytest.approx(planned.gradients, rel=0.05)
        else:  # with what is left of having gathered the small weights
            assert planned.gradients < rank["gradients"] < planned.gradients + small
