"""`torchtrain plan`: what a run needs, before it is run.

Reads the config and the model's config.json; no weights, no data.

Memory is per GPU, for P weights on N processes, b bytes each, all of which are trained; of frozen ones
(`model.lora`) there are the weights alone:

    weights     P b, spread over N by ZeRO 3, which then gathers them for the modules that run: at most
                `zero.GATHERED` weights, or one that is larger, and a bucket that is fetched ahead
    gradients   4 P (summed in float32), spread from ZeRO 2 on; with ZeRO buckets come on top, and with 1 in float32
                a micro-batch's own
    optimizer   12 P: float32 masters and two moments (8 P for a float32 model without ZeRO), spread from ZeRO 1 on
    activations, with the logits of a chunk: counted by `torchtrain.planning.memory`, together with the gradients that
                there are at each moment

Until the first step, each GPU holds its weights and masters; with ZeRO 3 the parts of both, what its gradients will be
summed in, and the largest weight, which a check gathers. Each host process holds the whole model, or, with ZeRO 3, the
one weight that is read and its tied one, and then its part, which DeepSpeed moves to the host and back. (Of a file of
the run's dtype they are only mapped.)

What `distributed.offload` keeps in host memory does not count for the GPU, nor do the inputs of layers there
(`model.activation_checkpointing: offload`: rows x tokens x width for each layer and rank), the copy of the state that
an asynchronous save is written from (`save.asynchronous`), and the model that the first process gathers to export it.
`torchtrain/tests/shapes_only` holds all of it against what DeepSpeed and the step make.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, Self

from pydantic import ValidationError
from torch import nn

from anchorline.errors import UserError
from torchtrain.config import LEAST_STAGE, Config, Recomputation
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.distributed.zero import BUCKET, GATHERED
from torchtrain.modeling.parts import check_config
from torchtrain.modeling.recompute import count_host_bytes
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import open_config, resolve_source
from torchtrain.planning.memory import Shapes
from torchtrain.planning.work import STATE_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
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
    def gpu(self) -> int:
        """All that one GPU holds at most."""
        return max(self.step, self.load)

    @property
    def step(self) -> int:
        """All that one GPU holds at most once it trains."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def of_process(self, processes: int, cpu: bool) -> int:
        """What one process holds at most where its model is; on a CPU that is the host."""
        return self.gpu + (self.host // processes if cpu else 0)

    @property
    def hosts(self) -> int:
        """All that the hosts hold at most."""
        return max(self.host, self.host_load)


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
    """Open and check the model's config, extended as the run does it. Raises UserError: as `set_up`."""
    trusted = config.model.trust_remote_code
    source = resolve_source(config.model.source, config.data.cache, needs="config", trust_remote_code=trusted)
    own = open_config(source, trusted)
    check_config(own, config.pack.sequence_length)
    check_heads(config, own)
    return extend(own, config.rope, config.pack.sequence_length)


def count_memory(config: Config, shapes: Shapes, processes: int) -> Memory:
    """Count a run's memory.

    config: the run's, with a layout that is possible.
    shapes: of what `model_config` returned.
    processes: how many, each with a GPU of its own.
    """
    model = shapes.model(config.model)
    held, trained = WeightCount.of(model.parameters()), WeightCount.of(p for p in model.parameters() if p.requires_grad)
    count, largest, part = trained.count, trained.largest, trained.part(processes)
    bytes_each = model.dtype.itemsize
    half = bytes_each < _FLOAT32
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

    # The copy that an asynchronous save is written from; every process holds its share.
    staged = STATE_BYTES * count if config.save.asynchronous and config.save.every else 0

    exported = bytes_each * held.count  # by the first process, which gathers it, perhaps while a save is written

    rows_at_a_time = config.train.micro_batch * (processes // config.distributed.sequence_parallel)
    again = config.train.sequences_per_step > rows_at_a_time
    passes = shapes.run(config)
    gradients = 0
    if stage == 0:
        # A micro-batch's gradient in the model's dtype becomes the step's by a float32 copy, or is the step's itself.
        adding = (_FLOAT32 if again else 0) - (0 if half or again else _FLOAT32)
        activations, summed = passes.most(again, kept=_FLOAT32, adding=adding)
    elif stage == 1 and offload != "none":
        gradients = _FLOAT32 * (count + part + BUCKET) + bytes_each * largest
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
        gradients = (own if again else 0) + (bytes_each * largest if offload != "none" else 0)
        begun = bytes_each * BUCKET + (0 if half and again else own)
        # Ranks' parts of a gradient are summed in float32, as soon as they are more than a bucket: several from a copy.
        adding = (bytes_each if part <= BUCKET else 0) + (_FLOAT32 if half else 0)
        at_once = part * (BUCKET // part + 1)
        activations, summed = passes.most(again, adding=adding, bucket=BUCKET, at_once=at_once, begun=begun)
    else:
        # The sum over ranks is taken in float32, of a bucket or of a larger parameter alone.
        gradients = _FLOAT32 * (BUCKET + (part if offload == "none" else 0))
        # Where it is offloaded: its part on the way to the host, and that in float64 for the norm.
        adding = _FLOAT32 + (0 if offload == "none" else 3 * _FLOAT32 / processes)
        activations, summed = passes.most(again, adding=adding, bucket=BUCKET)
        # Weights that are whole at a time: what DeepSpeed keeps, or one larger weight, and a bucket on its way.
        weights += bytes_each * min(held.count, max(GATHERED, held.largest) + BUCKET)
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
    """Bytes on each GPU until the first step; sizes as in `count_memory`."""
    stage, offload = config.distributed.zero_stage, config.distributed.offload
    if stage == 0:
        return bytes_each * held.count + (_FLOAT32 if bytes_each < _FLOAT32 else 0) * trained.count
    if stage < 3:  # DeepSpeed copies weights into one tensor by way of the host where there is no room for both
        return bytes_each * held.count + (_FLOAT32 * trained.part(processes) if offload == "none" else 0)
    parts = (0 if offload == "all" else bytes_each) * held.part(processes)
    parts += (2 * _FLOAT32 if offload == "none" else 0) * trained.part(processes)
    return parts + _FLOAT32 * BUCKET + bytes_each * held.largest


def _host_load(bytes_each: int, held: WeightCount, processes: int, config: Config) -> int:
    """Bytes on the host of a process until the first step; sizes as in `count_memory`."""
    if config.distributed.zero_stage < 3:
        return bytes_each * held.count
    kept = bytes_each * held.part(processes) if config.distributed.offload == "all" else 0
    return kept + bytes_each * max(2 * held.largest, held.part(processes))


def propose(config: Config, shapes: Shapes, processes: int, limit: int, cpu: bool = False) -> tuple[list[str], Memory]:
    """Return the overrides that make a run the fastest that `limit` bytes a process hold, and its memory with them.

    Layouts are tried in the order of what they cost: further stages of ZeRO, recomputation, transfers to the host;
    then all of it with chunks of layers, and with the layers' inputs on the host. No time is counted (docs/LOG.md).
    Rows at a time and the ranks that share a row change only where the config as it is does not fit.

    config: the run's.
    shapes: of what `model_config` returned.
    processes: how many, each with a GPU of its own.
    limit: bytes. What is proposed leaves a tenth of it free, and on a GPU `RESERVE`.
    cpu: whether processes have no GPU.
    Returns where nothing fits, the layout that holds least.
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
                check_layout(changed, processes)
                check_heads(changed, shapes.config)
            except (ValidationError, UserError):  # settings that do not go together, or not with these processes
                continue
            yield changes, changed
