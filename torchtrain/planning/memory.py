"""What a step holds in memory, counted on torch's meta device: shapes without numbers.

Every tensor of the model, autograd, attention and loss is counted while it lives. A rank that shares rows is counted as
if it had short rows of its own, which is as many numbers; the exchange copies attention's output. Fragments, the CUDA
context and NCCL's buffers come on top. Activations and gradients do not peak together, so the most is kept for each
number of gradients; torch's own `MemTracker` keeps the peak alone.

Legend: B batch · t tokens of this rank's part of a row · H query heads · K key/value heads · D head_dim · N query
tokens · M gathered keys.
"""

import copy
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from torchtrain.modeling.head import LogitRule, head_of, hidden_states
from torchtrain.modeling.load import without_weights
from torchtrain.modeling.recompute import save_memory
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


class _CountBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside the block, but the model's own, that are still alive.

    splits: as `flash_workspace`.
    waiting: bytes of gradients that wait, at most, until they are added to the step's, beside one more.
    """

    def __init__(self, model: nn.Module, splits: int, waiting: int) -> None:
        super().__init__()
        # The most bytes, by how many weights have a gradient by then and how many get theirs at that moment (mostly 0).
        self.moments: dict[tuple[int, int], int] = {}
        self._now = self._summed = 0
        self._splits, self._most_waiting = splits, waiting
        self._waiting: list[nn.Parameter] = []
        self._known: Any = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._known[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known[storage] = True
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
                self._note()
        if func._schema.name == FLASH_BACKWARD:
            self._note(flash_workspace(args, self._splits))
        return result

    def take(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient, and add it to the step's with those that wait, if these are enough."""
        self._waiting.append(parameter)
        if sum(p.nbytes for p in self._waiting) >= self._most_waiting:
            self.add()

    def add(self) -> None:
        """Add the gradients that wait to the step's: they no longer belong to the pass."""
        if weights := sum(p.numel() for p in self._waiting):
            self._summed += weights
            self._note(adding=weights)
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting = []

    def _note(self, more: int = 0, adding: int = 0) -> None:
        key = (self._summed, adding)
        self.moments[key] = max(self._now + more, self.moments.get(key, 0))

    def _free(self, size: int) -> None:
        self._now -= size


def flash_workspace(args: Any, splits: int) -> int:
    """Return the bytes that FlashAttention-2's backward kernel takes for itself, of the arguments of torch's
    `_varlen_attn_backward`: sums of dq in float32, `splits` times (1; where dq is added up in a fixed order, how many
    blocks of keys run at a time), and dk and dv of every query head. Upstream: flash-attention's
    csrc/flash_attn/flash_api.cpp, mha_varlen_bwd.
    """
    _, q_NHD, k_MKD, _, _, _, cu_seqlens, *_ = args
    (N, H, D), (M, K, _), segments = q_NHD.shape, k_MKD.shape, len(cu_seqlens) - 1
    dq = 4 * splits * (N + 128 * segments) * H * (-(-D // 32) * 32)
    return dq + (0 if H == K else 2 * q_NHD.itemsize * M * H * D)


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass: the bytes that it holds, as `_CountBytes` has them, and how many weights train."""

    moments: dict[tuple[int, int], int]
    weights: int

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
        bucket, at_once: weights, at least and at most, whose gradients are added at a time.
        begun: bytes more from the pass's first gradient on.
        """
        bucket, at_once = min(bucket, self.weights), self.weights if at_once is None else at_once

        def split(moment: tuple[tuple[int, int], int]) -> tuple[int, int]:
            (summed, now), held = moment
            more = (adding * min(max(now, bucket), at_once) if now else 0) + (begun if summed else 0)
            return round(held + more), round(kept * (self.weights if again else summed))

        return max(map(split, self.moments.items()), key=sum)


class Shapes:
    """What runs of one model, with its extended config, hold; each counted once."""

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
        of_pass = (train.micro_batch, tokens, variant, train.loss_chunk, splits, shared > 1, waiting)
        key = (*_key_of(config.model), *of_pass)
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
    """Build the model on the meta device, in training mode; `auto` recomputes layers if it may."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, attention in ((_STAND_IN, _attention), (_EXCHANGED, _exchanged_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *_, **__: None)
    config = copy.deepcopy(config)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for table in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if table.get("rope_type") in ("dynamic", "longrope"):
            table["rope_type"] = "default"
    dtype, trusted = getattr(torch, settings.dtype), settings.trust_remote_code
    model = without_weights(settings.source, config, trusted, dtype=dtype, attn_implementation=_STAND_IN)
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
    B, t = plan.document_ids_BT.shape
    with torch.device("meta"):
        index_n = torch.arange(B * t)
        part = {
            "input_ids": torch.zeros(B, t, dtype=torch.long),
            "position_ids": torch.arange(t).expand(B, -1),
            "document_ids": plan.document_ids_BT,
        }
    with _CountBytes(model, splits, waiting) as watch:
        trained = [p for p in model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(watch.take) for p in trained]
        hidden_BtM, rule = hidden_states(model, part, plan), LogitRule.of(model)
        total, _ = chunked_cross_entropy(head_of(model), hidden_BtM, Labels(index_n, index_n), chunk, rule=rule)
        del hidden_BtM
        total.backward()
        watch.add()
        for hook in hooks:
            hook.remove()
    return Pass(watch.moments, sum(p.numel() for p in trained))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, plan: AttentionPlan, **__: Any
) -> tuple[Tensor, None]:
    """Follow transformers' calling convention, as `torchtrain.attention.hf` does."""
    from torchtrain.attention.hf import round_to_values

    query, key = round_to_values(module, query, key, value)
    q_NHD = gather_queries(query.transpose(1, 2), plan)
    width = value.shape[-1]
    value = pad_values(value, key)
    k_MKD, v_MKD = (gather_keys(x.transpose(1, 2), plan) for x in (key, value))
    return scatter_queries(call_torch_varlen(q_NHD, k_MKD, v_MKD, plan, 1.0, None, None)[0], plan)[..., :width], None


def _exchanged_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Copy the output, too, as ranks that share a row exchange it."""
    return _attention(*args, **kwargs)[0].clone(), None
