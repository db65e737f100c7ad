"""Computes a layer's norms and gated MLP, which treat each token alone, for some tokens at a time.

The forward pass keeps only the input; the backward pass computes a chunk again, takes its gradients and drops it (tiled
computation, as in arXiv 2506.13996). A weight's gradient is summed over chunks in float32 and rounded once: bfloat16
would lose a chunk's part below 1/256 of the sum. A library may add up a product of fewer rows in another order; where a
chunk holds all tokens, the bits are those of the plain modules. Weights are read from the module at each use, because
ZeRO 3 gathers them anew in each pass (`used_by`). A frozen weight gets no gradient.

Legend: n tokens of a chunk · N all tokens · M model width · I width within the MLP · O, R width of what a linear layer
makes, and of what its adapter makes within · D width of a norm.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anchorline.errors import UserError
from torchtrain.modeling.adapters import is_linear, layer_and_factors
from torchtrain.modeling.weights import whole_shape
from torchtrain.products import linear, multiply

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_anchorline_chunked"


def chunk_layers(model: nn.Module, tokens: int, most: int | None = None) -> None:
    """Make norms and MLPs run for at most `tokens` tokens at a time, and again in the backward pass. most: how many
    chunks are computed (of shapes, few show what all hold); default: all. Raises UserError: a layer is of another kind.
    """
    for form in _forms(model):
        setattr(form.module, _MARK, form)
        form.module.forward = partial(_run, form, tokens, most)


def check_chunks(model: "PreTrainedModel") -> None:
    """Check that one norm and MLP of each kind computes the same bits in chunks. Raises UserError: one does not."""
    kinds = {(type(form.module), type(getattr(form.module, "act_fn", None))): form for form in _forms(model)}
    for form in kinds.values():
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


class _Linear:
    """A linear layer, with an adapter or without, and its gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.layer, self.adapter = layer_and_factors(module)

    def forward(self, x_nI: Tensor) -> Tensor:
        made_nO = linear(x_nI, self.layer.weight, self.layer.bias)
        if self.adapter is None:
            return made_nO
        a, b, scale = self.adapter
        return made_nO + linear(linear(x_nI, a.weight), b.weight) * scale

    def backward(self, x_nI: Tensor, gradient_nO: Tensor, sums: Iterator[Tensor | None]) -> Tensor:
        """Return the gradient of x; add its parameters' to as many float32 sums (None: of a frozen one)."""
        _add_product(next(sums), gradient_nO, x_nI)
        if self.layer.bias is not None and (total_O := next(sums)) is not None:
            total_O.add_(gradient_nO.sum(0, dtype=total_O.dtype))
        of_x_nI = multiply(gradient_nO, self.layer.weight)
        if self.adapter is None:
            return of_x_nI
        a, b, scale = self.adapter
        of_b_nO = gradient_nO * scale
        of_a_nR = multiply(of_b_nO, b.weight)
        _add_product(next(sums), of_a_nR, x_nI)
        _add_product(next(sums), of_b_nO, linear(x_nI, a.weight))
        return of_x_nI + multiply(of_a_nR, a.weight)


class _GatedMLP:
    """down(act(gate(x)) * up(x)), with or without biases and adapters."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @staticmethod
    def fits(module: Any) -> bool:
        parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
        linear = all(map(is_linear, parts)) and callable(getattr(module, "act_fn", None))
        own = sum(1 for part in parts if isinstance(part, nn.Module) for _ in part.parameters())
        return linear and own == sum(1 for _ in module.parameters())

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self.module.down_proj, self.module.gate_proj, self.module.up_proj  # in the order of their gradients

    @property
    def width(self) -> int:
        return self.module.gate_proj.in_features

    @property
    def weights(self) -> list[nn.Parameter]:
        return [p for module in self._modules for p in module.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        down, gate, up = map(_Linear, self._modules)
        return down.forward(self.module.act_fn(gate.forward(x)) * up.forward(x))

    def backward(self, x: Tensor, gradient: Tensor, sums: list[Tensor | None]) -> Tensor:
        (down, gate, up), places = map(_Linear, self._modules), iter(sums)
        with torch.enable_grad():
            gate_nI, up_nI = (half.forward(x).detach().requires_grad_() for half in (gate, up))
            inner_nI = self.module.act_fn(gate_nI) * up_nI
        of_inner_nI = down.backward(inner_nI.detach(), gradient, places)
        of_gate, of_up = torch.autograd.grad(inner_nI, (gate_nI, up_nI), of_inner_nI)
        del gate_nI, up_nI, inner_nI, of_inner_nI
        return gate.backward(x, of_gate, places) + up.backward(x, of_up, places)

    def is_right(self, x: Tensor) -> bool:
        """Whether the module gives the same bits for a few tokens, each weight whole where its owner runs."""
        module = self.module
        return torch.equal(module(x), module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x)))


class _RMSNorm:
    """weight * (x / root mean square of x), the division in float32."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @staticmethod
    def fits(module: Any) -> bool:
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

    def backward(self, x: Tensor, gradient: Tensor, sums: list[Tensor | None]) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            normal_nD = self._normalize(x)
        (of_x,) = torch.autograd.grad(normal_nD, x, gradient * self.module.weight)
        if (total_D := sums[0]) is not None:
            wide = total_D.dtype
            total_D.add_((gradient.to(wide) * normal_nD.detach().to(wide)).flatten(0, -2).sum(0))
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


_Form = _GatedMLP | _RMSNorm


def _forms(model: nn.Module) -> Iterator[_Form]:
    """Yield what is computed in chunks: the MLP of each layer, and every norm."""
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


def _refusal(model: nn.Module, why: str) -> UserError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return UserError(
        f"model.layer_chunk: {kind} has not the gated MLP and norms of LLaMA, Mistral and Qwen, {why}; set "
        "model.layer_chunk to null, or choose another model"
    )


def _run(form: _Form, tokens: int, most: int | None, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    if torch.is_grad_enabled() and not rows.requires_grad and any(p.requires_grad for p in form.weights):
        rows = rows.detach().requires_grad_()  # of a frozen embedding: `_Keep` keeps what needs a gradient alone
    box: list[Any] = []
    kept = _Keep.apply(rows, box)
    made: Any = _Chunked.apply(kept, form, (tokens, most), box, *form.weights)
    return made.unflatten(0, x.shape[:2])


class _Keep(torch.autograd.Function):
    """The same, kept for `_Chunked` before that runs: a layer is computed again up to the last tensor that it kept, so
    that its MLP, which comes last, is not computed once more in vain.
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
        sums = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) if needed else None
            for p, needed in zip(weights, ctx.needs_input_grad[4:], strict=True)
        ]
        of_x = torch.empty_like(x)
        for here, own, given in _chunks(ctx.cut, of_x, x, gradients[0]):
            here.copy_(form.backward(own, given, sums))
        made = (None if total is None else total.to(p.dtype) for total, p in zip(sums, weights, strict=True))
        return (of_x, None, None, None, *made)


def _chunks(cut: tuple[int, int | None], *whole: Tensor) -> Iterable[tuple[Tensor, ...]]:
    tokens, most = cut
    return islice(zip(*(x.split(tokens) for x in whole), strict=True), most)


def _add_product(total_OI: Tensor | None, made_nO: Tensor, given_nI: Tensor) -> None:
    """Add made^T given, its sums over n taken in the dtype of `total`; None: it is not needed."""
    if total_OI is None:
        return
    if made_nO.dtype == total_OI.dtype:
        total_OI.add_(made_nO.t() @ given_nI)
    elif made_nO.device.type == "cpu":  # which has no product that leaves its sums in float32
        total_OI.add_(made_nO.t().to(total_OI.dtype) @ given_nI.to(total_OI.dtype))
    else:
        total_OI.add_(torch.mm(made_nO.t(), given_nI, out_dtype=total_OI.dtype))
