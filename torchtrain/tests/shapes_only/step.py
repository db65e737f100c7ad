"""The trainer's own step on the device of shapes: model, strategy and rows of a config, at full size, on one rank of any number."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtrain.attention.hf import implementation_name, register
from torchtrain.config import Config
from torchtrain.data import collate
from torchtrain.data.rows import Segment, build_row
from torchtrain.distributed.world import World
from torchtrain.planning.budget import model_config
from torchtrain.planning.memory import enable_checkpointing
from torchtrain.tests.shapes_only.device import DEVICE
from torchtrain.training.strategy import Strategy, make_strategy

DOMAINS = ["text"]
DOCUMENT = 1060  # tokens, the mean of SlimPajama's


@contextmanager
def rank_of(config: Config, processes: int, rank: int = 0) -> Iterator[World]:
    """Be one rank of many, whose collectives return at once and move nothing."""
    world = World(rank, processes, config.distributed.sequence_parallel, DEVICE)
    with ExitStack() as stack:
        if processes > 1 or config.distributed.zero_stage:
            from torchtrain.tests.shapes_only.accelerator import deepspeed_on_shapes

            place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(processes)}
            stack.enter_context(patch.dict(os.environ, place))
            stack.enter_context(deepspeed_on_shapes())
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
            stack.callback(dist.destroy_process_group)
        yield world


def make(config: Config, world: World, layers: int | None = None) -> Strategy:
    """Build model and strategy, as `set_up` and `train` do after the weights are read."""
    register()
    own = model_config(config)
    own.num_hidden_layers = layers or own.num_hidden_layers
    from transformers import AutoModelForCausalLM

    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            own, dtype=getattr(torch, config.model.dtype), attn_implementation=implementation_name("flash")
        )
    if config.model.activation_checkpointing:
        enable_checkpointing(model)
    return make_strategy(model.train(), "flash", config, world)


def batches(config: Config, world: World, count: int | None = None) -> list[dict[str, Tensor]]:
    """Return a step's micro-batches, on the host: full rows of documents of `DOCUMENT` tokens, packed as the config says."""
    pack, train = config.pack, config.train
    length = pack.sequence_length - 1
    sizes = [DOCUMENT] * (length // DOCUMENT) + [length % DOCUMENT] * (length % DOCUMENT > 0)
    segments = [Segment(np.ones(size, dtype=np.int64), 0, ()) for size in sizes]
    row = build_row(segments, pack, [1], 0, np.random.default_rng(0))
    turns = train.sequences_per_step // (train.micro_batch * world.data_parallel)
    return [collate([row] * train.micro_batch)] * (turns if count is None else count)
