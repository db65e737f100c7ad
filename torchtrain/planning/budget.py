"""`torchtrain plan`: what a run needs, before it is run.

Reads the config and the model's config.json; no weights, no data.

Memory is per GPU, for P weights on N processes, b bytes each:

    weights     P b, spread over N by ZeRO 3, which then gathers up to GATHERED of them at a time
    gradients   4 P (summed in float32), spread from ZeRO 2 on, where buckets come on top
    optimizer   12 P: float32 masters and two moments (8 P for a float32 model without ZeRO), spread from ZeRO 1 on
    activations and logits: counted by `torchtrain.planning.memory`

What `distributed.offload` keeps in host memory does not count for the GPU.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline.errors import UserError, quoted
from anchorline.files import read_json
from torchtrain.config import Config
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.distributed.zero import BUCKET, GATHERED
from torchtrain.modeling.check import check_config
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import open_config, resolve_source
from torchtrain.planning.flops import FlopCounter, peak_of
from torchtrain.planning.memory import Shapes
from torchtrain.training.events import read_metrics

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
_FLOAT32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU, and on the host for all processes together."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    host: int

    @property
    def gpu(self) -> int:
        """All that one GPU holds at most."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


@dataclass(frozen=True)
class Work:
    """What the run computes."""

    weights: int
    tokens: int  # of all steps
    flops: int  # of all steps, by live pairs
    exact: bool  # whether the live pairs are known: full attention, or a given length of documents


def model_config(config: Config) -> "PretrainedConfig":
    """Open and check the model's config, extended as the run does it.

    Raises:
        UserError: as `set_up`.
    """
    trusted = config.model.trust_remote_code
    source = resolve_source(config.model.source, config.data.cache, weights=False, trust_remote_code=trusted)
    own = open_config(source, trusted)
    check_config(own, config.pack.sequence_length)
    check_heads(config, own)
    return extend(own, config.rope, config.pack.sequence_length)


def memory(config: Config, shapes: Shapes, processes: int) -> Memory:
    """Count a run's memory.

    Args:
        config: the run's, with a layout that is possible.
        shapes: of what `model_config` returned.
        processes: how many, each with a GPU of its own.
    """
    model = shapes.model(config.model)
    sizes = [p.numel() for p in model.parameters()]
    count, largest = sum(sizes), max(sizes)
    bytes_each = model.dtype.itemsize
    stage, offload = config.distributed.zero_stage, config.distributed.offload

    def spread(size: int, from_stage: int) -> int:
        return -(-size // processes) if stage >= from_stage else size

    weights = spread(count * bytes_each, 3)
    gradients = spread(count * _FLOAT32, 2)
    masters = 0 if stage == 0 and bytes_each == _FLOAT32 else 1
    optimizer = spread((masters + 2) * _FLOAT32 * count, 1)
    host = optimizer if offload != "none" else 0
    if offload != "none":
        optimizer = 0
        if stage >= 2:
            host, gradients = host + gradients, 0
    if offload == "all":
        host, weights = host + weights, 0
    if stage:
        # A bucket, and its sum over ranks in float32. A parameter that is larger goes alone.
        gradients += max(BUCKET, largest) * (_FLOAT32 + _FLOAT32)
    if stage == 3:
        weights += min(count, max(GATHERED, largest)) * bytes_each
    tokens = -(-config.pack.sequence_length // config.distributed.sequence_parallel)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=shapes.activations(config.model, config.train.micro_batch, tokens),
        logits=shapes.logits(config.model, config.train.micro_batch * tokens, config.train.loss_chunk),
        host=host * processes,
    )


def work(config: Config, shapes: Shapes, document_tokens: int | None) -> Work:
    """Count a run's tokens and FLOPs, every token of every row with a label.

    Args:
        config: the run's.
        shapes: of what `model_config` returned.
        document_tokens: mean length of a document. Without it attention that is not full is counted as if it were.
    """
    model = shapes.model(config.model)
    rows, length = config.train.steps * config.train.sequences_per_step, config.pack.sequence_length
    full = config.pack.base_variant == "full"
    anchor = 1 if config.pack.base_variant == "anchor" else 0
    pairs = length * (length + 1) // 2
    if not full and document_tokens is not None:
        whole, rest = divmod(length, min(document_tokens, length))
        pairs = whole * _pairs(min(document_tokens, length), anchor) + _pairs(rest, anchor)
    flops = FlopCounter.of(model).flops(length, length, pairs)
    return Work(
        weights=model.num_parameters(),
        tokens=rows * length,
        flops=rows * flops,
        exact=full or document_tokens is not None,
    )


def _pairs(tokens: int, anchor: int) -> int:
    """Live pairs of a document: its own, and those with the anchor."""
    return tokens * (tokens + 1) // 2 + anchor * tokens


def seconds_like(work: Work, run: Path, processes: int) -> float:
    """Seconds of training at the FLOP/s per process that another run reached: the median of its steps but the first.

    Raises:
        UserError: the folder holds no run of two steps or more, or a file of it is damaged.
    """
    steps = [event for event in read_metrics(run / "timing.jsonl") if event["event"] == "step"][1:]
    if not steps:
        raise UserError(f"--measured {quoted(run)}: holds no run of two steps or more; give a run's folder")
    had = read_json(run / "run.json", f"--measured {quoted(run)}").get("processes", 1)
    speeds: list[Any] = [event.get("flops_per_second") for event in steps]
    if not all(_is_positive(number) for number in (had, *speeds)):
        raise UserError(
            f"--measured {quoted(run)}: timing.jsonl or run.json is damaged: processes and flops_per_second are not "
            "numbers above 0; give another run's folder"
        )
    return work.flops / (statistics.median(speeds) / had * processes)


def _is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < 1e30


def seconds_by_mfu(work: Work, gpu: str, mfu: float, processes: int) -> float:
    """Seconds of training at a share of a GPU's peak.

    Raises:
        UserError: no peak is known for a GPU of this name.
    """
    peak = peak_of(gpu)
    if peak is None:
        raise UserError(
            f"--gpu {quoted(gpu)}: no peak is known; give --tokens-per-second or a name such as A100, H100, H200"
        )
    return work.flops / (mfu * peak * processes)


def remedies(config: Config, shapes: Shapes, processes: int, limit: int) -> tuple[list[str], Memory]:
    """Return the overrides, one after another, that bring a run into `limit` bytes a GPU, and its memory with them.

    Cheapest first: what costs nothing, then recomputation, then communication, then transfers to the host. The list may
    not suffice; the memory tells.
    """
    taken: dict[str, int | str | bool] = {}
    held = memory(config, shapes, processes)
    for section, values in _changes(config, processes):
        if held.gpu <= limit:
            break
        changed = config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
        if changed == config:
            continue
        try:
            check_layout(changed, processes)
            check_heads(changed, shapes.config)
        except UserError:
            continue
        now = memory(changed, shapes, processes)
        if now.gpu < held.gpu:
            config, held = changed, now
            taken |= {f"{section}.{name}": value for name, value in values.items()}
    return [f"{name}={str(value).lower()}" for name, value in taken.items()], held


def _changes(config: Config, processes: int) -> Iterator[tuple[str, dict[str, int | str | bool]]]:
    for stage in range(config.distributed.zero_stage + 1, 4):
        yield "distributed", {"zero_stage": stage}
    yield "model", {"activation_checkpointing": True}
    yield "train", {"micro_batch": 1}
    for shared in range(config.distributed.sequence_parallel + 1, processes + 1):
        if processes % shared == 0:
            yield "distributed", {"sequence_parallel": shared}
    yield "distributed", {"offload": "optimizer"}
    yield "distributed", {"offload": "all"}
