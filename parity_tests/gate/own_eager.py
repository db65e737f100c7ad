"""A case of a family that the oracle has no decoder of: Gemma, Phi-3, OLMo 2, Granite, Mixtral, gpt-oss, ...

The truth is the model in float64 under transformers' own eager attention, which is given the mask rule as a 4D float
mask. The reference is the same in the case's dtype. Products are transformers' own on all sides. So attention is
judged: its mask, scale, windows, caps, sinks and gradients. Norms and tables of RoPE have a truth of their own, from
their formulas.

Legend: B batch · T tokens of a row · M model width.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from anchorline.errors import UserError
from jaxref.frequencies import inverse_frequencies
from jaxref.mask import PADDING
from jaxref.rope_spec import RopeSpec
from parity_tests.families import logits_and_gradients
from parity_tests.gate.candidate import INPUTS, device, pack
from parity_tests.gate.case import GateCase, draw_rows
from parity_tests.gate.spec import CaseSpec
from parity_tests.gate.truth import OracleArrays
from parity_tests.oracle import Arrays, error_of_table, widen
from torchtrain.attention.hf import KEEPS_ANCHOR
from torchtrain.config import ModelConfig
from torchtrain.data import stack_rows
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.source import open_config

STAGES = ("forward", "gradients")
# What a case may set here.
_TAKEN = {"model", "variant", "engine", "dtype", "tokens", "position_offset", "documents", "anchor_tokens", "padding"}
_TAKEN |= {"beyond_window", "seed", "stages"}


def reference_name(case: GateCase) -> str:
    """Say what gives the allowance."""
    return f"transformers' own eager attention in {case.spec.dtype}: the oracle has no decoder of {case.unknown_family}"


def own_eager_sides(case: GateCase) -> tuple[Arrays, OracleArrays]:
    """Return the candidate's arrays, and truth and reference of them.

    Arrays: the output of every layer and the logits, 0 at padding; the gradients of a random weighting of the logits,
    by module.

    Raises UserError: a setting that needs the oracle's decoder, or half precision in a model with experts.
    """
    spec, family, folder = case.spec, case.unknown_family, case.folder
    assert folder is not None, "a tiny model has a decoder"
    for name, field in type(spec).model_fields.items():
        if name not in _TAKEN and getattr(spec, name) != field.default:
            raise UserError(f"{name}: the oracle has no decoder of {family}; leave {name} out")
    if other := set(spec.stages) - set(STAGES):
        raise UserError(f"stages {min(other)}: the oracle has no decoder of {family}; choose from {','.join(STAGES)}")
    settings = ModelConfig.model_construct(source=folder, dtype=spec.dtype, activation_checkpointing=False)  # type: ignore[arg-type]
    model: Any = load_for_training(folder, open_config(folder), settings, spec.engine, device()).eval()
    if model._can_set_experts_implementation():
        if spec.dtype != "float32":
            raise UserError(
                f"dtype {spec.dtype}: {family} chooses experts, and a rounding changes a choice and with it a whole "
                "token; give float32"
            )
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    for module in model.modules():  # as `attach` does
        setattr(module, KEEPS_ANCHOR, spec.beyond_window == "anchor")
    batch = {
        name: x.to(device()) for name, x in stack_rows([pack(row, spec) for row in draw_rows(spec, folder)]).items()
    }
    inputs = {name: batch[name] for name in INPUTS}
    run = {"backward": "gradients" in spec.stages, "hidden": True}
    ours = model.config._attn_implementation
    with patch.object(functional, "softmax", _softmax_as_wide_as_its_input):
        truth = logits_and_gradients(copy.deepcopy(model).double(), "eager", inputs, **run)
    reference = logits_and_gradients(model, "eager", inputs, **run)
    with watch_pieces(model) as pieces:
        candidate = logits_and_gradients(model, ours, inputs, **run)
    documents_BT, forward = batch["document_ids"].cpu().numpy(), "forward" in spec.stages
    pieces = {name: of for name, of in pieces.items() if forward and of[0].shape[:2] == documents_BT.shape}
    sides = [_named(side, documents_BT, spec) for side in (candidate, truth, reference)]
    sides = [side | {name: of[number] for name, of in pieces.items()} for number, side in enumerate(sides)]
    exact = {"inputs.document_ids": documents_BT} if forward else {}
    return sides[0] | exact, OracleArrays(sides[1], sides[2], exact, {name: of[3] for name, of in pieces.items()})


@contextmanager
def watch_pieces(model: Any) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Collect the first norm of each kind of place and each table of RoPE, by module: output, truth, reference, and
    what a reference may well err. Left out are types of RoPE that the oracle lacks, and norms inside of a block that
    have an epsilon of their own (MiniMax).
    """
    config, found, hooks = model.config.get_text_config(decoder=True), {}, {}
    epsilon = next((e for name in _EPSILONS if (e := getattr(config, name, None)) is not None), 1e-6)

    def of_norm(name: str, module: Any, given: Any, out: torch.Tensor) -> None:
        for x in given[:1]:
            true, wide = (_norm(model, module, epsilon, x.to(of)) for of in (torch.float64, torch.float32))
            found.setdefault(name, (widen(out), widen(true), widen(wide.to(out.dtype)), 0.0))

    def of_table(name: str, _: Any, given: Any, named: dict[str, Any], out: Any) -> None:
        positions = widen(named["position_ids"] if "position_ids" in named else given[1])
        kind = named.get("layer_type", given[2] if len(given) > 2 else None)
        try:
            rope = RopeSpec.from_hf(config.to_dict(), kind)
        except UserError:
            return
        frequencies_C, scaling = inverse_frequencies(rope, int(positions.max()) + 1)
        tables, C = [widen(x) for x in out], len(frequencies_C)
        # Of two equal halves, or of pairs of neighbours (Cohere), or each once.
        pairs = tables[0].shape[-1] == 2 * C and all((x[..., ::2] == x[..., 1::2]).all() for x in tables)
        mine = np.concatenate([x[..., ::2] if pairs else x[..., :C] for x in tables], axis=-1)
        angle = positions[..., None] * frequencies_C
        truth = np.concatenate([np.cos(angle), np.sin(angle)], axis=-1) * scaling
        if tables[0].shape[-1] in (C, 2 * C) and mine.shape == truth.shape:
            rounded = widen(torch.from_numpy(truth).float().to(out[0].dtype))
            likely = error_of_table(angle, scaling, truth.size)
            found.setdefault(f"{name}.{kind}" if kind else name, (mine, truth, rounded, likely))

    for name, module in model.named_modules():
        place = re.sub(r"\d+", "0", name)
        own = getattr(module, "variance_epsilon", getattr(module, "eps", epsilon))
        is_norm = _NORM.search(type(module).__name__) and getattr(module, "weight", None) is not None
        if is_norm and place not in hooks and (own == epsilon or re.search(r"(\d|model)\.\w+$", name)):
            hooks[place] = module.register_forward_hook(partial(of_norm, f"pieces.{name}"))
        elif name.endswith("rotary_emb"):
            hooks[name] = module.register_forward_hook(partial(of_table, f"pieces.{name}"), with_kwargs=True)
    try:
        yield found
    finally:
        for hook in hooks.values():
            hook.remove()


_NORM = re.compile(r"(RMS|Layer)Norm$")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


@torch.no_grad()
def _norm(model: Any, module: Any, epsilon: float, x: torch.Tensor) -> torch.Tensor:
    """The formula. What a family initialises to zero has one added to it (Gemma)."""
    fresh = copy.deepcopy(module)
    fresh.weight = torch.nn.Parameter(torch.full_like(module.weight, 7.0))
    model._init_weights(fresh)
    if "RMS" not in type(module).__name__:
        x = x - x.mean(-1, keepdim=True)
    weight = module.weight.to(x.dtype) + bool((fresh.weight == 0).all())
    normed = weight * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return normed if getattr(module, "bias", None) is None else normed + module.bias


_softmax = functional.softmax


def _softmax_as_wide_as_its_input(x: torch.Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """transformers' eager attention asks for float32 whatever it is given."""
    return _softmax(x, *args, dtype=x.dtype, **kwargs)


def _named(found: dict[str, torch.Tensor], documents_BT: np.ndarray, spec: CaseSpec) -> Arrays:
    """The stages' arrays."""
    arrays: Arrays = {}
    for name, tensor in found.items():
        forward = not name.startswith("gradients.")
        if forward and "forward" not in spec.stages:
            continue
        array = arrays[name] = widen(tensor)  # a copy: what is put to 0 is not the model's own
        if forward:
            array[documents_BT == PADDING] = 0  # eager attends from padding to all tokens, `anchor` to none
    return arrays
