"""The trainer's own step on the device of shapes: model, strategy and rows of a config, at full size, on one rank of
any number.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, core_model_loading, modeling_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchtrain.attention import separation
from torchtrain.attention.hf import implementation_name, register
from torchtrain.config import Config, PackConfig
from torchtrain.data import stack_rows
from torchtrain.data.rows import SpanTokens, build_row
from torchtrain.distributed.cut import Cutter
from torchtrain.distributed.world import World
from torchtrain.distributed.zero import import_deepspeed
from torchtrain.modeling import load as loading
from torchtrain.modeling.adapters import add_adapters
from torchtrain.modeling.recompute import save_memory
from torchtrain.modeling.rotation import rotate_in_float32
from torchtrain.planning.budget import count_memory, model_config
from torchtrain.planning.memory import Shapes
from torchtrain.planning.work import read_documents
from torchtrain.tests.shapes_only.device import DEVICE, Held, ShapesOnly
from torchtrain.tests.shapes_only.source import write_source
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Strategy, Zero, make_strategy

DOMAINS = ["text"]
ENGINE = "flash"
FEW = (4, 6)  # depths that stand for all: from a few layers on ZeRO 3 has gathered as many weights as it may
MEAN = 1060  # tokens of a document of SlimPajama


@contextmanager
def rank_of(config: Config, processes: int, rank: int = 0) -> Iterator[World]:
    """Be one rank of many, whose collectives return at once and move nothing."""
    whole = config.distributed.share == "documents"
    world = World(rank, processes, config.distributed.sequence_parallel, DEVICE, whole_documents=whole)
    with ExitStack() as stack:
        if processes > 1 or config.distributed.zero_stage:
            import_deepspeed()
            from torchtrain.tests.shapes_only.accelerator import deepspeed_on_shapes

            place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(processes)}
            stack.enter_context(patch.dict(os.environ, place))
            stack.enter_context(deepspeed_on_shapes())
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
            stack.callback(dist.destroy_process_group)
            stack.callback(ALL_ATTENTION_FUNCTIONS._local_mapping.pop, implementation_name(ENGINE), None)
        yield world


def make(config: Config, world: World, watch: ShapesOnly, layers: int | None = None) -> Strategy:
    """Load the model and make its strategy, as `set_up` and `train` do. Weights that stay whole are not read.

    config: a run's; its model is one whose shapes come with the package, or a folder.
    world: of `rank_of`.
    watch: what watches.
    layers: fewer than the model's, to be quick; memory grows by the same bytes with each.
    """
    register()
    own = _with_layers(model_config(config), layers)
    if config.distributed.zero_stage == 3:
        model = load(own, config, world, watch)
    else:
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(
                own, dtype=getattr(torch, config.model.dtype), attn_implementation=implementation_name(ENGINE)
            )
        if config.model.rotation == "float32":
            rotate_in_float32(model)
        if config.model.lora is not None:
            with torch.device(DEVICE):
                add_adapters(model, config.model.lora, config.run.seed)
        save_memory(model, config.model)
    strategy = make_strategy(model.train(), ENGINE, config.distributed, config.train, world)
    if isinstance(strategy, Zero):
        for x in tree_leaves(getattr(strategy.deepspeed.optimizer, "round_robin_bit16_meta", [])):
            watch.forget(x)
    return strategy


def _with_layers(own: PretrainedConfig, layers: int | None) -> PretrainedConfig:
    """Give a model fewer layers, if any number is given."""
    if layers is not None:
        own.num_hidden_layers = layers
        if getattr(own, "layer_types", None):
            own.layer_types = own.layer_types[:layers]
    return own


def load(own: PretrainedConfig, config: Config, world: World, watch: ShapesOnly) -> PreTrainedModel:
    """Load a model that is cut up as it is read, from files with holes in them; the checks, which need numbers, not."""
    read, begin = core_model_loading._materialize_copy, modeling_utils.convert_and_load_state_dict_in_model

    def read_shape(*args: Any) -> Tensor:
        x = read(*args).to(DEVICE)
        watch.forget(x)  # it is on the host
        return x

    def begin_without(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        for x in (*model.parameters(), *model.buffers()):  # on torch's `meta` device on a GPU, too
            watch.forget(x)
        watch.reset()
        return begin(model, *args, **kwargs)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(core_model_loading, "_materialize_copy", read_shape),
        patch.object(modeling_utils, "convert_and_load_state_dict_in_model", begin_without),
        patch.object(loading, "check_head", lambda model: None),
        patch.object(separation, "check_separation", lambda model: None),
    ):
        source = str(write_source(own, config.model, Path(folder) / "source"))
        cutter = Cutter(config.distributed, config.train, getattr(torch, config.model.dtype), world)
        return loading.load_for_training(source, own, config.model, ENGINE, DEVICE, cutter)


@dataclass(frozen=True)
class Measured:
    """A step on shapes, after a first one, which made the optimizer's state."""

    load: int  # bytes that the device holds at most until the first step
    before: int  # bytes that the device holds between two steps
    peak: int
    at_peak: list[Held]


def measure(config: Config, processes: int, layers: int | None = None, rank: int = 0) -> Measured:
    """Take two steps of a config on one of many ranks, and measure the second. Other arguments as `make`."""
    with rank_of(config, processes, rank) as world, ShapesOnly() as watch:
        strategy = make(config, world, watch, layers)
        loaded = watch.peak
        rows = make_micro_batches(batches(config, world), DOMAINS, world)
        for _ in range(2):
            watch.reset()
            before = watch.now
            losses, _ = accumulate(strategy, rows, DOMAINS, config.train.loss_chunk)
            strategy.step(config.train.learning_rate, losses.gradient_norm)
        found = Measured(loaded, before, watch.peak, watch.at_peak())
        if isinstance(strategy, Zero):
            optimizer = strategy.deepspeed.optimizer
            strategy.deepspeed.destroy()
            _free(optimizer)
        return found


def _free(optimizer: Any) -> None:
    """Let go of what a DeepSpeed optimizer holds on the host: its hooks keep it for the rest of the process."""
    own = optimizer.optimizer
    held = [vars(optimizer), [group["params"] for group in own.param_groups], list(own.state.values())]
    for x in tree_leaves(held):
        if isinstance(x, Tensor) and x.device.type == "cpu":
            x.untyped_storage().resize_(0)


def plan(config: Config, processes: int, layers: int | None = None) -> int:
    """Return the bytes that `torchtrain plan` says a GPU holds."""
    own = _with_layers(model_config(config), layers)
    return count_memory(config, Shapes(own), processes).gpu


def at_full_depth(config: Config, processes: int, few: tuple[int, int] = FEW) -> tuple[float, float]:
    """Return (held, planned) bytes. Layers are alike, so two depths tell those of all."""
    more = (model_config(config).num_hidden_layers - few[0]) / (few[1] - few[0])
    held = [measure(config, processes, layers).peak for layers in few]
    planned = [plan(config, processes, layers) for layers in few]
    return held[0] + more * (held[1] - held[0]), planned[0] + more * (planned[1] - planned[0])


def with_two_micro_batches(config: Config, processes: int) -> Config:
    """Shorten a step to two micro-batches: a later one holds what the second does."""
    two = 2 * config.train.micro_batch * (processes // config.distributed.sequence_parallel)
    train = config.train.model_copy(update={"sequences_per_step": min(two, config.train.sequences_per_step)})
    return config.model_copy(update={"train": train})


def batches(config: Config, world: World) -> list[dict[str, Tensor]]:
    """Return a step's micro-batches, on the host.

    Rows are full and packed as the config says. Their documents are as long as the config's data (`read_documents`):
    lognormal lengths of that E[n^2] / E[n].
    """
    pack, train = config.pack, config.train
    weighted = max(read_documents(config.data.prepared, config.pack.sequence_length).weighted or MEAN, MEAN)
    row = draw_row(pack, weighted)
    turns = train.sequences_per_step // (train.micro_batch * world.data_parallel)
    return [stack_rows([row] * train.micro_batch)] * turns


def draw_row(pack: PackConfig, weighted: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a full row of documents of lognormal lengths, their mean `MEAN` and E[n^2] / E[n] `weighted`."""
    random, left, spans = np.random.default_rng(seed), pack.sequence_length - 1, list[SpanTokens]()
    spread = np.log(weighted / MEAN)  # the variance of the logarithms
    while left:
        size = min(left, max(1, round(random.lognormal(np.log(MEAN) - spread / 2, spread**0.5))))
        spans.append(SpanTokens(np.ones(size, dtype=np.int64), 0, ()))
        left -= size
    return build_row(spans, pack, [1], 0, random)
