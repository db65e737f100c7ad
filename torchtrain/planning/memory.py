"""What a step holds in memory while it runs, counted on torch's meta device: shapes without numbers.

Every tensor that transformers, autograd, checkpointing, the gathering of keys and the loss make is counted while it
lives, so no formula of a model's activations stands here. Stood in for are the attention kernel, by what FlashAttention
makes and keeps, and the exchange between ranks, by the copies that DeepSpeed's Ulysses makes. On a GPU the allocator's
fragments, the CUDA context (about half a GB) and NCCL's buffers come on top.

Activations and gradients do not peak together: in a step of one micro-batch gradients grow while activations go. So
each moment is kept with the gradients that there are by then.

Legend: B batch · T tokens of a row · t tokens of this rank's part · H query heads · K key/value heads · D head_dim · S
ranks that share a row · N query tokens · M gathered keys.
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

from torchtrain.attention.gather import gather_keys, gather_queries, scatter_queries
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.config import Config, ModelConfig
from torchtrain.marks import ANCHOR
from torchtrain.modeling.adapters import add_adapters
from torchtrain.modeling.parts import head_of, hidden_states
from torchtrain.modeling.recompute import SHAPES, save_memory
from torchtrain.modeling.source import read_by_library
from torchtrain.training.labels import Labels
from torchtrain.training.loss import chunked_cross_entropy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_STAND_IN = "anchorline_shapes_only"
# Tokens of a document. Each brings a copy of the anchor's keys, which counts where documents are a few tokens long.
_DOCUMENT = 1024


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside the block and still alive: now, and at most.

    Args:
        model: its weights were there before, whatever views the block takes of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._known[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.now -= size


def shape_of_model(config: "PretrainedConfig", settings: ModelConfig) -> "PreTrainedModel":
    """Build the model on the meta device, in its dtype, in training mode.

    RoPE that goes by the batch's positions is replaced: its tables have the same shapes. Where `auto` may recompute
    layers it does: less may not be there.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(_STAND_IN, _attention)
    AttentionMaskInterface.register(_STAND_IN, lambda *_, **__: None)
    config = copy.deepcopy(config)
    if rope := getattr(config, "rope_parameters", None):
        config.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
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


class Moment(NamedTuple):
    """What a pass holds at one time, besides weights and what the step keeps of gradients."""

    held: int  # bytes
    summed: int  # of how many weights the step has a gradient by then
    adding: int  # how many weights the gradient has that is just being added to the step's; 0 most of the time


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass, moment by moment."""

    moments: tuple[Moment, ...]
    weights: int  # that are trained

    def most(
        self,
        kept: float,
        adding: float,
        again: bool,
        bucket: int = 0,
        begun: int = 0,
        late: float = 0,
        at_once: int | None = None,
    ) -> tuple[int, int]:
        """Return (activations, gradients) in bytes at the moment at which most is held.

        Args:
            kept: bytes that the GPU keeps of a weight's gradient.
            adding: bytes more of one that is being added to the step's.
            again: the step has gradients from the start, those of an earlier micro-batch.
            bucket: weights whose gradients are added at a time, if one parameter has not more.
            begun: bytes more from the pass's first gradient on.
            late: bytes of a weight whose gradient is larger than a bucket, which ZeRO 3 keeps until the next comes.
            at_once: weights at most whose gradients are added at a time.
        """
        latest = {moment.summed: moment.adding for moment in self.moments if moment.adding > bucket} if late else {}
        bucket = min(bucket, self.weights)
        at_once = self.weights if at_once is None else at_once

        def split(moment: Moment) -> tuple[int, int]:
            more = (
                adding * min(max(moment.adding, bucket), at_once)
                if moment.adding
                else late * latest.get(moment.summed, 0)
            )
            more += begun if moment.summed else 0
            return round(moment.held + more), round(kept * (self.weights if again else moment.summed))

        return max(map(split, self.moments), key=sum)


class _Watch(PeakBytes):
    """Counts a pass; a gradient that is added to the step's belongs to the step, and no longer to the pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.summed = 0
        self.moments: dict[tuple[int, int], int] = {}

    def _count(self, x: Tensor) -> None:
        super()._count(x)
        self._note()

    def _note(self, adding: int = 0) -> None:
        key = (self.summed, adding)
        self.moments[key] = max(self.now, self.moments.get(key, 0))

    def take(self, parameter: nn.Parameter) -> None:
        """Add a gradient to the step's."""
        self.summed += parameter.numel()
        self._note(adding=parameter.numel())
        parameter.grad = None


class Shapes:
    """What runs of one model hold, each counted once.

    Args:
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
        model, train, pack = config.model, config.train, config.pack
        shared = config.distributed.sequence_parallel
        key = (*_key_of(model), train.micro_batch, pack.sequence_length, shared, pack.base_variant, train.loss_chunk)
        if key not in self._passes:
            plan = _plan(pack.base_variant, train.micro_batch, -(-pack.sequence_length // shared) * shared)
            self._passes[key] = count_pass(self.model(model), plan, shared, train.loss_chunk)
        return self._passes[key]


def _key_of(settings: ModelConfig) -> tuple[Any, ...]:
    """Return what of a model's settings its shapes depend on."""
    lora = None if settings.lora is None else settings.lora.model_dump_json()
    return settings.dtype, settings.rotation, settings.recomputation, settings.layer_chunk, lora


def _plan(variant: str, rows: int, tokens: int) -> AttentionPlan:
    """Plan rows of documents of `_DOCUMENT` tokens."""
    ids_T = torch.ones(tokens, dtype=torch.long) if variant == "full" else 1 + torch.arange(tokens) // _DOCUMENT
    if variant == "anchor":
        ids_T[0] = ANCHOR
    return make_plan(ids_T.repeat(rows, 1)).to("meta")


def count_pass(model: "PreTrainedModel", plan: AttentionPlan, shared: int, chunk: int) -> Pass:
    """Run a forward and a backward pass, on the meta device, and count what it holds.

    Args:
        model: of `shape_of_model`.
        plan: of whole rows, on the meta device.
        shared: ranks that share a row.
        chunk: tokens whose logits exist at one time.
    """
    B, T = plan.document_ids_BT.shape
    t = T // shared
    with torch.device("meta"):
        index_n = torch.arange(B * t)
        part = {
            "input_ids": torch.zeros(B, t, dtype=torch.long),
            "position_ids": torch.arange(t).expand(B, -1),
            "document_ids": plan.document_ids_BT,
        }
    with _Watch(model) as watch:
        trained = [p for p in model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(watch.take) for p in trained]
        hidden_BtM = hidden_states(model, part, _Shared(plan, shared))
        total, _ = chunked_cross_entropy(head_of(model), hidden_BtM, Labels(index_n, index_n), chunk)
        del hidden_BtM
        total.backward()
        for hook in hooks:
            hook.remove()
    moments = tuple(Moment(held, *key) for key, held in watch.moments.items())
    return Pass(moments, sum(p.numel() for p in trained))


@dataclass(frozen=True)
class _Shared:
    """What a pass hands to its stand-in for attention."""

    plan: AttentionPlan
    ranks: int


@torch.library.custom_op(SHAPES, mutates_args=())
def _kernel(q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor) -> tuple[Tensor, Tensor]:
    """Make an output and a log-sum-exp, as one operation."""
    return torch.empty_like(q_NHD), q_NHD.new_empty(q_NHD.shape[1::-1], dtype=torch.float32)


_kernel.register_fake(lambda q_NHD, k_MKD, v_MKD: _kernel._init_fn(q_NHD, k_MKD, v_MKD))


class _Flash(torch.autograd.Function):
    """What FlashAttention makes and keeps: output and log-sum-exp; in the backward pass three gradients."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor) -> Tensor:
        out_NHD, lse_HN = _kernel(q_NHD, k_MKD, v_MKD)
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, out_NHD, lse_HN)
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_NHD, k_MKD, v_MKD, *_ = ctx.saved_tensors
        return torch.empty_like(q_NHD), torch.empty_like(k_MKD), torch.empty_like(v_MKD)


class _Exchange(torch.autograd.Function):
    """What an all-to-all makes: as much as it was given, each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, plan: _Shared, **__: Any
) -> tuple[Tensor, None]:
    """Transformers' calling convention, as `torchtrain.attention.hf` and, where ranks share rows, Ulysses follow it."""
    from torchtrain.attention.hf import round_to_values

    ranks, plan_ = plan.ranks, plan.plan
    q_BHTD, k_BKTD, v_BKTD = (
        (query, key, value) if ranks == 1 else (_heads_for_parts(x, ranks) for x in (query, key, value))
    )
    q_BHTD, k_BKTD = round_to_values(module, q_BHTD, k_BKTD, v_BKTD)
    q_NHD = gather_queries(q_BHTD.transpose(1, 2), plan_)
    k_MKD, v_MKD = (gather_keys(x.transpose(1, 2), plan_) for x in (k_BKTD, v_BKTD))
    out_BTHD = scatter_queries(_Flash.apply(q_NHD, k_MKD, v_MKD), plan_)  # pyright: ignore[reportArgumentType]
    return (out_BTHD if ranks == 1 else _parts_for_heads(out_BTHD, ranks)), None


def _heads_for_parts(x_BHtD: Tensor, S: int) -> Tensor:
    """Give parts of all heads for whole rows of some heads [B, H / S, T, D], as `UlyssesSPAttentionHF` does."""
    B, H, t, D = x_BHtD.shape
    x_tBHD = x_BHtD.permute(2, 0, 1, 3)
    if H < S:
        x_tBHD = x_tBHD.repeat_interleave(S // H, dim=2)
    x_StBHD = x_tBHD.reshape(t, B, S, max(H // S, 1), D).permute(2, 0, 1, 3, 4).contiguous()
    exchanged: Tensor = _Exchange.apply(x_StBHD)  # pyright: ignore[reportAssignmentType]
    return exchanged.reshape(S * t, B, -1, D).permute(1, 2, 0, 3).contiguous()


def _parts_for_heads(out_BTHD: Tensor, S: int) -> Tensor:
    """The way back: [B, t, all heads x D]."""
    B, T = out_BTHD.shape[:2]
    x_TBE = out_BTHD.transpose(0, 1).reshape(T, B, -1)
    exchanged: Tensor = _Exchange.apply(x_TBE.reshape(S, T // S, B, -1).contiguous())  # pyright: ignore
    return exchanged.permute(1, 2, 0, 3).reshape(T // S, B, -1).contiguous().transpose(0, 1)
