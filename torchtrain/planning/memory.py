"""What a step holds in memory while it runs, counted on torch's meta device: shapes without numbers.

Every tensor that transformers, autograd, checkpointing, the gathering of keys, FlashAttention and the loss make is
counted while it lives, so no formula of a model's activations is needed. `flash_workspace` counts what FlashAttention's
backward pass takes inside its kernel. A rank that shares rows is counted as if it had short rows of its own: Ulysses
gives it some heads of the whole row, which is as many numbers; the exchange afterwards copies attention's output. On a
GPU the allocator's fragments, the CUDA context (about half a GB) and NCCL's buffers come on top.

Activations and gradients do not peak together: in a step of one micro-batch gradients grow while activations go. So
each moment is kept with the gradients that exist by then; torch's own `MemTracker` keeps the peak alone.

Legend: B batch · t tokens of this rank's part of a row · H query heads · K key/value heads · D head_dim · N query
tokens · M gathered keys.
"""

import copy
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from torchtrain.attention.engines.choice import pad_values
from torchtrain.attention.engines.flash import call_torch_varlen
from torchtrain.attention.engines.gather import gather_keys, gather_queries, scatter_queries
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.config import Config, ModelConfig, Variant
from torchtrain.distributed.shard import ROOM
from torchtrain.marks import ANCHOR
from torchtrain.modeling.adapters import add_adapters
from torchtrain.modeling.parts import LogitRule, head_of, hidden_states
from torchtrain.modeling.recompute import save_memory
from torchtrain.modeling.source import read_by_library
from torchtrain.training.labels import Labels
from torchtrain.training.loss import chunked_cross_entropy
from torchtrain.training.optimizer import WAITING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_STAND_IN, _EXCHANGED = "anchorline_shapes_only", "anchorline_shapes_exchanged"
# Tokens of a document. Each brings a copy of the anchor's keys, which counts where documents are a few tokens long.
_DOCUMENT = 1024
_PROCESSORS = 132  # of an H100 or H200, which have more than an A100: the workspace of `deterministic` grows with them
FLASH_BACKWARD = "torch_attn::_varlen_attn_backward"


class Moment(NamedTuple):
    """What a pass holds at one time, besides weights and what the step keeps of gradients."""

    held: int  # bytes
    summed: int  # of how many weights the step has a gradient by then
    adding: int  # how many weights the gradient has that is just being added to the step's; 0 most of the time


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside the block and still alive: now, at most, and at each moment.

    model: its weights were there before, whatever views the block takes of them.
    splits: as `flash_workspace`.
    waiting: bytes of gradients that wait, at most, until they are added to the step's, beside one more.
    """

    def __init__(self, model: nn.Module, splits: int = 1, waiting: int = 0) -> None:
        super().__init__()
        self.now = self.peak = self.summed = 0
        self._splits, self._most_waiting = splits, waiting
        self._waiting: list[nn.Parameter] = []
        self._moments: dict[tuple[int, int], int] = {}
        self._known: Any = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._known[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        if func._schema.name == FLASH_BACKWARD:
            self._note(self.now + flash_workspace(args, self._splits))
        return result

    def take(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient, and add it to the step's with those that wait, if these are enough."""
        self._waiting.append(parameter)
        if sum(p.nbytes for p in self._waiting) >= self._most_waiting:
            self.add()

    def add(self) -> None:
        """Add the gradients that wait to the step's: they no longer belong to the pass."""
        if self._waiting:
            weights = sum(p.numel() for p in self._waiting)
            self.summed += weights
            self._note(self.now, adding=weights)
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting = []

    def moments(self) -> tuple[Moment, ...]:
        """Return the most that was held for each number of gradients."""
        return tuple(Moment(held, *key) for key, held in self._moments.items())

    def _count(self, x: Tensor) -> None:
        """Count a tensor's storage, unless it is known."""
        storage = x.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        self.now += storage.nbytes()
        weakref.finalize(storage, self._free, storage.nbytes())
        self._note(self.now)

    def _note(self, held: int, adding: int = 0) -> None:
        key = (self.summed, adding)
        self.peak = max(self.peak, held)
        self._moments[key] = max(held, self._moments.get(key, 0))

    def _free(self, size: int) -> None:
        self.now -= size


def flash_workspace(args: Any, splits: int) -> int:
    """Return the bytes that FlashAttention-2's backward kernel takes for itself.

    float32 sums of dq, `splits` times; and dk and dv of
    every query head where key/value heads are fewer. Upstream: flash-attention's csrc/flash_attn/flash_api.cpp,
    mha_varlen_bwd.

    args: of torch's `_varlen_attn_backward`.
    splits: 1; or, where dq is added up in a fixed order, how many blocks of keys run at a time.
    """
    _, q_NHD, k_MKD, _, _, _, cu_seqlens, *_ = args
    (N, H, D), (M, K, _), segments = q_NHD.shape, k_MKD.shape, len(cu_seqlens) - 1
    dq = 4 * splits * (N + 128 * segments) * H * (-(-D // 32) * 32)
    return dq + (0 if H == K else 2 * q_NHD.itemsize * M * H * D)


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass, moment by moment."""

    moments: tuple[Moment, ...]
    weights: int  # that are trained

    def most(
        self,
        again: bool,
        kept: float = 0,
        adding: float = 0,
        bucket: int = 0,
        at_once: int | None = None,
        begun: int = 0,
    ) -> tuple[int, int]:
        """Return (activations, gradients) in bytes at the moment at which most is held.

        again: the step has gradients from the start, those of an earlier micro-batch.
        kept: bytes that the GPU keeps of a weight's gradient.
        adding: bytes more of one that is being added to the step's.
        bucket: weights whose gradients are added at a time, if one parameter has not more.
        at_once: weights at most whose gradients are added at a time.
        begun: bytes more from the pass's first gradient on.
        """
        bucket, at_once = min(bucket, self.weights), self.weights if at_once is None else at_once

        def split(moment: Moment) -> tuple[int, int]:
            more = adding * min(max(moment.adding, bucket), at_once) if moment.adding else 0
            more += begun if moment.summed else 0
            return round(moment.held + more), round(kept * (self.weights if again else moment.summed))

        return max(map(split, self.moments), key=sum)


class Shapes:
    """What runs of one model hold, each counted once.

    config: the model's, extended.
    """

    def __init__(self, config: "PretrainedConfig") -> None:
        self.config = config
        self._models: dict[tuple[Any, ...], PreTrainedModel] = {}
        self._passes: dict[tuple[Any, ...], Pass] = {}

    def model(self, settings: ModelConfig) -> "PreTrainedModel":
        """Return the model of `shape_of_model`."""
        key = _key_of(settings)
        if key not in self._models:
            self._models[key] = shape_of_model(self.config, settings)
        return self._models[key]

    def run(self, config: Config) -> Pass:
        """Count the passes of a run's micro-batch on one rank, every token labelled."""
        train, variant, shared = config.train, config.pack.base_variant, config.distributed.sequence_parallel
        tokens, splits = -(-config.pack.sequence_length // shared), 1
        if shared > 1 and config.distributed.share == "documents":
            tokens = int(tokens * (1 + ROOM))
        if train.deterministic:
            segments = train.micro_batch * (-(-config.pack.sequence_length // _DOCUMENT) if variant.separates else 1)
            splits = -(-_PROCESSORS // (segments * max(1, self.config.num_attention_heads // shared)))
        waiting = WAITING if config.model.dtype == "bfloat16" and not config.distributed.zero_stage else 0
        key = (
            *_key_of(config.model),
            train.micro_batch,
            tokens,
            variant,
            train.loss_chunk,
            splits,
            shared > 1,
            waiting,
        )
        if key not in self._passes:
            plan, model = _plan(variant, train.micro_batch, tokens), self.model(config.model)
            model.set_attn_implementation(_STAND_IN if shared == 1 else _EXCHANGED)
            self._passes[key] = _count_pass(model, plan, train.loss_chunk, splits, waiting)
        return self._passes[key]


def _key_of(settings: ModelConfig) -> tuple[Any, ...]:
    """Return what of a model's settings its shapes depend on."""
    lora = None if settings.lora is None else settings.lora.model_dump_json()
    return settings.dtype, settings.rotation, settings.recomputation, settings.layer_chunk, lora


def shape_of_model(config: "PretrainedConfig", settings: ModelConfig) -> "PreTrainedModel":
    """Build the model on the meta device, in its dtype, in training mode.

    RoPE that goes by the batch's positions is replaced: its tables have the same shapes. Where `auto` may recompute
    layers it does: less may not be there.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    for name, attention in ((_STAND_IN, _attention), (_EXCHANGED, _exchanged_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *_, **__: None)
    config = copy.deepcopy(config)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for table in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if table.get("rope_type") in ("dynamic", "longrope"):
            table["rope_type"] = "default"
    with (
        torch.device("meta"),
        read_by_library(settings.source, "the model cannot be built", settings.trust_remote_code),
    ):
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=_STAND_IN, trust_remote_code=settings.trust_remote_code
        )
    if settings.rotation == "float32":
        from torchtrain.modeling.rotation import rotate_in_float32

        rotate_in_float32(model)
    if settings.lora is not None:
        with torch.device("meta"):
            add_adapters(model, settings.lora, seed=0)
    save_memory(model, settings, most=2)
    return model.train()


def _plan(variant: Variant, rows: int, tokens: int) -> AttentionPlan:
    """Plan rows of documents of `_DOCUMENT` tokens."""
    ids_T = 1 + torch.arange(tokens) // (_DOCUMENT if variant.separates else tokens)
    if variant.has_anchor:
        ids_T[0] = ANCHOR
    return make_plan(ids_T.repeat(rows, 1)).to("meta")


def _count_pass(model: "PreTrainedModel", plan: AttentionPlan, chunk: int | None, splits: int, waiting: int) -> Pass:
    """Run a forward and a backward pass, on the meta device, and count what it holds."""
    B, t = plan.document_ids_BT.shape
    with torch.device("meta"):
        index_n = torch.arange(B * t)
        part = {
            "input_ids": torch.zeros(B, t, dtype=torch.long),
            "position_ids": torch.arange(t).expand(B, -1),
            "document_ids": plan.document_ids_BT,
        }
    with PeakBytes(model, splits, waiting) as watch:
        trained = [p for p in model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(watch.take) for p in trained]
        hidden_BtM = hidden_states(model, part, plan)
        total, _ = chunked_cross_entropy(
            head_of(model), hidden_BtM, Labels(index_n, index_n), chunk, rule=LogitRule.of(model)
        )
        del hidden_BtM
        total.backward()
        watch.add()
        for hook in hooks:
            hook.remove()
    return Pass(watch.moments(), sum(p.numel() for p in trained))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, plan: AttentionPlan, **__: Any
) -> tuple[Tensor, None]:
    """Transformers' calling convention, as `torchtrain.attention.hf` follows it."""
    from torchtrain.attention.hf import round_to_values

    query, key = round_to_values(module, query, key, value)
    q_NHD = gather_queries(query.transpose(1, 2), plan)
    width = value.shape[-1]
    value = pad_values(value, key)
    k_MKD, v_MKD = (gather_keys(x.transpose(1, 2), plan) for x in (key, value))
    return scatter_queries(call_torch_varlen(q_NHD, k_MKD, v_MKD, plan, 1.0, None, None)[0], plan)[..., :width], None


def _exchanged_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """As `_attention`, its output copied as ranks that share a row exchange it."""
    return _attention(*args, **kwargs)[0].clone(), None
