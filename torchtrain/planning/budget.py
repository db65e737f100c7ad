"""The memory of a run, counted from its config and the model's config.json, without weights or data.

These are the bytes on each of N GPUs for P trained weights of b bytes. A frozen weight (`model.lora`) takes its own
bytes alone.

    weights     P b, spread over N by ZeRO 3, which then gathers them for the modules that run: at most
                `zero.GATHERED` weights, or one that is larger, and a bucket that is fetched ahead
    gradients   4 P (summed in float32), spread from ZeRO 2 on; with ZeRO buckets come on top, and with 1 in float32
                a micro-batch's own
    optimizer   12 P: float32 masters and two moments (8 P for a float32 model without ZeRO), spread from ZeRO 1 on
    activations, with the logits of a chunk, and the gradients that there are at each moment: `planning.memory`

While a run loads, a GPU holds weights and masters. With ZeRO 3 it holds its part of both, what its gradients will be
summed in, and the largest weight, which a check gathers. Each process holds the whole model in host memory while it
loads. With ZeRO 3 that is one weight and its tied one, and then its part, which DeepSpeed moves to the host and back.
The host also holds what `distributed.offload` moves there, inputs of layers (`model.activation_checkpointing:
offload`), the copy that an asynchronous save writes, and the model that the first process gathers to export it.
`torchtrain/tests/shapes_only` holds all of it against what DeepSpeed and the step make.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from pydantic import ValidationError

from anchorline.errors import UserError
from torchtrain.config import LEAST_STAGE, Config, Recomputation
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.distributed.zero import BUCKET, GATHERED
from torchtrain.modeling.recompute import count_host_bytes
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import check_config, open_config, resolve_source
from torchtrain.planning.memory import Shapes
from torchtrain.planning.work import GIB, STATE_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FLOAT32 = 4
LAYER_CHUNK = 8192  # tokens that are proposed for `model.layer_chunk`: enough for a GPU's matrix products
RESERVE = 3 * GIB  # of a GPU: what no shape shows, the CUDA context (0.5 GiB) and NCCL's buffers (1 to 2 GiB)
_ROOM = 0.9  # of a GPU's memory that a proposed layout may hold: the allocator's fragments come on top


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
    def step(self) -> int:
        """All that one GPU holds at most once it trains."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def gpu(self) -> int:
        """All that one GPU holds at most."""
        return max(self.step, self.load)

    @property
    def hosts(self) -> int:
        """All that the hosts hold at most."""
        return max(self.host, self.host_load)

    def of_process(self, processes: int, cpu: bool) -> int:
        """What one process holds at most where its model is; on a CPU that is the host."""
        return self.gpu + (self.host // processes if cpu else 0)


def model_config(config: Config) -> "PretrainedConfig":
    """Open and check the model's config, extended as the run does it. Raises UserError as the run."""
    trusted = config.model.trust_remote_code
    source = resolve_source(config.model.source, config.data.cache, needs="config", trust_remote_code=trusted)
    own = open_config(source, trusted)
    check_config(own, config.pack.sequence_length)
    check_heads(config.distributed, own)
    return extend(own, config.rope, config.pack.sequence_length)


def count_memory(config: Config, shapes: Shapes, processes: int) -> Memory:
    """Count a run's memory, in a layout that is possible for so many processes, each with a GPU of its own."""
    model = shapes.model(config.model)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    held, held_largest = sum(n for n, _ in sizes), max(n for n, _ in sizes)
    count, largest = sum(n for n, trained in sizes if trained), max(n for n, trained in sizes if trained)
    held_part, part = -(-held // processes), -(-count // processes)
    each = model.dtype.itemsize  # bytes
    half = each < _FLOAT32
    stage, offload = config.distributed.zero_stage, config.distributed.offload
    stays = offload == "none"

    weights = each * (held_part if stage == 3 else held)
    optimizer = (2 if stage == 0 and not half else 3) * _FLOAT32 * (part if stage else count)
    host = 0
    if not stays:
        host, optimizer = optimizer + _FLOAT32 * part, 0  # gradients go to where they are used
    if offload == "all":
        host, weights = host + weights, 0
    if config.model.activation_checkpointing == "offload":
        shared = config.distributed.sequence_parallel
        host += count_host_bytes(model, config.train.micro_batch * -(-config.pack.sequence_length // shared))
    host *= processes
    host += STATE_BYTES * count if config.save.asynchronous and config.save.every else 0  # every process its share
    host += each * held  # the export: the first process gathers it, perhaps while a save is written

    rows_at_a_time = config.train.micro_batch * (processes // config.distributed.sequence_parallel)
    again = config.train.sequences_per_step > rows_at_a_time
    passes = shapes.run(config)
    gradients = 0
    if stage == 0:
        # A micro-batch's gradient in the model's dtype becomes the step's by a float32 copy, or is the step's itself.
        adding = (_FLOAT32 if again else 0) - (0 if half or again else _FLOAT32)
        activations, summed = passes.most(again, kept=_FLOAT32, adding=adding)
    elif stage == 1 and not stays:
        gradients = _FLOAT32 * (count + part + BUCKET) + each * largest
        activations, summed = passes.most(again)
    elif stage == 1 and half:  # a gradient is added to the step's, in float32, as soon as it is there
        gradients = _FLOAT32 * count
        activations, summed = passes.most(again, adding=_FLOAT32)
    elif stage == 1:  # a micro-batch's gradient stays until the next one's takes its place
        gradients = _FLOAT32 * BUCKET
        activations, summed = passes.most(again, kept=_FLOAT32)
    elif stage == 2:
        # A step's first gradient makes a rank's part. Of a float32 model every parameter that reaches into it is kept
        # whole, and a micro-batch's as well as the step's.
        own = _FLOAT32 * (part if half else max(part, largest))
        gradients = (own if again else 0) + (0 if stays else each * largest)
        begun = each * BUCKET + (0 if half and again else own)
        # Ranks' parts of a gradient are summed in float32, as soon as they are more than a bucket: several from a copy.
        adding = (each if part <= BUCKET else 0) + (_FLOAT32 if half else 0)
        at_once = part * (BUCKET // part + 1)
        activations, summed = passes.most(again, adding=adding, bucket=BUCKET, at_once=at_once, begun=begun)
    else:
        # The sum over ranks is taken in float32, of a bucket or of a larger parameter alone.
        gradients = _FLOAT32 * (BUCKET + (part if stays else 0))
        # Where it is offloaded: its part on the way to the host, and that in float64 for the norm.
        adding = _FLOAT32 + (0 if stays else 3 * _FLOAT32 / processes)
        activations, summed = passes.most(again, adding=adding, bucket=BUCKET)
        # Weights that are whole at a time: what DeepSpeed keeps, or one larger weight, and a bucket on its way.
        weights += each * min(held, max(GATHERED, held_largest) + BUCKET)

    if stage == 3:
        load = (0 if offload == "all" else each) * held_part + (2 * _FLOAT32 * part if stays else 0)
        load += _FLOAT32 * BUCKET + each * held_largest
        host_load = (each * held_part if offload == "all" else 0) + each * max(2 * held_largest, held_part)
    else:  # DeepSpeed copies weights into one tensor by way of the host where there is no room for both
        masters = (count if half else 0) if stage == 0 else (part if stays else 0)
        load, host_load = each * held + _FLOAT32 * masters, each * held
    return Memory(weights, gradients + summed, optimizer, activations, load, host, host_load * processes)


def propose(config: Config, shapes: Shapes, processes: int, limit: int, cpu: bool = False) -> tuple[list[str], Memory]:
    """Return the overrides that make a run the fastest that `limit` bytes a process hold, and its memory with them.

    Layouts are tried in the order of what they cost: further stages of ZeRO, recomputation, transfers to the host;
    then all of it with chunks of layers, and with the layers' inputs on the host. No time is counted (docs/LOG.md).
    Rows at a time and the ranks that share a row change only where the config as it is does not fit. A tenth of the
    limit stays free, and on a GPU `RESERVE`. Where nothing fits, it is the layout that holds least.
    """
    before = count_memory(config, shapes, processes)
    most = limit - (0 if cpu else RESERVE)
    fits = before.of_process(processes, cpu) <= most
    best, least = list[str](), before
    for changes, changed in _layouts(config, shapes, processes, move_rows=not fits):
        if fits and not changes:  # what follows costs more
            return [], before
        try:
            held = count_memory(changed, shapes, processes)
        except UserError:  # the layers of this model do not go in chunks
            continue
        if held.of_process(processes, cpu) < least.of_process(processes, cpu):
            best, least = changes, held
        if held.of_process(processes, cpu) <= min(_ROOM * limit, most):
            return changes, held
    return ([], before) if fits else (best, least)


def _layouts(config: Config, shapes: Shapes, processes: int, move_rows: bool) -> Iterator[tuple[list[str], Config]]:
    """Yield (overrides, the config with them) of each layout that is possible, each costlier than those before it."""
    chunk = config.model.layer_chunk or LAYER_CHUNK
    kept: tuple[tuple[tuple[Recomputation, int | None], ...], ...] = (
        ((False, None), ("keep_attention", None), (True, None)),
        (("keep_attention", chunk), (True, chunk)),
        (("offload", chunk),),
    )
    rows = [(config.train.micro_batch, config.distributed.sequence_parallel)]
    if move_rows:
        more = range(rows[0][1] + 1, processes + 1)
        rows += [(1, rows[0][1]), *((1, shared) for shared in more if processes % shared == 0)]
    stages = range(1 if processes == 1 else 4)
    for ways in kept:
        for offload, (micro_batch, shared), (recomputed, tokens), stage in product(LEAST_STAGE, rows, ways, stages):
            values = {
                ("distributed", "offload"): offload,
                ("distributed", "sequence_parallel"): shared,
                ("distributed", "zero_stage"): max(stage, LEAST_STAGE[offload]),
                ("model", "activation_checkpointing"): recomputed,
                ("model", "layer_chunk"): tokens,
                ("train", "micro_batch"): micro_batch,
            }
            tree, changes = config.model_dump(), list[str]()
            for (section, field), value in values.items():
                if tree[section][field] != value:
                    tree[section][field] = value
                    changes.append(f"{section}.{field}={'null' if value is None else str(value).lower()}")
            try:
                changed = Config.model_validate(tree)
                check_layout(changed.distributed, changed.train, processes)
                check_heads(changed.distributed, shapes.config)
            except (ValidationError, UserError):  # settings that do not go together, or not with these processes
                continue
            yield changes, changed
