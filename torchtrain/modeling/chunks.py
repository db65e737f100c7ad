"""What a layer computes of each token alone, its norms and its gated MLP, for some tokens at a time.

An MLP of Llama-3-8B makes three tensors [T, 14336] of its input [T, 4096], a norm two of float32. Here they exist for
`model.layer_chunk` tokens only: the forward pass keeps the input alone, and the backward pass computes a chunk again,
takes its gradients and drops it (tiled computation, as arXiv 2506.13996 has it). A gradient of a weight is a sum over
all tokens. It is taken over chunks in float32 and rounded to the weight's dtype once: in bfloat16 what a chunk brings
is lost where it is below 1/256 of the sum, and 1.5M tokens are hundreds of chunks. A token's own numbers are those
of the plain modules, but a library may add up a matrix product of fewer rows in another order: bit for bit they are the
same where a chunk holds all tokens.

Weights are taken from the module when they are used, never kept: under ZeRO 3 they are gathered for the module as a
whole, once a pass (`used_by`), and are others by then.

Legend: n tokens of a chunk · N all tokens · M model width · I width within the MLP · D width of a norm.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchorline.errors import UserError
from torchtrain.modeling.whole import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_anchorline_chunked"


def chunk_layers(model: nn.Module, tokens: int, most: int | None = None) -> None:
    """Let norms and MLPs of a model run for at most `tokens` tokens at a time, and again in the backward pass.

    Args:
        model: any causal language model.
        tokens: of a chunk.
        most: how many chunks are computed; default: all. What all hold is known by a few, where there are shapes only.

    Raises:
        UserError: a layer has an MLP or a norm of another kind.
    """
    for form in _forms(model):
        setattr(form.module, _MARK, form)
        form.module.forward = partial(_run, form, tokens, most)


def check_chunks(model: "PreTrainedModel") -> None:
    """Check, before `chunk_layers`, that norms and MLPs compute what is computed in their place, bit by bit.

    One of each kind is asked; layers are alike.

    Raises:
        UserError: one computes something else, or is of another kind.
    """
    for form in {_kind_of(form.module): form for form in _forms(model)}.values():
        width = form.width
        x_1nM = torch.linspace(-3, 3, 4 * width, device=model.device).view(1, 4, width).to(model.dtype)
        if not form.is_right(x_1nM):
            raise _refusal(model, f"its {type(form.module).__name__} computes something else")


def used_by(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module's own forward uses: all below it where its children are not called."""
    return list(module.parameters(recurse=hasattr(module, _MARK)))


def parameters_outside(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield each parameter that a module uses and a child of it owns, with the module."""
    for module in model.modules():
        own = {id(p) for p in module.parameters(recurse=False)}
        yield from ((module, p) for p in used_by(module) if id(p) not in own)


class _Form(ABC):
    """What a module computes, as functions of a chunk of tokens."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    @abstractmethod
    def width(self) -> int:
        """Of what it takes."""

    @property
    @abstractmethod
    def weights(self) -> list[nn.Parameter]:
        """All its parameters."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Compute a chunk."""

    @abstractmethod
    def backward(self, x: Tensor, gradient: Tensor, sums: list[Tensor]) -> Tensor:
        """Return the gradient of a chunk's input, and add those of `weights` to `sums`, which are in float32."""

    @abstractmethod
    def is_right(self, x: Tensor) -> bool:
        """Whether the module gives the same bits for a few tokens as this, each weight whole where its owner runs."""


class _GatedMLP(_Form):
    """down(act(gate(x)) * up(x)), with or without biases."""

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether a module looks like one."""
        parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
        linear = all(isinstance(part, nn.Linear) for part in parts) and callable(getattr(module, "act_fn", None))
        own = sum(1 for part in parts if isinstance(part, nn.Linear) for _ in part.parameters())
        return linear and own == sum(1 for _ in module.parameters())

    @property
    def width(self) -> int:
        return self.module.gate_proj.in_features

    @property
    def weights(self) -> list[nn.Parameter]:
        module = self.module
        return [p for part in (module.gate_proj, module.up_proj, module.down_proj) for p in part.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        gate_nI, up_nI = self._halves(x)
        down = self.module.down_proj
        return F.linear(self.module.act_fn(gate_nI) * up_nI, down.weight, down.bias)

    def _halves(self, x_nM: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.module.gate_proj, self.module.up_proj
        return F.linear(x_nM, gate.weight, gate.bias), F.linear(x_nM, up.weight, up.bias)

    def backward(self, x: Tensor, gradient: Tensor, sums: list[Tensor]) -> Tensor:
        module, places = self.module, iter(sums)
        with torch.enable_grad():
            gate_nI, up_nI = (half.detach().requires_grad_() for half in self._halves(x))
            inner_nI = module.act_fn(gate_nI) * up_nI
        of_gate, of_up = torch.autograd.grad(inner_nI, (gate_nI, up_nI), gradient @ module.down_proj.weight)
        del gate_nI, up_nI
        for part, given, made in (
            (module.gate_proj, x, of_gate),
            (module.up_proj, x, of_up),
            (module.down_proj, inner_nI.detach(), gradient),
        ):
            _add_product(next(places), made, given)
            if part.bias is not None:
                next(places).add_(made.sum(0, dtype=sums[0].dtype))
        return of_gate @ module.gate_proj.weight + of_up @ module.up_proj.weight

    def is_right(self, x: Tensor) -> bool:
        module = self.module
        return torch.equal(module(x), module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x)))


class _RMSNorm(_Form):
    """weight * (x / root mean square of x), the division in float32."""

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether a module looks like one."""
        names = [name for name, _ in module.named_parameters()]
        return names == ["weight"] and len(whole_shape(module.weight)) == 1 and hasattr(module, "variance_epsilon")

    @property
    def width(self) -> int:
        return whole_shape(self.module.weight)[0]

    @property
    def weights(self) -> list[nn.Parameter]:
        return [self.module.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.module.weight * self._normalize(x)

    def _normalize(self, x_nD: Tensor) -> Tensor:
        wide_nD = x_nD.to(torch.float32)
        size_n1 = wide_nD.pow(2).mean(-1, keepdim=True)
        return (wide_nD * torch.rsqrt(size_n1 + self.module.variance_epsilon)).to(x_nD.dtype)

    def backward(self, x: Tensor, gradient: Tensor, sums: list[Tensor]) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            normal_nD = self._normalize(x)
        (of_x,) = torch.autograd.grad(normal_nD, x, gradient * self.module.weight)
        wide = sums[0].dtype
        sums[0].add_((gradient.to(wide) * normal_nD.detach().to(wide)).flatten(0, -2).sum(0))
        return of_x

    def is_right(self, x: Tensor) -> bool:
        found = []

        def compare(_: nn.Module, args: tuple[Any, ...], made: Tensor) -> None:
            found.append(torch.equal(made, self.forward(args[0])))

        hook = self.module.register_forward_hook(compare, prepend=True)  # while its weight is whole
        try:
            self.module(x)
        finally:
            hook.remove()
        return found == [True]


def _forms(model: nn.Module) -> Iterator[_Form]:
    """Yield what is computed in chunks: the MLP of each layer, and every norm.

    Raises:
        UserError: a layer has one of another kind.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise _refusal(model, "it has no layers that can be told apart")
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if not _GatedMLP.fits(mlp):
            raise _refusal(model, f"{type(mlp).__name__ if mlp is not None else 'what follows attention'} is not one")
        yield _GatedMLP(mlp)
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            if not _RMSNorm.fits(module):
                raise _refusal(model, f"its {type(module).__name__} is another norm than theirs")
            yield _RMSNorm(module)


def _kind_of(module: nn.Module) -> tuple[type, ...]:
    return type(module), type(getattr(module, "act_fn", None))


def _refusal(model: nn.Module, why: str) -> UserError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return UserError(
        f"model.layer_chunk: {kind} has not the gated MLP and norms of LLaMA, Mistral and Qwen, {why}; set "
        "model.layer_chunk to null, or choose another model"
    )


def _run(form: _Form, tokens: int, most: int | None, x: Tensor) -> Tensor:
    """Compute what a module computes of [B, T, ..]."""
    rows = x.flatten(0, 1)
    box: list[Any] = []
    kept = _Keep.apply(rows, box)
    made: Any = _Chunked.apply(kept, form, (tokens, most), box, *form.weights)
    return made.unflatten(0, x.shape[:2])


class _Keep(torch.autograd.Function):
    """The same, kept for `_Chunked` before that runs.

    A layer that is computed again for its backward pass is computed up to the last tensor that it kept: so its MLP,
    which comes last, is not computed once more in vain.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        box.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Chunked(torch.autograd.Function):
    """A module of tokens [N, ..] that are alone, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, form: _Form, cut: tuple[int, int | None], box: list[Any], *weights: nn.Parameter
    ) -> Tensor:
        ctx.form, ctx.cut, ctx.box = form, cut, box
        made = torch.empty_like(x)
        for here, own in _chunks(cut, made, x):
            here.copy_(form.forward(own))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        form: _Form = ctx.form
        (x,) = ctx.box.pop().saved_tensors
        weights = form.weights
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in weights]
        of_x = torch.empty_like(x)
        for here, own, given in _chunks(ctx.cut, of_x, x, gradients[0]):
            here.copy_(form.backward(own, given, sums))
        return (of_x, None, None, None, *(total.to(p.dtype) for total, p in zip(sums, weights, strict=True)))


def _chunks(cut: tuple[int, int | None], *whole: Tensor) -> Iterable[tuple[Tensor, ...]]:
    tokens, most = cut
    return islice(zip(*(x.split(tokens) for x in whole), strict=True), most)


def _add_product(total_OI: Tensor, made_nO: Tensor, given_nI: Tensor) -> None:
    """Add made^T given, its sums over n taken in the dtype of `total`."""
    if made_nO.dtype == total_OI.dtype:
        total_OI.add_(made_nO.t() @ given_nI)
    elif made_nO.device.type == "cpu":  # which has no product that leaves its sums in float32
        total_OI.add_(made_nO.t().to(total_OI.dtype) @ given_nI.to(total_OI.dtype))
    else:
        total_OI.add_(torch.mm(made_nO.t(), given_nI, out_dtype=total_OI.dtype))
