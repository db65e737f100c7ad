"""Strategies: how weights, gradients and optimizer state are held on the ranks, and how a step updates them.

`Replicated` keeps all of them on every rank. `Zero` is DeepSpeed's engine, which spreads them. Both compute the
gradient of the same loss, with float32 sums over all ranks and micro-batches:

    sum of the losses of all labelled tokens of the step, each times its weight / sum of their weights

Both take the same AdamW step.

Legend: B batch · T tokens of a row · t tokens of this rank's part.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchtrain.attention import AttentionPlan
from torchtrain.config import DistributedConfig, TrainConfig
from torchtrain.distributed.ulysses import split_attention
from torchtrain.distributed.world import ALONE, World
from torchtrain.distributed.zero import (
    clear_skipped_gradients,
    deepspeed_config,
    gather_layers_whole,
    import_deepspeed,
    skip_update,
)
from torchtrain.modeling.chunks import parameters_outside
from torchtrain.modeling.compilation import is_compiled, layers_of
from torchtrain.modeling.head import LogitRule, head_of, hidden_states
from torchtrain.training.labels import Labels
from torchtrain.training.loss import chunked_cross_entropy
from torchtrain.training.optimizer import Optimizer, adamw

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Strategy(ABC):
    """A model, its optimizer and their state on this rank. The model is on the rank's device."""

    def __init__(self, model: "PreTrainedModel", world: World) -> None:
        self.model, self.world = model, world

    @abstractmethod
    def losses(
        self, part: Mapping[str, Any], plan: AttentionPlan, chunk: int | None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Run the model on this rank's part of a micro-batch.

        part: of the rows, with its `labels`.
        plan: of whole rows, or of the part if it has whole documents.
        chunk: tokens whose logits exist at one time; None: `default_chunk`.
        scale: the factor by which the caller multiplies the sum before `backward`.
        Returns as `chunked_cross_entropy`: the sum of the losses, and each token's loss [B, t].
        """

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a loss to the step's.

        loss: a scalar. The scalars of all ranks and calls of a step add up to the mean loss.
        last: whether this is the step's last call.
        """

    def norm(self) -> Tensor | None:
        """Return the norm of the step's gradient on the device; None if only `step` computes it."""
        return None

    @abstractmethod
    def step(self, learning_rate: float, norm: float | None = None) -> float:
        """Clip, update the weights and drop the gradients. Return the gradient's norm before clipping.

        If the norm is inf or nan, no weight is updated.

        norm: the value of `norm` if the caller has read it.
        """

    @abstractmethod
    def drop(self) -> None:
        """End the step without an update."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor] | None:
        """Gather the model's state dict on rank 0, in its dtype on the CPU; None on the others. All ranks must call it.

        Tied weights stay one tensor, so that they are written once.
        """


def make_strategy(
    model: "PreTrainedModel", attention: str, distributed: DistributedConfig, train: TrainConfig, world: World
) -> Strategy:
    """Return the strategy that `distributed` asks for.

    model: loaded on every rank; with stage 3 its parameters are cut up already.
    attention: the engine, from `torchtrain.attention.resolve_engine`.
    """
    if not distributed.zero_stage and world.sequence_parallel == 1:
        return Replicated(model, train, world)
    import_deepspeed().init_distributed(verbose=False)
    mpu = split_attention(model, attention, train.micro_batch, world)
    return Zero(model, mpu, distributed, train, world) if distributed.zero_stage else Replicated(model, train, world)


class Replicated(Strategy):
    """Weights, float32 masters and AdamW's state on every rank; gradients are summed over ranks before a step.

    model: on this rank's device.
    train: settings of the optimizer; None for evaluation only.
    """

    def __init__(self, model: "PreTrainedModel", train: TrainConfig | None, world: World = ALONE) -> None:
        super().__init__(model, world)
        self._optimizer = None if train is None else Optimizer(model, train)
        self._sums = None if train is None or world.size == 1 else self.optimizer.sum_over_ranks()

    @property
    def optimizer(self) -> Optimizer:
        """Masters and AdamW."""
        assert self._optimizer is not None, "made for evaluation only"
        return self._optimizer

    def losses(
        self, part: Mapping[str, Any], plan: AttentionPlan, chunk: int | None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """See `Strategy`."""
        hidden_BtM = hidden_states(self.model, part, plan)
        model = self.model
        return chunked_cross_entropy(
            head_of(model), hidden_BtM, part["labels"], chunk, scale=scale, rule=LogitRule.of(model)
        )

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Strategy`."""
        if last and self._sums is not None:
            self._sums.begin()
        loss.backward()
        if last and self._sums is not None:
            self._sums.finish()  # a sum, not a mean: `accumulate` has divided by the labels of all ranks

    def norm(self) -> Tensor | None:
        """See `Strategy`."""
        return None if self._optimizer is None else self._optimizer.norm()

    def step(self, learning_rate: float, norm: float | None = None) -> float:
        """See `Strategy`."""
        return self.optimizer.step(learning_rate, norm)

    def drop(self) -> None:
        """See `Strategy`."""
        self.optimizer.drop()

    def weights(self) -> dict[str, Tensor] | None:
        """See `Strategy`."""
        if self.world.rank:
            return None
        state = self.model.state_dict(keep_vars=True)
        once = {id(x): x.detach().cpu() for x in state.values()}
        return {name: once[id(x)] for name, x in state.items()}


class Zero(Strategy):
    """DeepSpeed's engine, which spreads optimizer state, gradients and weights over all ranks, by `zero_stage`.

    The arguments are those of `make_strategy`; `mpu` is what `split_attention` returned.
    """

    def __init__(
        self, model: "PreTrainedModel", mpu: Any, distributed: DistributedConfig, train: TrainConfig, world: World
    ) -> None:
        super().__init__(model, world)
        deepspeed = import_deepspeed()
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.cut = distributed.zero_stage == 3
        with_loss = _WithLoss(model)
        compiled = layers_of(model) if self.cut and is_compiled(model) else []
        # DeepSpeed's optimizer for bfloat16 prints its use of memory.
        with redirect_stdout(StringIO()), gather_layers_whole(compiled):
            self.deepspeed, *_ = deepspeed.initialize(
                model=with_loss,
                optimizer=adamw(parameters, train),
                config=deepspeed_config(distributed, train, model.dtype, world),
                mpu=mpu,
                dist_init_required=False,
            )
        if self.cut:
            # The head is called without its hooks, which would gather it for every chunk.
            for parameter in head_of(model).parameters():
                deepspeed.zero.register_external_parameter(with_loss.loss, parameter)
            for module, parameter in parameters_outside(model):
                deepspeed.zero.register_external_parameter(module, parameter)
        self._divisor = world.size if self.cut else world.data_parallel  # by which DeepSpeed divides a gradient's sum
        self._gathered: Callable[..., Any] = deepspeed.zero.GatheredParameters

    def losses(
        self, part: Mapping[str, Any], plan: AttentionPlan, chunk: int | None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """See `Strategy`."""
        return self.deepspeed(part, plan, chunk, scale * self._divisor)

    def backward(self, loss: Tensor, last: bool) -> None:
        """See `Strategy`."""
        self.deepspeed.backward(loss * self._divisor, scale_wrt_gas=False)
        if not last:
            self.deepspeed.step()  # only counts the micro-batch

    def step(self, learning_rate: float, norm: float | None = None) -> float:
        """See `Strategy`. DeepSpeed computes the norm itself."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        norm = float(self.deepspeed.get_global_grad_norm())
        norm = norm if norm >= 0 else float("nan")  # DeepSpeed returns -1 for a norm that is not finite
        if not math.isfinite(norm):
            clear_skipped_gradients(self.deepspeed.optimizer)
        return norm

    def drop(self) -> None:
        """See `Strategy`. DeepSpeed skips the update of a step whose norm is not finite."""
        with skip_update(self.deepspeed.optimizer):
            norm = self.step(0.0)
        assert not math.isfinite(norm), "DeepSpeed updated the weights in a step to be skipped"

    def weights(self) -> dict[str, Tensor] | None:
        """See `Strategy`. Parameters are gathered one at a time."""
        state, once = self.model.state_dict(keep_vars=True), {}
        for x in {id(x): x for x in state.values()}.values():
            with self._gathered([x] if self.cut and isinstance(x, nn.Parameter) else []):
                if self.world.rank == 0:
                    once[id(x)] = x.detach().to("cpu", copy=True)
        return {name: once[id(x)] for name, x in state.items()} if self.world.rank == 0 else None


class _WithLoss(nn.Module):
    """Hidden states and loss in one forward, which DeepSpeed takes for one micro-batch."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model, self.loss = model, _Loss()

    def forward(
        self, part: Mapping[str, Any], plan: AttentionPlan, chunk: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        hidden_BtM = hidden_states(self.model, part, plan)
        return self.loss(head_of(self.model), hidden_BtM, part["labels"], chunk, scale, LogitRule.of(self.model))


class _Loss(nn.Module):
    """The loss of all chunks of a micro-batch, as a module, so that ZeRO 3 gathers the head once."""

    def forward(
        self, head: nn.Module, hidden_BtM: Tensor, labels: Labels, chunk: int | None, scale: float, rule: LogitRule
    ) -> tuple[Tensor, Tensor]:
        return chunked_cross_entropy(head, hidden_BtM, labels, chunk, scale=scale, rule=rule)
