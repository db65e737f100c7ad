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
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from torchtrain.attention import dense, flash, gather, hf, plan
from torchtrain.attention.hf import implementation_name, register
from torchtrain.config import TrainConfig
from torchtrain.distributed.world import World
from torchtrain.tests.cuda import standin
from torchtrain.tests.tiny import POSITIONS, VOCABULARY, tiny_model
from torchtrain.training import held_out, labels, loss, losses, micro_batch, optimizer, step
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
    "training/held_out.py measure_held_out: copy to the host",  # the interval's blocks of losses, once a row
}


@dataclass(frozen=True)
class Bug:
    """A patch; `by` stands in the verdict, and `engine` is the one that it shows in."""

    what: str
    by: str
    apply: Callable[[], AbstractContextManager[Any]]
    engine: str = "flash"


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


def trial(engine: str) -> Outcome:
    """Take a step and measure held-out rows, with the same bits each time."""
    register()
    model: Any = tiny_model(dtype=torch.bfloat16)
    model.set_attn_implementation(implementation_name(engine))
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
            found = trial(bug.engine)
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
    good = {engine: trial(engine) for engine in {bug.engine for bug in BUGS.values()}}
    found = {name: verdict(bug, good[bug.engine]) for name, bug in BUGS.items()}
    again = {engine: verdict(Bug("", "", nullcontext, engine), outcome) for engine, outcome in good.items()}
    everywhere = sorted({place for outcome in good.values() for place in outcome.waits})
    if sys.argv[1:] != ["bugs"]:
        Path(sys.argv[1]).write_text(json.dumps({"found": found, "correct": again, "waits": everywhere}))
        return
    for name, bug in BUGS.items():
        print(f"| {bug.what} (`{name}`) | {found[name]} |")


# --- the bugs ---------------------------------------------------------------------------------------------------------


def _around(
    place: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager:
    return patch.object(place, name, change(getattr(place, name)))


def _then(place: Any, name: str, look: Callable[[Any], Any]) -> AbstractContextManager:
    """Do something with what a function returns, and return it."""

    def change(real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            look(result)
            return result

        return changed

    return _around(place, name, change)


def _hasty(real: Callable[..., Any]) -> Callable[..., Any]:
    """Read sums before their copy has arrived."""

    def read(self: losses.Losses, beside: Tensor | None = None) -> None:
        if self._sums_G is not None:
            self._sums_G = self._sums_G.to("cpu", non_blocking=True)
        real(self, None if beside is None else beside.to("cpu", non_blocking=True))

    return read


def _part(change: Callable[[dict[str, Any]], dict[str, Any]]) -> AbstractContextManager:
    """Give the model another part of the batch."""
    return _around(Replicated, "losses", lambda real: lambda self, part, *rest: real(self, change(part), *rest))


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
    "item_in_the_loss": Bug(
        "`.item()` on the losses of each chunk",
        ": item",
        lambda: _then(loss, "_losses", lambda x: x[0].sum().item()),
    ),
    "item_in_a_hook": Bug(
        "gradients looked at one by one",
        ": item",
        lambda: _around(
            optimizer, "_move_gradient", lambda real: lambda m, p: bool(p.grad.isfinite().all()) and real(m, p)
        ),
    ),
    "cpu_in_the_attention": Bug(
        "a `.cpu()` and back in every layer",
        "copy to the device",
        lambda: _around(flash, "gather_queries", lambda real: lambda x, p: real(x.cpu().to(x.device), p)),
    ),
    "norm_on_the_host": Bug(
        "the gradient's norm brought to the host",
        "device",
        lambda: _around(nn.utils, "get_total_norm", lambda real: lambda g: real(g).cpu()),
    ),
    "queries_by_a_mask": Bug(
        "queries taken by a mask in every layer",
        "index by a mask",
        lambda: patch.object(flash, "gather_queries", lambda x, p: x.flatten(0, 1)[p.document_ids_BT.flatten() >= 0]),
    ),
    "plan_in_every_layer": Bug(
        "the plan made anew in every layer",
        "copy to the host",
        lambda: _around(hf, "attend", lambda real: lambda q, k, v, p, **rest: real(q, k, v, p.document_ids_BT, **rest)),
    ),
    "read_before_it_arrives": Bug(
        "losses read before their copy has arrived",
        "numbers",
        lambda: _around(losses.Losses, "read", _hasty),
    ),
    "loss_in_float64": Bug(
        "logits in float64",
        "float64",
        lambda: _around(
            loss, "_losses", lambda real: lambda x, *rest: tuple(y.float() for y in real(x.double(), *rest))
        ),
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
    "copies_waited_for": Bug(
        "labels sent without `non_blocking`",
        "training/labels.py to: copy to the device",
        lambda: _around(labels.Labels, "to", lambda real: lambda self, device, **_: real(self, device)),
    ),
    "wrong_device": Bug(
        "the output made on the first GPU by every process",
        "cuda:0",
        lambda: _around(flash, "scatter_queries", lambda real: lambda x, p, fill=0.0: real(x.to("cuda:0"), p, fill)),
    ),
    "plan_not_moved": Bug(
        "the plan without `.to(device)`",
        "plan.to(device)",
        lambda: patch.object(plan.AttentionPlan, "to", lambda self, device: self),
    ),
    "indices_not_moved": Bug(
        "one index of the plan without `.to(device)`", "same device", lambda: _plan(q_index_N=lambda x: x.cpu())
    ),
    "segments_not_moved": Bug(
        "`cu_seqlens` without `.to(device)`", "device", lambda: _plan(cu_seqlens_k=lambda x: x.cpu())
    ),
    "segments_in_int64": Bug("`cu_seqlens` in int64", "int32", lambda: _plan(cu_seqlens_q=lambda x: x.long())),
    "labels_not_moved": Bug(
        "labels without `.to(device)`",
        "same device",
        lambda: _part(lambda part: part | {"labels": part["labels"].to(torch.device("cpu"))}),
    ),
    "positions_not_moved": Bug(
        "positions without `.to(device)`",
        "same device",
        lambda: _part(lambda part: part | {"position_ids": part["position_ids"].cpu()}),
    ),
    "tokens_not_moved": Bug(
        "tokens without `.to(device)`",
        "same device",
        lambda: _part(lambda part: part | {"input_ids": part["input_ids"].cpu()}),
    ),
    "mask_not_moved": Bug(
        "a mask made on the host",
        "same device",
        lambda: _around(dense, "visible_BTT", lambda real: lambda ids, *window: real(ids.cpu(), *window)),
        "dense",
    ),
    "masters_on_the_host": Bug(
        "master weights left on the host",
        "device",
        lambda: _around(optimizer, "_master", lambda real: lambda p: real(p.cpu())),
    ),
    "memory_not_zeroed": Bug(
        "keys' gradients added up in memory that was never set",
        "numbers",
        lambda: _around(
            torch.Tensor,
            "new_zeros",
            lambda real: lambda x, *size: (x.new_empty if x.ndim == 3 else real.__get__(x))(*size),
        ),
    ),
    "copies_not_masked": Bug(
        "the filling of the anchor's copies added to its gradient",
        "numbers",
        lambda: patch.object(gather.torch.Tensor, "masked_fill", lambda x, *_: x),
    ),
}


if __name__ == "__main__":
    main()
