"""What the processes of a distributed test run: `python -m torch.distributed.run ... -m
torchtrain.tests.distributed_worker CASES OUT`.

CASES is a JSON list. Each case is run by all ranks, one after another, and rank 0 leaves its arrays in OUT as NAME.npz:

    logits              [rows, T, V] float32, of the model alone                     (where the case has "logits")
    loss, domains.*     [sum, tokens]
    pairs               live pairs
    gradient.PARAMETER  of the step, before clipping                                 (where the case has "train")
    norm                before clipping
    moment.PARAMETER    AdamW's first moment after the step: (1 - beta1) x the clipped gradient
    weight.PARAMETER    after the step, as `Strategy.weights` gathers them

Legend: B batch · T tokens of a row · t tokens of this rank's part · V vocabulary.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import torchtrain
from torchtrain.attention.hf import implementation_name
from torchtrain.config import Config, LoraSettings
from torchtrain.distributed.shard import assign_rows
from torchtrain.distributed.world import World, read_ranks
from torchtrain.distributed.zero import import_deepspeed
from torchtrain.modeling import compilation
from torchtrain.modeling.adapters import add_adapters
from torchtrain.modeling.compilation import compile_layers
from torchtrain.modeling.head import head_of, hidden_states
from torchtrain.modeling.recompute import hand_layers_over
from torchtrain.training.labels import find_labels
from torchtrain.training.micro_batch import make_micro_batch
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Replicated, Strategy, Zero, make_strategy

ENGINE = "sdpa"
DOMAINS = ["first", "second"]


def config_of(case: dict[str, Any]) -> Config:
    """A case's settings, with those that every run must have."""
    return Config.model_validate(
        {
            "run": {"folder": "unused"},
            "model": {"source": case["model"], "dtype": case["dtype"], "lora": case.get("lora")}
            | {"fused": case.get("fused", "none")},
            "data": {"sources": [{"demo": "code"}]},
            "pack": {"sequence_length": 128},
            "train": case.get("settings", {}),
            "distributed": case.get("distributed", {}),
        }
    )


def load(case: dict[str, Any]) -> Any:
    """The case's model, in its dtype, with our attention."""
    torchtrain.register()
    model = AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=getattr(torch, case["dtype"]), attn_implementation=implementation_name(ENGINE)
    )
    if case.get("lora"):
        add_drawn_adapters(model, case["lora"])
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.get("fused"):
        compilation._compile = functools.cache(lambda function: torch.compile(function, backend="eager"))
        hand_layers_over(model)
        compile_layers(model, case.get("checkpointing", False))
    return model.train()


def add_drawn_adapters(model: Any, lora: dict[str, Any]) -> None:
    """Add adapters whose B is not zero, so that A has a gradient."""
    add_adapters(model, LoraSettings.model_validate(lora), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def micro_batches(case: dict[str, Any], config: Config, world: World) -> list[dict[str, Tensor]]:
    """This rank's rows of the step [B, T]."""
    rows = torch.load(case["batch"], weights_only=True)
    count = len(rows["input_ids"])
    assert count == config.train.sequences_per_step
    return [
        {name: x[numbers.start : numbers.stop] for name, x in rows.items()}
        for numbers in assign_rows(0, count, config.train.micro_batch, world)
    ]


@torch.no_grad()
def logits(strategy: Strategy, batches: list[dict[str, Tensor]]) -> np.ndarray:
    """Logits of all rows [rows, T, V], whole on every rank."""
    world, found = strategy.world, []
    for batch in batches:
        B, T = batch["input_ids"].shape
        batch = batch | {"domain_ids": torch.arange(T).expand(B, -1)}  # says where in the row a token of a part stands
        made = make_micro_batch(batch, world, lambda part: find_labels(part["shift_labels"]))
        own_BtV = head_of(strategy.model)(hidden_states(strategy.model, made.part, made.plan)).float()
        parts = world.gather((made.part["domain_ids"], own_BtV))
        for first in range(0, world.size, world.sequence_parallel):
            whole_BTV = torch.full((B, T, own_BtV.shape[-1]), torch.nan)
            for place_Bt, part_BtV in parts[first : first + world.sequence_parallel]:
                row, column = (place_Bt >= 0).nonzero(as_tuple=True)
                whole_BTV[row, place_Bt[row, column]] = part_BtV[row, column]
            found.append(whole_BTV)
    return torch.cat(found).numpy()


def trained(strategy: Strategy, batches: list[dict[str, Tensor]], config: Config) -> dict[str, np.ndarray]:
    """One step: losses, gradients, norm, moments and weights."""
    names = {id(p): name for name, p in strategy.model.named_parameters()}
    ready = make_micro_batches(batches, DOMAINS, strategy.world)
    losses, pairs = accumulate(strategy, ready, DOMAINS, config.train.loss_chunk)
    arrays: dict[str, Any] = {"loss": [losses.overall.total, losses.overall.tokens], "pairs": pairs}
    arrays |= {f"domains.{name}": [mean.total, mean.tokens] for name, mean in losses.by_domain.items()}
    state = gradient_and_moment(strategy)
    arrays |= {f"gradient.{names[key]}": value for key, value in state("gradient").items()}
    arrays["norm"] = strategy.step(config.train.learning_rate)
    arrays |= {f"moment.{names[key]}": value for key, value in state("moment").items()}
    weights = strategy.weights()
    return {} if weights is None else arrays | {f"weight.{n}": x.float().numpy() for n, x in weights.items()}


def gradient_and_moment(strategy: Strategy) -> Any:
    """Return a function from `gradient` or `moment` to whole float32 arrays by the parameter's id; all ranks must call
    it.
    """
    if isinstance(strategy, Replicated):
        pairs = list(zip(strategy.optimizer.parameters, strategy.optimizer.masters, strict=True))
        states = strategy.optimizer.adamw.state
        take = {"gradient": lambda master: master.grad, "moment": lambda master: states[master]["exp_avg"]}
        return lambda what: {id(p): take[what](master).float().numpy().copy() for p, master in pairs}
    assert isinstance(strategy, Zero)
    from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

    def moment(parameter: Any) -> Tensor:
        # ZeRO 1 and 2 link parameters to states after the first group's first step, when the second group has none yet.
        optimizer = strategy.deepspeed.optimizer
        optimizer._hp_optimizer_states_linked = False
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
            optimizer._lazy_init_hp_params_optimizer_state()
        return safe_get_full_optimizer_state(parameter, "exp_avg")

    get = {"gradient": safe_get_full_grad, "moment": moment}
    trained = [p for p in strategy.model.parameters() if p.requires_grad]
    return lambda what: {id(p): get[what](p).float().numpy().copy() for p in trained}


def forget(strategy: Strategy) -> None:
    """Undo what registration left in the process, so that the next case starts as a fresh process does."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if isinstance(strategy, Zero):
        strategy.deepspeed.destroy()
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop(implementation_name(ENGINE), None)
    parallel_state_sp._release_sequence_parallel_groups()
    groups.mpu = None


def run(case: dict[str, Any], rank: int, size: int) -> dict[str, np.ndarray]:
    """One case on this rank."""
    config = config_of(case)
    shared, whole = config.distributed.sequence_parallel, config.distributed.share == "documents"
    world = World(rank, size, shared, whole_documents=whole)
    strategy = make_strategy(load(case), ENGINE, config.distributed, config.train, world)
    batches = micro_batches(case, config, world)
    arrays = {"logits": logits(strategy, batches)} if case.get("logits") else {}
    if case.get("train"):
        arrays |= trained(strategy, batches, config)
    if size > 1:
        forget(strategy)
    return {name: np.asarray(value) for name, value in arrays.items()}


def run_cases(run: Callable[[dict[str, Any], int, int], None]) -> None:
    """Join the other processes and run each case of the file that is the first argument: `run(case, rank, size)`."""
    torch.set_num_threads(1)
    rank, size, _ = read_ranks()
    dist.init_process_group("gloo")
    import_deepspeed()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        run(case, rank, size)
    dist.destroy_process_group()


def main() -> None:
    """Run all cases."""

    def run_and_write(case: dict[str, Any], rank: int, size: int) -> None:
        arrays = run(case, rank, size)
        if rank == 0:
            np.savez(Path(sys.argv[2]) / f"{case['name']}.npz", **arrays)  # type: ignore[arg-type]

    run_cases(run_and_write)
    # DeepSpeed's ZeRO would load it for an optimizer that nobody asked for, 1.6 s a process (`import_deepspeed`).
    assert "torch._inductor.compile_fx" not in sys.modules


def write_json(run: Callable[[dict[str, Any], int, int], Any]) -> None:
    """Run all cases; each rank writes what came of each to the folder that is the second argument."""

    def run_and_write(case: dict[str, Any], rank: int, size: int) -> None:
        (Path(sys.argv[2]) / f"{case['name']}-{rank}.json").write_text(json.dumps(run(case, rank, size)))

    run_cases(run_and_write)


if __name__ == "__main__":
    main()
