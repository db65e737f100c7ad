"""Does our trainer compute the same on two ranks that share a row as on one? python -m examples.same_on_two_ranks

It prints: SAME: 56 arrays within their allowance
"""

import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist

import torchtrain
from examples.tiny import tiny_llama, tiny_rows
from parity_tests.record import record
from torchtrain.config import DistributedConfig, TrainConfig
from torchtrain.distributed.world import World, read_ranks
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import make_strategy

FOLDER = Path(gettempdir()) / "same_on_two_ranks"


def write(path: Path, dtype: torch.dtype, rank: int = 0, ranks: int = 1) -> Path:
    """Record the forward and backward pass of a step."""
    distributed, train = DistributedConfig(sequence_parallel=ranks), TrainConfig(micro_batch=4, sequences_per_step=4)
    model, world = torchtrain.attach(tiny_llama().to(dtype), engine="sdpa"), World(rank, ranks, ranks)
    strategy = make_strategy(model, "sdpa", distributed, train, world)
    batch = torchtrain.collate(list(tiny_rows())[:4])
    batch["domain_ids"] = torch.zeros_like(batch["input_ids"])
    with record(model, path):
        accumulate(strategy, make_micro_batches([batch], ["all"], world), ["all"], None)
    return path


FOLDER.mkdir(exist_ok=True)
rank, ranks, _ = read_ranks()
if ranks == 2:
    dist.init_process_group("gloo")
    write(FOLDER / f"rank{rank}.safetensors", torch.float32, rank, ranks)
    sys.exit()
truth, reference = (write(FOLDER / f"{d}.one".replace("torch.", ""), d) for d in (torch.float64, torch.float32))
two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __spec__.name]
subprocess.run(two, check=True)
command = [sys.executable, "-m", "parity_tests", "compare", FOLDER, "--truth", truth, "--reference", reference]
sys.exit(subprocess.run(command, check=False).returncode)
