"""Checks on a few tokens that a whole model keeps documents apart: gradients between them are exactly zero. A
convolution, a state or an embedding of several tokens may carry one document into the next.

Legend: T tokens of the row · V vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anchorline.errors import UserError

# Two documents. Their sum is prime, so that [1, T, ..] is the shape of nothing else; the second is longer than the
# usual convolution.
_FIRST, _SECOND = 5, 6
_T = _FIRST + _SECOND


@dataclass
class _Watched:
    logits_1TV: Tensor
    embedded: Tensor  # the tokens' embeddings, a leaf
    lookups: dict[str, list[Tensor]] = field(default_factory=dict)  # integer [1, T, ..] given to each embedding
    layers: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, input, output; inner modules first


def check_separation(model: nn.Module) -> None:
    """Check that no token of one document reaches another, through any layer.

    The model runs twice on 11 tokens: once in training mode, so that the engine refuses now what it refuses only there,
    and once with gradients. Modes, gradients, hooks and random states are restored.

    model: a causal language model of transformers under `anchor`, inside PEFT or not, on any device.
    Raises UserError: the layer that leaks, by name; what the engine refuses; or a model in which the check sees
        nothing.
    """
    position_ids = torch.arange(_T, device=model.get_input_embeddings().weight.device)[None]  # type: ignore[operator]
    document_ids = torch.where(position_ids < _FIRST, 1, 2)
    row = {"position_ids": position_ids, "document_ids": document_ids, "use_cache": False}
    with _left_as_it_was(model):
        model.train()
        with torch.no_grad():
            before = _watch(model, input_ids=position_ids + 1, **row)
        model.eval()
        after = _watch(model, input_ids=position_ids + 3 - document_ids, **row)  # another first document
        _check_lookups(before, after)
        _check_gradients(model, after)


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Turn gradients on. Restore the modes of modules and the random states of the model's devices at the end."""
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device for p in model.parameters() if p.device.type != "cpu"}, key=str)
    kind = devices[0].type if devices else "cuda"
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _watch(model: nn.Module, **inputs: Any) -> _Watched:
    """Run the model with hooks on every module. They are removed at the end."""
    seen = _Watched(torch.empty(0), torch.empty(0))
    token_embedding = model.get_input_embeddings()  # type: ignore[operator]

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        given = next(_rows((*args, *kwargs.values())), None)
        outputs: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
        made = next(_rows(outputs), None)
        if given is not None and not given.is_floating_point():
            seen.lookups.setdefault(name, []).append(given)
        elif given is not None and made is not None:
            seen.layers.append((name, given, made))
        if module is token_embedding:
            seen.embedded = outputs[0].detach().requires_grad_()
            return seen.embedded.clone()  # a copy: a family may scale it in place
        return None

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if module is not model:

                def named(*seen: Any, name: str = name) -> Tensor | None:
                    return hook(name, *seen)

                hooks.enter_context(module.register_forward_hook(named, with_kwargs=True))
        seen.logits_1TV = model(**inputs).logits
    return seen


def _rows(values: Any) -> Iterator[Tensor]:
    return (x for x in values if isinstance(x, Tensor) and x.shape[:2] == (1, _T))


def _check_lookups(before: _Watched, after: _Watched) -> None:
    """Check that lookups of the second document do not depend on the first: integers have no gradients."""
    for name, indices in after.lookups.items():
        for mine, other in zip(indices, before.lookups.get(name, ()), strict=False):
            if not torch.equal(mine[:, _FIRST:], other[:, _FIRST:]):
                raise UserError(f"{name}: looks up several tokens at once, of two documents too; choose another model")


def _check_gradients(model: nn.Module, seen: _Watched) -> None:
    if not _reaches(seen.logits_1TV[:, -1:], seen.embedded, slice(_FIRST, _T - 1)):
        raise UserError(
            "the model: its last token sees no other token of its own document, so whether documents are separate "
            "cannot be checked; load weights first"
        )
    if not _reaches(seen.logits_1TV[:, _FIRST:], seen.embedded, slice(_FIRST)):
        return
    modules = dict(model.named_modules())
    for name, given, made in seen.layers:
        if given.requires_grad and made.requires_grad and _reaches(made[:, _FIRST:], given, slice(_FIRST)):
            raise UserError(
                f"{name} ({type(modules[name]).__name__}): carries one document into another. `anchor` replaces "
                "attention, and this is something else or ignores it; choose a model whose layers are all attention"
            )
    raise UserError("the model: carries one document into another, outside of its layers; choose another model")


def _reaches(output: Tensor, given: Tensor, tokens: slice) -> bool:
    """Whether a gradient of the output, weighted at random (a norm's sum is constant), reaches these input tokens."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    (gradient,) = torch.autograd.grad(output, given, weights, retain_graph=True, allow_unused=True)
    return gradient is not None and bool(gradient[:, tokens].any())
