"""A strategy's state as fragments: which elements of which parameter this rank holds, as views. DeepSpeed's own
checkpoints need the same number of ranks and are unpickled, so its partitions are found here (DeepSpeed 0.19:
runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py, runtime/zero/stage3.py).
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from torchtrain.checkpoint import rng
from torchtrain.checkpoint.fragments import Fragment, share
from torchtrain.distributed.world import World
from torchtrain.modeling.load import weight_files
from torchtrain.training.strategy import Replicated, Strategy, Zero


class State(ABC):
    """What must be kept of a strategy that is between two steps: no gradient is added up."""

    everywhere = False  # whether every rank holds all of it

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        trained = [(name, p) for name, p in strategy.model.named_parameters() if p.requires_grad]
        self.parameters: dict[str, list[int]] = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained}
        self.named = trained

    @abstractmethod
    def fragments(self) -> list[Fragment]:
        """Return all that this rank holds."""

    @abstractmethod
    def weights_from_masters(self) -> None:
        """Give the model's weights the masters' values, as after a step. All ranks must call it."""

    @abstractmethod
    def _adamw(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """Return torch's AdamW and the tensors that it updates here."""

    @property
    def updates(self) -> int:
        """Updates that AdamW has made."""
        optimizer, masters = self._adamw()
        steps = {int(_moments(optimizer, master)["step"]) for master in masters}
        assert len(steps) <= 1, f"parameters were updated unequally often: {sorted(steps)}"
        return steps.pop() if steps else 0

    @updates.setter
    def updates(self, count: int) -> None:
        optimizer, masters = self._adamw()
        for master in masters:
            _moments(optimizer, master)["step"].fill_(count)


def state_of(strategy: Strategy) -> State:
    """Return what must be kept of a strategy."""
    if isinstance(strategy, Replicated):
        return _Replicated(strategy)
    assert isinstance(strategy, Zero)
    return _ZeroCut(strategy) if strategy.cut else _ZeroFlat(strategy)


class RankState:
    """What one rank writes into a checkpoint: its share of the state, and its generators of random numbers.

    The fragments are views of what the strategy holds. They must be written, or staged, before the next step.
    """

    def __init__(self, state: State, world: World) -> None:
        held = state.fragments()
        self.parameters = state.parameters
        self.fragments = share(held, world.rank, world.size) if state.everywhere else held
        self.generators = rng.capture()

    def stage(self) -> None:
        """Copy the fragments to host memory, so that the next steps do not change them."""
        self.fragments = [fragment.copy() for fragment in self.fragments]


@torch.no_grad()
def fill_masters(state: State, source: str) -> str:
    """Begin float32 masters at the numbers of the files of weights, which the model's own dtype has rounded.

    A file's tensor is taken where it has a weight's name and shape, and rounds to what the model holds.

    state: of a strategy that has taken no step.
    Returns what was done, for people; empty where the files hold nothing more precise.
    """
    from safetensors import safe_open

    model = state.strategy.model
    if torch.promote_types(model.dtype, torch.float32) == model.dtype:
        return ""
    own = {id(p): name for name, p in state.named}
    names = {name: own[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in own}
    masters: dict[str, list[Fragment]] = {}
    for fragment in state.fragments():
        masters.setdefault(fragment.parameter, []).append(fragment)
    filled, rounded = set[str](), set(masters)
    for path in weight_files(source):
        with safe_open(path, framework="pt") as file:
            for name in names.keys() & set(file.keys()):
                parameter, weight = names[name], file.get_tensor(name)
                if list(weight.shape) != state.parameters[parameter] or parameter not in masters:
                    continue
                if weight.dtype == model.dtype:
                    rounded.discard(parameter)
                elif all(_fill(fragment, weight, model.dtype) for fragment in masters[parameter]):
                    rounded.discard(parameter)
                    filled.add(parameter)
    if not filled:
        return ""
    rest = f", but for {len(rounded):,} that the files do not hold under these names" if rounded else ""
    return f"begin at the numbers of the weights' files, before they are rounded to {model.dtype}{rest}"


def _fill(fragment: Fragment, weight: Tensor, dtype: torch.dtype) -> bool:
    """Copy a part of a file's weight into a fragment's master, if it rounds to what the master holds."""
    master_n = fragment.tensors["master"]
    weight_n = weight.reshape(-1)[fragment.start : fragment.stop].float().to(master_n.device)
    if not torch.equal(weight_n.to(dtype), master_n.to(dtype)):
        return False
    master_n.copy_(weight_n)
    return True


class _Replicated(State):
    everywhere = True

    def __init__(self, strategy: Replicated) -> None:
        super().__init__(strategy)
        self._optimizer = strategy.optimizer

    def fragments(self) -> list[Fragment]:
        names = {id(p): name for name, p in self.named}
        fragments = []
        for parameter, master in zip(self._optimizer.parameters, self._optimizer.masters, strict=True):
            tensors = _views(self._optimizer.adamw, master, 0, master.numel())
            fragments.append(Fragment(names[id(parameter)], 0, tensors))
        return fragments

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        for parameter, master in zip(self._optimizer.parameters, self._optimizer.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def _adamw(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        return self._optimizer.adamw, self._optimizer.masters


class _Zero(State):
    def __init__(self, strategy: Zero) -> None:
        super().__init__(strategy)
        self._optimizer: Any = strategy.deepspeed.optimizer

    @property
    def _flat(self) -> list[Tensor]:
        """Masters of this rank, one tensor a group."""
        for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat"):
            if (masters := getattr(self._optimizer, name, None)) is not None:
                return masters
        raise AssertionError(f"{type(self._optimizer).__name__} keeps its masters elsewhere")

    def _adamw(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        return self._optimizer.optimizer, self._flat

    def _fragment(self, name: str, start: int, flat: Tensor, offset: int, length: int) -> Fragment:
        return Fragment(name, start, _views(self._optimizer.optimizer, flat, offset, length))


class _ZeroFlat(_Zero):
    """Stages 1 and 2: each group is one flat tensor, cut into equal parts, whatever parameter a cut goes through."""

    def fragments(self) -> list[Fragment]:
        fragments = []
        for name, parameter in self.named:
            link = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
            if link is not None:  # None: other ranks hold it
                flat = self._flat[link.param_group_index]
                of_parameter, of_flat = link.lp_fragment_address, link.hp_fragment_address
                fragments.append(self._fragment(name, of_parameter.start, flat, of_flat.start, of_flat.numel))
        return fragments

    def weights_from_masters(self) -> None:
        self._optimizer.update_lp_params()


class _ZeroCut(_Zero):
    """Stage 3: every parameter is cut into equal parts, the last of them padded."""

    def fragments(self) -> list[Fragment]:
        optimizer, fragments = self._optimizer, []
        for name, parameter in self.named:
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = length * optimizer._get_param_partition_rank(parameter)
            real = min(length, parameter.ds_numel - start)  # pyright: ignore[reportAttributeAccessIssue]
            if real > 0:
                fragments.append(self._fragment(name, start, self._flat[group], offset, real))
        return fragments

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        # As DeepSpeed's own step does after its update.
        optimizer = self._optimizer
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        for group in range(len(self._flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer._post_step(set())


def _views(optimizer: torch.optim.Optimizer, master: Tensor, offset: int, length: int) -> dict[str, Tensor]:
    """Master and moments [n] of a range of what AdamW updates."""
    moments = _moments(optimizer, master)
    whole = {"master": master.detach(), **{kind: moments[kind] for kind in ("exp_avg", "exp_avg_sq")}}
    return {kind: x.view(-1)[offset : offset + length] for kind, x in whole.items()}


def _moments(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a tensor, made as torch's first step makes it where there was none."""
    state = optimizer.state[master]
    if "exp_avg" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
    return state
