"""Training loops that are compared: ours, and what people write or call instead. Each has a copy of the same weights.

Legend: B batch (1) · T tokens of a row · V vocabulary.
"""

import copy
import importlib.util
import tempfile
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from anchorline.errors import UserError
from torchtrain.attention import visible_BTT
from torchtrain.attention.hf import implementation_name
from torchtrain.bench.config import StepBench
from torchtrain.config import TrainConfig
from torchtrain.distributed.world import World
from torchtrain.marks import IGNORED
from torchtrain.modeling.compilation import check_compiler
from torchtrain.modeling.load import set_up_layers
from torchtrain.training.step import make_micro_batches, take_step
from torchtrain.training.strategy import Replicated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Row = dict[str, Tensor]  # the five arrays [1, T], on the host


class TrainingLoop(ABC):
    """A model that learns one row, a step at a time.

    Args:
        model: copied.
        bench: settings.
        world: the device.
    """

    compiled = False  # whether its first step compiles

    def __init__(self, model: "PreTrainedModel", bench: StepBench, world: World) -> None:
        self.model, self.bench, self.world = copy.deepcopy(model), bench, world

    @abstractmethod
    def step(self, row: Row) -> float:
        """Take a whole step; return its mean loss."""

    @abstractmethod
    def losses(self, row: Row) -> Tensor | None:
        """Return the loss of each labelled token, nothing learned; None where the loop gives a mean alone."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the process holds for it."""


class Ours(TrainingLoop):
    """`torchtrain`, as a run's step goes."""

    def __init__(self, model: "PreTrainedModel", bench: StepBench, world: World) -> None:
        super().__init__(model, bench, world)
        self.model.set_attn_implementation(implementation_name(bench.model.attention))
        self.compiled |= bench.model.fused == "compile"
        if self.compiled:
            check_compiler(world.device)
            set_up_layers(self.model, bench.model.model_copy(update={"fused": "compile"}))
        self.train = TrainConfig(
            sequences_per_step=1, learning_rate=bench.learning_rate, loss_chunk=bench.loss_chunk, steps=2**20
        )
        self.strategy = Replicated(self.model, self.train, world)

    def step(self, row: Row) -> float:
        """See `TrainingLoop`."""
        batches = make_micro_batches([row], [], self.world)
        found = take_step(self.strategy, batches, [], 0, self.train, lambda loss: None).losses.overall.value
        assert found is not None
        return found

    def losses(self, row: Row) -> Tensor | None:
        """See `TrainingLoop`."""
        (batch,) = (batch.to(self.world.device) for batch in make_micro_batches([row], [], self.world))
        with torch.no_grad():
            _, each_BT = self.strategy.losses(batch.part, batch.plan, self.train.loss_chunk)
        return each_BT.flatten()[batch.labels.index_n]


class OursCompiled(Ours):
    """The same under `model.fused: compile`."""

    compiled = True


class Plain(TrainingLoop):
    """transformers' model with its SDPA, and torch's AdamW over the model's own parameters."""

    masked = False

    def __init__(self, model: "PreTrainedModel", bench: StepBench, world: World) -> None:
        super().__init__(model, bench, world)
        self.model.set_attn_implementation("sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=bench.learning_rate)

    def step(self, row: Row) -> float:
        """See `TrainingLoop`."""
        self.optimizer.zero_grad()
        loss = self.model(**self._inputs(row), labels=_labels(row).to(self.world.device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def losses(self, row: Row) -> Tensor | None:
        """See `TrainingLoop`."""
        with torch.no_grad():
            return losses_of_logits(self.model(**self._inputs(row)).logits, row)

    def _inputs(self, row: Row) -> dict[str, Any]:
        return inputs_of(row, self.world.device, self.masked)


class PlainMasked(Plain):
    """The same with a mask of T x T, which is how documents are kept apart without an engine for it."""

    masked = True


class Sharded(Plain):
    """The same under FSDP2 by layers, for one rank: float32 weights that a fused AdamW updates, each layer's rounded to
    the model's dtype as it is gathered, gradients reduced in float32.
    """

    def __init__(self, model: "PreTrainedModel", bench: StepBench, world: World) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        super().__init__(model, bench, world)
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise UserError(f"{model.config.model_type} marks no layers that FSDP could take one by one")
        kind = world.device.type
        self._group_is_ours = not dist.is_initialized()
        if self._group_is_ours:
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.model.float()
        policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(kind, (1,))
        for part in (*layers, self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=bench.learning_rate, fused=True)

    def close(self) -> None:
        """See `TrainingLoop`."""
        if self._group_is_ours:
            dist.destroy_process_group()


class Sft(TrainingLoop):
    """TRL's `SFTTrainer`: its own training step and optimizer, without its loop's data loading and logging.

    Raises:
        UserError: TRL is not installed.
    """

    def __init__(self, model: "PreTrainedModel", bench: StepBench, world: World) -> None:
        super().__init__(model, bench, world)
        if importlib.util.find_spec("trl") is None:
            raise UserError("TRL is not installed (`make rivals` does)")
        from datasets import Dataset
        from transformers import default_data_collator
        from trl import SFTConfig, SFTTrainer

        self.model.set_attn_implementation("sdpa")
        self._folder = tempfile.TemporaryDirectory()
        arguments = SFTConfig(
            self._folder.name,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            learning_rate=bench.learning_rate,
            gradient_checkpointing=False,  # the model has it, or not, as the other loops'
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=world.device.type == "cpu",
        )
        nothing = Dataset.from_list([{"input_ids": [0, 0], "labels": [0, 0]}])
        self.trainer = SFTTrainer(
            self.model,
            arguments,
            data_collator=default_data_collator,
            train_dataset=nothing,
            processing_class=_some_tokenizer(),
        )
        self.trainer.create_optimizer_and_scheduler(2**20)
        self.trainer.current_gradient_accumulation_steps = 1  # as its own loop sets it

    def step(self, row: Row) -> float:
        """See `TrainingLoop`."""
        trainer, device = self.trainer, self.world.device
        inputs = inputs_of(row, device, masked=False) | {"labels": _labels(row).to(device)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])  # which it counts tokens by
        loss = trainer.training_step(self.model, inputs)
        nn.utils.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm)
        optimizer: Any = trainer.optimizer
        optimizer.step()
        self.model.zero_grad()
        return loss.item()

    def losses(self, row: Row) -> Tensor | None:
        """See `TrainingLoop`."""
        return None


def _some_tokenizer() -> Any:
    """A tokenizer that TRL asks for and does not use: rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"0": 0, "1": 1}, "0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="0")


LOOPS: dict[str, tuple[type[TrainingLoop], str]] = {
    "torchtrain, anchor": (Ours, "anchor"),
    "torchtrain, anchor, compiled": (OursCompiled, "anchor"),
    "torchtrain, full": (Ours, "full"),
    "transformers, full": (Plain, "full"),
    "transformers, dense mask": (PlainMasked, "anchor"),
    "FSDP, full": (Sharded, "full"),
    "TRL, full": (Sft, "full"),
}


def inputs_of(row: Row, device: torch.device, masked: bool) -> dict[str, Any]:
    """Return what transformers' model takes of a row: full attention, or a mask [1, 1, T, T] by the one rule."""
    mask = visible_BTT(row["document_ids"].to(device))[:, None] if masked else None
    names = ("input_ids", "position_ids")
    return {name: row[name].to(device) for name in names} | {"attention_mask": mask, "use_cache": False}


def losses_of_logits(logits_BTV: Tensor, row: Row) -> Tensor:
    """Return the loss of each labelled token, in float32 or wider."""
    labels_N = row["shift_labels"].flatten().to(logits_BTV.device)
    kept = labels_N != IGNORED
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return F.cross_entropy(logits_BTV.flatten(0, 1)[kept].to(wide), labels_N[kept], reduction="none")


def _labels(row: Row) -> Tensor:
    """Labels as transformers takes them, which shifts them itself."""
    return F.pad(row["shift_labels"][:, :-1], (1, 0), value=IGNORED)
