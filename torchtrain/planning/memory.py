"""What a forward and a backward pass hold in memory, counted on torch's meta device: shapes without numbers.

Every tensor that transformers, autograd and checkpointing make is counted while it lives, so no formula of a model's
activations stands here. Attention is stood in for by tensors that FlashAttention and the exchange between ranks would
hold. On a GPU the allocator's fragments, the CUDA context (about half a GB) and NCCL's buffers come on top.

Legend: B batch · t tokens of this rank's part · H query heads · K key/value heads · D head_dim · M model width · V
vocabulary.
"""

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from torchtrain.config import ModelConfig
from torchtrain.modeling.head import head_of
from torchtrain.modeling.source import read_by_library
from torchtrain.training.loss import chunked_loss

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_STAND_IN = "anchorline_shapes_only"


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
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = True
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def shape_of_model(config: "PretrainedConfig", settings: ModelConfig) -> "PreTrainedModel":
    """Build the model on the meta device, in its dtype, in training mode.

    RoPE that goes by the batch's positions is replaced: its tables have the same shapes.
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
    if settings.activation_checkpointing:
        enable_checkpointing(model)
    for parameter in model.parameters():
        # Gradients are counted elsewhere; here each lives until it is added to the step's.
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model.train()


def enable_checkpointing(model: "PreTrainedModel") -> None:
    """Recompute each layer in the backward pass, as `load_for_training` sets it up."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


class Shapes:
    """What runs of one model hold, each counted once.

    Args:
        config: the model's, extended.
    """

    def __init__(self, config: "PretrainedConfig") -> None:
        self.config = config
        self._models: dict[tuple[str, bool], PreTrainedModel] = {}
        self._counted: dict[tuple[Any, ...], int] = {}

    def model(self, settings: ModelConfig) -> "PreTrainedModel":
        """Return the model of `shape_of_model`."""
        key = (settings.dtype, settings.activation_checkpointing)
        if key not in self._models:
            self._models[key] = shape_of_model(self.config, settings)
        return self._models[key]

    def activations(self, settings: ModelConfig, rows: int, tokens: int) -> int:
        """As `activation_bytes`."""
        key = (settings.dtype, settings.activation_checkpointing, rows, tokens)
        if key not in self._counted:
            self._counted[key] = activation_bytes(self.model(settings), rows, tokens)
        return self._counted[key]

    def logits(self, settings: ModelConfig, tokens: int, chunk: int) -> int:
        """As `logits_bytes`; layers recomputed or not do not matter."""
        key = ("logits", settings.dtype, tokens, chunk)
        if key not in self._counted:
            self._counted[key] = logits_bytes(self.model(settings), tokens, chunk)
        return self._counted[key]


def activation_bytes(model: "PreTrainedModel", rows: int, tokens: int) -> int:
    """Return what the decoder holds at most in a forward and backward pass over [rows, tokens of this rank's part]."""
    with torch.device("meta"):
        ids_Bt = torch.zeros(rows, tokens, dtype=torch.long)
        positions_Bt = torch.arange(tokens).expand(rows, -1)
    # Without a mask transformers looks into the positions, which have no numbers here. The stand-in drops it.
    mask_Bt = torch.ones_like(ids_Bt)
    with PeakBytes(model) as count:
        hidden_BtM = model.base_model(
            input_ids=ids_Bt, position_ids=positions_Bt, attention_mask=mask_Bt, use_cache=False
        ).last_hidden_state
        hidden_BtM.backward(torch.empty_like(hidden_BtM))
    return count.peak


def logits_bytes(model: "PreTrainedModel", tokens: int, chunk: int) -> int:
    """Return what the loss holds at most, with `chunk` of the rank's tokens at a time, all of them labelled."""
    head = head_of(model)
    width, dtype = model.config.get_text_config().hidden_size, model.dtype
    hidden_nM = torch.empty(tokens, width, dtype=dtype, device="meta", requires_grad=True)
    labels_n = torch.zeros(tokens, dtype=torch.long, device="meta")
    with PeakBytes(model) as count:
        chunked_loss(head, hidden_nM, labels_n, chunk).sum().backward()
    return count.peak


class _Flash(torch.autograd.Function):
    """What FlashAttention makes and keeps: output and log-sum-exp; in the backward pass three gradients."""

    @staticmethod
    def forward(ctx: Any, q_BHtD: Tensor, k_BKtD: Tensor, v_BKtD: Tensor) -> Tensor:
        out_BHtD = torch.empty_like(q_BHtD)
        lse_BHt = q_BHtD.new_empty(q_BHtD.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BHtD, k_BKtD, v_BKtD, out_BHtD, lse_BHt)
        return out_BHtD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_BHtD, k_BKtD, v_BKtD, *_ = ctx.saved_tensors
        return torch.empty_like(q_BHtD), torch.empty_like(k_BKtD), torch.empty_like(v_BKtD)


class _Copy(torch.autograd.Function):
    """A copy each way: the exchange of parts for heads, and the gathering of keys by document."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    q_BHtD, k_BKtD, v_BKtD = (_Copy.apply(x) for x in (query, key, value))
    out_BHtD = _Flash.apply(q_BHtD, _Copy.apply(k_BKtD), _Copy.apply(v_BKtD))
    return _Copy.apply(out_BHtD).transpose(1, 2).contiguous(), None  # pyright: ignore[reportOptionalMemberAccess]
