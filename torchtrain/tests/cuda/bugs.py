"""Bugs of devices: each a small patch of the trainer, and what finds it on the stand-in for CUDA.

    python -m torchtrain.tests.cuda.server bugs         # prints the kill table

A trial is one step of a tiny model on the second GPU, and held-out rows after it. A bug is found if the trial raises,
if the host waits for the device more often than it does without the bug, if something is computed in float64, or if a
number of the result is another.

Legend: B batch · T tokens of a row · N query tokens · M gathered keys.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from torchtrain.attention import hf, plan
from torchtrain.attention.engines import flash
from torchtrain.attention.hf import implementation_name, register
from torchtrain.config import ModelConfig, TrainConfig
from torchtrain.distributed.world import World
from torchtrain.modeling.recompute import save_memory
from torchtrain.tests.cuda import standin
from torchtrain.tests.tiny import POSITIONS, VOCABULARY, tiny_model
from torchtrain.training import held_out, losses, micro_batch, optimizer, step
from torchtrain.training.strategy import Replicated

DEVICE = torch.device("cuda", 1)
# Where the host waits for the device in a step, and what is computed in float64: nowhere else. Each costs the time
# until the device has done all it was given.
WAITS = {
    "training/losses.py add: float64 aten::sum",  # the step's sums of losses
    "training/losses.py add: float64 aten::add",
    "training/losses.py add: float64 aten::cat",
    "training/losses.py read: float64 aten::cat",  # and the norm beside them
    "training/losses.py read: copy to the host",
    "training/held_out.py _losses_in_order: copy to the host",  # the interval's blocks of losses, once a row
}

SAVING = [{"activation_checkpointing": "keep_attention"}, {"activation_checkpointing": "offload", "layer_chunk": 50}]


@dataclass(frozen=True)
class Bug:
    """A patch; `by` stands in the verdict."""

    what: str
    by: str
    apply: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Outcome:
    """What a trial came to."""

    numbers: dict[str, Tensor]
    waits: Counter[str]


def rows(number: int) -> dict[str, Tensor]:
    """A micro-batch [2, T]: an anchor, three documents, padding."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 256, (2, POSITIONS), generator=generator)
    index = torch.arange(POSITIONS).expand(2, -1).clone()
    ids = torch.where(index == 0, 0, 1 + index // 20).masked_fill(index > POSITIONS - 5, -1)
    labels = tokens.roll(-1, 1).masked_fill(ids < 1, -100)
    assert tokens.max() < VOCABULARY
    return {
        "input_ids": tokens,
        "position_ids": index,
        "document_ids": ids,
        "shift_labels": labels,
        "domain_ids": torch.where(ids > 0, ids % 2, -1),
    }


def trial(**settings: Any) -> Outcome:
    """Take a step and measure held-out rows, with the same bits each time. `settings` are those of a model's config."""
    register()
    model: Any = tiny_model(dtype=torch.bfloat16)
    model.set_attn_implementation(implementation_name("flash"))
    save_memory(model, ModelConfig(source="unused", **settings))
    strategy = Replicated(model.to(DEVICE).train(), TrainConfig(), World(device=DEVICE))
    torch.cuda.set_device(DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        domains = ["first", "second"]
        with standin.waits() as waits:
            batches = step.make_micro_batches([rows(0), rows(1)], domains, strategy.world)
            counted, _ = step.accumulate(strategy, batches, domains, chunk=50)
            norm = strategy.step(1e-3, counted.gradient_norm)
            apart = [{name: x[0].numpy() for name, x in rows(i).items()} for i in (2, 3)]
            held = held_out.measure_held_out(model, apart, held_out.HeldOut(domains, 40), 50, strategy=strategy)
    finally:
        torch.use_deterministic_algorithms(False)
    means = [mean.total for found in (counted, held) for mean in found.means()]
    numbers = {"norm": torch.tensor(norm), "losses": torch.tensor(means, dtype=torch.float64)}
    torch.cuda.synchronize()
    return Outcome(numbers | {name: x.cpu() for name, x in model.state_dict().items()}, waits)


def verdict(bug: Bug, good: Outcome) -> str | None:
    """Say how a bug was found, or None."""
    try:
        with bug.apply():
            found = trial()
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
    more = found.waits - good.waits
    if more:
        return sorted(more, key=lambda place: ("float64" not in place, place))[0]
    different = [name for name, x in good.numbers.items() if not torch.equal(x, found.numbers[name])]
    return f"numbers: {different[0]} and {len(different) - 1} more" if different else None


def main() -> None:
    """Write each bug's verdict, as JSON, to the file that is the argument, or print the table where that is `bugs`."""
    torch.set_num_threads(1)
    good = trial()
    found = {name: verdict(bug, good) for name, bug in BUGS.items()}
    again = verdict(Bug("", "", nullcontext), good)
    waits = [sorted(of.waits) for of in (good, *(trial(**settings) for settings in SAVING))]
    if sys.argv[1:] != ["bugs"]:
        Path(sys.argv[1]).write_text(json.dumps({"found": found, "again": again, "waits": waits}))
        return
    for name, bug in BUGS.items():
        print(f"| {bug.what} (`{name}`) | {found[name]} |")


# --- the bugs ---------------------------------------------------------------------------------------------------------


def _around(
    place: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager:
    return patch.object(place, name, change(getattr(place, name)))


def _hasty(real: Callable[..., Any]) -> Callable[..., Any]:
    """Read sums before their copy has arrived."""

    def read(self: losses.Losses, beside: Tensor | None = None) -> None:
        if self._sums_G is not None:
            self._sums_G = self._sums_G.to("cpu", non_blocking=True)
        real(self, None if beside is None else beside.to("cpu", non_blocking=True))

    return read


def _plan(**changes: Callable[[Tensor], Tensor]) -> AbstractContextManager:
    """Change tensors of every plan that goes to the device."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, device: Any) -> Any:
            moved = real(self, device)
            return plan.dataclasses.replace(moved, **{name: f(getattr(moved, name)) for name, f in changes.items()})

        return to

    return _around(plan.AttentionPlan, "to", change)


def _double_rope(real: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].double() * self.inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    return forward


BUGS: dict[str, Bug] = {
    "item_in_a_hook": Bug(
        "gradients looked at one by one",
        ": item",
        lambda: _around(
            optimizer,
            "_move_gradients",
            lambda real: lambda m, p: all(bool(x.grad.isfinite().all()) for x in p) and real(m, p),
        ),
    ),
    "queries_by_a_mask": Bug(
        "queries taken by a mask in every layer",
        "index by a mask",
        lambda: patch.object(flash, "gather_queries", lambda x, p: x.flatten(0, 1)[p.document_ids_BT.flatten() >= 0]),
    ),
    "plan_in_every_layer": Bug(
        "the plan made anew in every layer",
        "attention/plan.py",
        lambda: _around(hf, "attend", lambda real: lambda q, k, v, p, **rest: real(q, k, v, p.document_ids_BT, **rest)),
    ),
    "read_before_it_arrives": Bug(
        "losses read before their copy has arrived",
        "numbers",
        lambda: _around(losses.Losses, "read", _hasty),
    ),
    "rope_in_float64": Bug(
        "RoPE's angles in float64",
        "float64",
        lambda: _around(modeling_llama.LlamaRotaryEmbedding, "forward", _double_rope),
    ),
    "not_pinned": Bug(
        "a batch in memory that may be paged out",
        "copy to the device",
        lambda: patch.object(micro_batch.MicroBatch, "pin_memory", lambda self: self),
    ),
    "wrong_device": Bug(
        "the output made on the first GPU by every process",
        "cuda:0",
        lambda: _around(flash, "scatter_queries", lambda real: lambda x, p, fill=0.0: real(x.to("cuda:0"), p, fill)),
    ),
    "indices_not_moved": Bug(
        "one index of the plan without `.to(device)`", "same device", lambda: _plan(q_index_N=lambda x: x.cpu())
    ),
}


if __name__ == "__main__":
    main()
