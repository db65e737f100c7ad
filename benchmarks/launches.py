"""Counts what a training step of SmolLM2's shape asks of a GPU, without a GPU: kernels launched and bytes moved.

    python -m benchmarks.launches

The step runs in bfloat16 on the device of shapes (`torchtrain.tests.shapes_only`), eagerly, and recomputes its layers.
`transformers` is a plain loop with SDPA and fused AdamW on bfloat16 weights; `transformers_masters` keeps float32
masters, as torchtrain does. The results go to benchmarks/results/launches.json.

A launch is an operation of ATen, or a custom one, that reads or writes memory of the device. Views and allocations are
none. Attention's forward pass counts as one, and its backward pass as one. Operations on lists of tensors count as the
kernels into which CUDA cuts the lists (aten/src/ATen/native/cuda/MultiTensorApply.cuh). Bytes are those of the tensors
that an operation reads and writes, each once. Of a table that is looked up, only the rows that are read count.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from torchtrain.attention.hf import implementation_name, register
from torchtrain.config import ModelConfig, PackConfig, TrainConfig
from torchtrain.data import stack_rows
from torchtrain.distributed.world import World
from torchtrain.modeling.load import set_up_layers
from torchtrain.modeling.recompute import hand_layers_over
from torchtrain.tests.shapes_only.device import DEVICE, ShapesOnly
from torchtrain.tests.shapes_only.step import draw_row
from torchtrain.training.step import make_micro_batches, take_step
from torchtrain.training.strategy import Replicated

COMMAND = "python -m benchmarks.launches"
OUT = Path(__file__).parent / "results" / "launches.json"
SHAPE = Path(__file__).parents[1] / "torchtrain/modeling/published/smollm2"
LOOPS = ("ours_full", "ours_anchor", "transformers", "transformers_masters")
LENGTHS = (4096, 16_384)
WEIGHTED = 2600.0  # E[n^2] / E[n] of the documents, in tokens
CHUNK, BLOCKS = 65_536, 320  # elements a block of a multi-tensor kernel takes, and blocks of a launch
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # of a launch, by how many lists there are
LOOKED_UP = {"aten::embedding", "aten::index_select", "aten::index.Tensor", "aten::gather"}
WITHOUT_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "_reshape_alias"}


Row = dict[str, Tensor]  # the five arrays [1, T], on the host
_RATE = 1e-5


class Launches(TorchDispatchMode):
    """Counts the launches of the block, by operation, and the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # transformers asks whether a row is one document, and makes a mask unless it is
        made = func(*args, **(kwargs or {}))
        name = func.name()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        new = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.is_meta]
        if func.is_view or func._opname in WITHOUT_KERNEL or not any(x.numel() for x in (*given, *new)):
            return made
        self.by_name[name] += _launches_of(func, args)
        if name in LOOKED_UP:
            given = [new[0], *given[1:]]
        storages = {x.untyped_storage()._cdata: min(x.nbytes, x.untyped_storage().nbytes()) for x in (*given, *new)}
        self.bytes += sum(storages.values())
        return made


def _launches_of(func: Any, args: Any) -> int:
    """Return the kernels of an operation: more than one where it takes lists of tensors."""
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    name = func._schema.name
    if not name.startswith(("aten::_foreach_", "aten::_fused_")):
        return 2 if name == "aten::slice_backward" else 1  # zeros, and a copy into them
    most = TENSORS[min(len(lists), 4) + (not name.endswith("_"))]  # one more list is the result's
    launches = tensors = blocks = 0
    for x in lists[0]:
        tensors, left = tensors + 1, math.ceil(x.numel() / CHUNK)
        while left:
            taken = min(left, BLOCKS - blocks)
            left, blocks = left - taken, blocks + taken
            if blocks == BLOCKS or (tensors == most and not left):
                launches, tensors, blocks = launches + 1, 1 if left else 0, 0
    launches += blocks > 0
    return launches + 2 if name == "aten::_foreach_norm" else launches  # it clears its sums, and adds them up


def make_ours(
    model: LlamaForCausalLM, engine: str, settings: ModelConfig, device: torch.device
) -> Callable[[Row], object]:
    """Return a step of `torchtrain train` on a row. What a run makes ahead of a step is made once for a row."""
    register()
    model.set_attn_implementation(implementation_name(engine))
    set_up_layers(model, settings)
    train, world = TrainConfig(sequences_per_step=1, learning_rate=_RATE, steps=2**20), World(device=device)
    strategy, ready = Replicated(model, train, world), {}

    def take(row: Row) -> object:
        if id(row) not in ready:
            ready[id(row)] = make_micro_batches([row], ["text"], world, engine)
        return take_step(strategy, ready[id(row)], ["text"], 0, train, lambda loss: None)

    return take


def make_plain(
    model: LlamaForCausalLM, masters: bool, device: torch.device, recomputed: bool = True
) -> Callable[[Row], object]:
    """Return a step of a plain loop: SDPA, fused AdamW, float32 masters if asked for; documents see each other."""
    model.set_attn_implementation("sdpa")
    if recomputed:
        hand_layers_over(model)
    weights: list[Tensor] = list(model.parameters())
    own = [x.detach().float() for x in weights] if masters else weights
    optimizer, ready = torch.optim.AdamW(own, lr=_RATE, fused=True), {}

    def take(row: Row) -> object:
        if id(row) not in ready:
            labels = F.pad(row["shift_labels"][:, :-1], (1, 0), value=-100)  # transformers shifts them itself
            ready[id(row)] = row["input_ids"].to(device), labels.to(device)
        tokens, labels = ready[id(row)]
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        if masters:
            for master, weight in zip(own, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if masters:
            torch._foreach_copy_([weight.data for weight in weights], own)
        return loss.item()

    return take


def _attend_once(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
    """SDPA as one kernel, as CUDA runs it; of shapes torch would take it apart."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]


def count(loop: str, tokens: int, layers: int = 30) -> dict[str, Any]:
    """Count a step of one row, after a first one, which made the optimizer's state."""
    config = LlamaConfig.from_pretrained(SHAPE, max_position_embeddings=tokens, num_hidden_layers=layers)
    variant = "anchor" if loop.endswith("anchor") else "full"
    rows = [stack_rows([draw_row(PackConfig(sequence_length=tokens, variant=variant), WEIGHTED)])]
    has_foreach = [*_foreach_utils._get_foreach_kernels_supported_devices(), DEVICE.type]
    with (
        ShapesOnly(),
        patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: has_foreach),
        patch.object(F, "scaled_dot_product_attention", _attend_once),
    ):
        with torch.device(DEVICE):
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = LlamaForCausalLM(config).train()
            finally:
                torch.set_default_dtype(torch.float32)
        if loop.startswith("ours"):
            settings = ModelConfig(source="smollm2", activation_checkpointing=True, fused="none")
            take = make_ours(model, "flash", settings, DEVICE)
        else:
            take = make_plain(model, loop.endswith("masters"), DEVICE)
        for _ in range(2):
            with Launches() as launches:
                take(rows[0])
    return {
        "launches": sum(launches.by_name.values()),
        "gigabytes": round(launches.bytes / 1e9, 2),
        "most": dict(launches.by_name.most_common(12)),
    }


def main() -> None:
    """Count each loop at each length, and write the results."""
    register()
    found = {loop: {str(tokens): count(loop, tokens) for tokens in LENGTHS} for loop in LOOPS}
    OUT.write_text(
        json.dumps({"what": "launches", "command": COMMAND, "torch": torch.__version__, **found}, indent=2) + "\n"
    )
    for loop, lengths in found.items():
        for tokens, at in lengths.items():
            of = at["launches"] / found["transformers"][tokens]["launches"]
            print(f"{loop:20} {int(tokens):7,} {at['launches']:6,} launches ({of:.3f}) {at['gigabytes']:6.1f} GB")


if __name__ == "__main__":
    main()
