"""`torchtrain plan`: what a run needs, before it is run.

Reads the config and the model's config.json; no weights, no data.

Memory is per GPU, for P weights on N processes, b bytes each, all of which are trained; of frozen ones
(`model.lora`) there are the weights alone:

    weights     P b, spread over N by ZeRO 3, which then gathers them for the modules that run
                (`torchtrain.planning.gathering`)
    gradients   4 P (summed in float32), spread from ZeRO 2 on; with ZeRO buckets come on top, and with 1 a
                micro-batch's own
    optimizer   12 P: float32 masters and two moments (8 P for a float32 model without ZeRO), spread from ZeRO 1 on
    activations, with the logits of a chunk: counted by `torchtrain.planning.memory`, together with the gradients that
                there are at each moment

Until the first step, each GPU holds its weights and masters; with ZeRO 3 the parts of both, what its gradients will be
summed in, and the largest weight, which a check gathers. Each host process holds the whole model, or, with ZeRO 3, the
one weight that is read and its tied one, and then its part, which DeepSpeed moves to the host and back. (Of a file of
the run's dtype they are only mapped.)

What `distributed.offload` keeps in host memory does not count for the GPU, nor do the inputs of layers there
(`model.activation_checkpointing: offload`: rows x tokens x width for each layer and rank), the copy of the state that a
save beside the steps is written from (`save.asynchronous`), and the model that the first process gathers to export it.
`torchtrain/tests/shapes_only` holds all of it against what DeepSpeed and the step make.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import ValidationError
from torch import nn

from anchorline.errors import UserError, quoted
from anchorline.files import read_json
from torchtrain.config import LEAST_STAGE, Config, Recomputation
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.distributed.zero import BUCKET
from torchtrain.modeling.check import check_config
from torchtrain.modeling.offload import count_host_bytes
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import find_published, open_config, resolve_source
from torchtrain.planning.flops import FlopCounter, peak_of
from torchtrain.planning.memory import Shapes
from torchtrain.planning.saves import STATE_BYTES
from torchtrain.training.events import read_metrics

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
_FLOAT32 = 4
LAYER_CHUNK = 8192  # tokens that are proposed for `model.layer_chunk`: enough for a GPU's matrix products
_ROOM = 0.9  # of a GPU's memory; the CUDA context, NCCL and fragments take the rest


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU at the moment at which it holds most, and on the hosts of all processes together."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # with the logits of a chunk
    load: int  # on each GPU before the first step
    host: int  # while it trains, saves and exports
    host_load: int  # before that

    @property
    def gpu(self) -> int:
        """All that one GPU holds at most."""
        return max(self.step, self.load)

    @property
    def step(self) -> int:
        """All that one GPU holds at most once it trains."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def hosts(self) -> int:
        """All that the hosts hold at most."""
        return max(self.host, self.host_load)


@dataclass(frozen=True)
class Work:
    """What the run computes."""

    weights: int
    trained: int  # of them
    tokens: int  # of all steps
    flops: int  # of all steps, by live pairs
    exact: bool  # whether the live pairs are known: full attention, or a given length of documents


class WeightCount(NamedTuple):
    """How many weights there are."""

    count: int
    largest: int  # of one parameter

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> Self:
        """Count parameters."""
        sizes = [p.numel() for p in parameters]
        return cls(sum(sizes), max(sizes))

    def part(self, processes: int) -> int:
        """Return what each of so many processes holds of them."""
        return -(-self.count // processes)


def model_config(config: Config) -> "PretrainedConfig":
    """Open and check the model's config, extended as the run does it.

    Raises:
        UserError: as `set_up`.
    """
    trusted = config.model.trust_remote_code
    source = resolve_source(config.model.source, config.data.cache, needs="config", trust_remote_code=trusted)
    own = open_config(source, trusted)
    check_config(own, config.pack.sequence_length)
    check_heads(config, own)
    return extend(own, config.rope, config.pack.sequence_length)


def published_shapes(config: Config) -> str | None:
    """Return whose shapes `model_config` takes from this package, not from the hub; None if they are the user's."""
    return None if find_published(config.model.source) is None else config.model.source


def memory(config: Config, shapes: Shapes, processes: int) -> Memory:
    """Count a run's memory.

    Args:
        config: the run's, with a layout that is possible.
        shapes: of what `model_config` returned.
        processes: how many, each with a GPU of its own.
    """
    model = shapes.model(config.model)
    held, trained = WeightCount.of(model.parameters()), WeightCount.of(p for p in model.parameters() if p.requires_grad)
    count, largest, part = trained.count, trained.largest, trained.part(processes)
    bytes_each = model.dtype.itemsize
    stage, offload = config.distributed.zero_stage, config.distributed.offload

    weights = bytes_each * (held.part(processes) if stage == 3 else held.count)
    masters = 0 if stage == 0 and bytes_each == _FLOAT32 else 1
    optimizer = (masters + 2) * _FLOAT32 * (part if stage else count)
    host = 0
    if offload != "none":
        host, optimizer = optimizer + _FLOAT32 * part, 0  # gradients go to where they are used
    if offload == "all":
        host, weights = host + weights, 0

    if config.model.activation_checkpointing == "offload":
        shared = config.distributed.sequence_parallel
        host += count_host_bytes(model, config.train.micro_batch * -(-config.pack.sequence_length // shared))

    # What a save beside the steps is written from; every process holds its share.
    staged = STATE_BYTES * count if config.save.asynchronous and any(config.save.schedule(config.train.steps)) else 0

    exported = bytes_each * held.count  # by the first process, which gathers it, perhaps while a save is written

    rows_at_a_time = config.train.micro_batch * (processes // config.distributed.sequence_parallel)
    again = config.train.sequences_per_step > rows_at_a_time
    passes = shapes.run(config)
    gradients = 0
    if stage == 0:
        # A micro-batch's gradient in the model's dtype becomes the step's by a float32 copy, or is the step's itself.
        adding = (_FLOAT32 if again else 0) - (0 if bytes_each < _FLOAT32 or again else _FLOAT32)
        activations, summed, _ = passes.most(_FLOAT32, adding, again)
    elif stage == 1 and offload == "none":
        # A micro-batch's gradient stays until the next one's takes its place. In bfloat16 the step's is kept besides,
        # in float32.
        gradients = _FLOAT32 * (BUCKET if bytes_each == _FLOAT32 else count)
        activations, summed, _ = passes.most(bytes_each, 0, again)
    elif stage == 1:
        gradients = _FLOAT32 * (count + part + BUCKET) + bytes_each * largest
        activations, summed, _ = passes.most(0, 0, again)
    else:
        if stage == 2:
            # Of a float32 model every parameter that reaches into a rank's part is kept whole.
            gradients = _FLOAT32 * (part if bytes_each < _FLOAT32 else max(part, largest))
            gradients += bytes_each * largest if offload != "none" else 0
        else:
            gradients = _FLOAT32 * (BUCKET + (part if offload == "none" else 0))
        # The sum over ranks is taken in float32, of a bucket or of a larger parameter alone, which stage 2 copies.
        adding = _FLOAT32 + (bytes_each if stage == 2 else 0)
        if stage == 3 and offload != "none":  # its part on the way to the host, and that in float64 for the norm
            adding += (_FLOAT32 + 2 * _FLOAT32) / processes
        begun, gathered = (bytes_each * BUCKET, 0) if stage == 2 else (0, bytes_each)
        activations, summed, whole = passes.most(0, adding, again, BUCKET, begun, gathered)
        weights += whole
    return Memory(
        weights=weights,
        gradients=gradients + summed,
        optimizer=optimizer,
        activations=activations,
        host=host * processes + staged + exported,
        load=_load(bytes_each, held, trained, processes, config),
        host_load=_host_load(bytes_each, held, processes, config) * processes,
    )


def _load(bytes_each: int, held: WeightCount, trained: WeightCount, processes: int, config: Config) -> int:
    """Bytes on each GPU until the first step; sizes as in `memory`."""
    stage, offload = config.distributed.zero_stage, config.distributed.offload
    if stage == 0:
        return bytes_each * held.count + (_FLOAT32 if bytes_each < _FLOAT32 else 0) * trained.count
    if stage < 3:  # DeepSpeed copies weights into one tensor by way of the host where there is no room for both
        return bytes_each * held.count + (_FLOAT32 * trained.part(processes) if offload == "none" else 0)
    parts = (0 if offload == "all" else bytes_each) * held.part(processes)
    parts += (2 * _FLOAT32 if offload == "none" else 0) * trained.part(processes)
    return parts + _FLOAT32 * BUCKET + bytes_each * held.largest


def _host_load(bytes_each: int, held: WeightCount, processes: int, config: Config) -> int:
    """Bytes on the host of a process until the first step; sizes as in `memory`."""
    if config.distributed.zero_stage < 3:
        return bytes_each * held.count
    kept = bytes_each * held.part(processes) if config.distributed.offload == "all" else 0
    return kept + bytes_each * max(2 * held.largest, held.part(processes))


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
        trained=model.num_parameters(only_trainable=True),
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

    Cheapest first: what costs nothing, then recomputation, then communication, then transfers to the host; where that
    is too much, chunks of layers, and their inputs to the host. Together they are a config that `load_config` takes.
    The list may not suffice; the memory tells.
    """
    taken: dict[str, int | str | bool] = {}
    held = memory(config, shapes, processes)
    for section, values in _changes(config, processes):
        if held.gpu <= limit:
            break
        if "zero_stage" in values:  # an earlier change may have gone further
            values |= {"zero_stage": max(values["zero_stage"], config.distributed.zero_stage)}
        changed = _revise(config, section, values)
        if changed is None or changed == config:
            continue
        try:
            check_layout(changed, processes)
            check_heads(changed, shapes.config)
            now = memory(changed, shapes, processes)
        except UserError:  # not this layout; or not the layers of this model in chunks
            continue
        if now.gpu < held.gpu:
            config, held = changed, now
            taken |= {f"{section}.{name}": value for name, value in values.items()}
    return [f"{name}={str(value).lower()}" for name, value in taken.items()], held


def fastest(config: Config, shapes: Shapes, processes: int, limit: int) -> tuple[list[str], Memory] | None:
    """Return the overrides that make a run the fastest which `limit` bytes a GPU hold, and its memory with them.

    Tried are, the dearest to have last: transfers to the host, recomputation, and each further stage of ZeRO; then all
    of it again with chunks of layers, and with their inputs on the host. Rows at a time, and how many ranks share one,
    stay: they follow from the length. No time is counted: the order is that of what each costs at any length
    (docs/LOG.md).

    Args:
        config: the run's.
        shapes: of what `model_config` returned.
        processes: how many, each with a GPU of its own.
        limit: bytes, of which `_ROOM` may be used.

    Returns:
        None where nothing fits, the config as it is neither.
    """
    now = _Layout.of(config)
    for layout in _layouts(1 if processes == 1 else 4, config.model.layer_chunk or LAYER_CHUNK, now):
        changed = layout.of_run(config)
        if changed is None:  # this offload needs a higher stage
            continue
        try:
            held = memory(changed, shapes, processes)
        except UserError:  # layers of this model do not go in chunks
            continue
        if held.gpu <= _ROOM * limit or (layout == now and held.gpu <= limit):
            return layout.told(now), held
    return None


class _Layout(NamedTuple):
    """What of a run `fastest` chooses."""

    offload: str
    recomputed: Recomputation
    chunk: int | None
    stage: int

    @classmethod
    def of(cls, config: Config) -> Self:
        model, distributed = config.model, config.distributed
        return cls(distributed.offload, model.recomputation, model.layer_chunk, distributed.zero_stage)

    def of_run(self, config: Config) -> Config | None:
        """Return the config with this layout; None where stage and offload do not go together."""
        changed = _revise(config, "distributed", {"zero_stage": self.stage, "offload": self.offload})
        if changed is None:
            return None
        return _revise(changed, "model", {"activation_checkpointing": self.recomputed, "layer_chunk": self.chunk})

    def told(self, now: "_Layout") -> list[str]:
        """Return the overrides that make this layout of another."""
        names = ("distributed.offload", "model.activation_checkpointing", "model.layer_chunk", "distributed.zero_stage")
        values = (("null" if value is None else str(value).lower()) for value in self)
        return [f"{name}={value}" for name, value, is_, was in zip(names, values, self, now, strict=True) if is_ != was]


def _layouts(stages: int, chunk: int, now: _Layout) -> Iterator[_Layout]:
    """Yield layouts, each dearer to have than those before it, and last the one that there is."""
    ways: tuple[tuple[tuple[Recomputation, int | None], ...], ...] = (
        ((False, None), ("keep_attention", None), (True, None)),
        (("keep_attention", chunk), (True, chunk)),
        (("offload", chunk),),
    )
    for kept in ways:
        for offload, (recomputed, tokens), stage in product(LEAST_STAGE, kept, range(stages)):
            yield _Layout(offload, recomputed, tokens, stage)
    yield now


def _revise(config: Config, section: str, values: dict[str, Any]) -> Config | None:
    """Return a config with other values in a section, validated as a file is; None where they do not go together."""
    tree = config.model_dump()
    try:
        return Config.model_validate(tree | {section: tree[section] | values})
    except ValidationError:
        return None


def _changes(config: Config, processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for stage in range(config.distributed.zero_stage + 1, 4):
        yield "distributed", {"zero_stage": stage}
    for recomputed in ("keep_attention", True):
        yield "model", {"activation_checkpointing": recomputed}
    yield "train", {"micro_batch": 1}
    for shared in range(config.distributed.sequence_parallel + 1, processes + 1):
        if processes % shared == 0:
            yield "distributed", {"sequence_parallel": shared}
    for offload, stage in LEAST_STAGE.items():
        if offload != "none":
            yield "distributed", {"zero_stage": stage, "offload": offload}
    yield "model", {"layer_chunk": LAYER_CHUNK}
    yield "model", {"activation_checkpointing": "offload"}
