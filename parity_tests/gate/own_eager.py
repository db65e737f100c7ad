"""A case of a family that the oracle has no decoder of: Gemma, Phi-3, OLMo 2, Granite, Mixtral, gpt-oss, ...

The truth is the model in float64 under transformers' own eager attention, which is given the mask rule as a 4D float
mask. The reference is the same in the case's dtype. Norms, RoPE and products are transformers' own on all sides. So
attention is judged: its mask, scale, windows, caps, sinks and gradients.

Legend: B batch · T tokens of a row · M model width.
"""

import copy
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from anchorline.errors import UserError
from jaxref.mask import PADDING
from parity_tests.families import logits_and_gradients
from parity_tests.gate.candidate import device, pack
from parity_tests.gate.case import GateCase, draw_rows
from parity_tests.gate.spec import CaseSpec
from parity_tests.gate.truth import OracleArrays
from parity_tests.oracle import Arrays
from torchtrain.attention.hf import KEEPS_ANCHOR
from torchtrain.config import ModelConfig
from torchtrain.data import stack_rows
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.source import open_config

STAGES = ("forward", "gradients")
_LEFT_ALONE = (
    "rope",
    "rope_parameters",
    "rope_before",
    "schedule",
    "warmup_steps",
    "ranks",
    "repeats",
    "rotation",
    "answers",
)


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
    for name in _LEFT_ALONE:
        if getattr(spec, name) != type(spec).model_fields[name].default:
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
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "document_ids")}
    run = {"backward": "gradients" in spec.stages, "hidden": True}
    ours = model.config._attn_implementation
    with patch.object(functional, "softmax", _softmax_as_wide_as_its_input):
        truth = logits_and_gradients(copy.deepcopy(model).double(), "eager", inputs, **run)
    reference = logits_and_gradients(model, "eager", inputs, **run)
    candidate = logits_and_gradients(model, ours, inputs, **run)
    documents_BT = batch["document_ids"].cpu().numpy()
    sides = [_named(side, documents_BT, spec) for side in (candidate, truth, reference)]
    exact = {"inputs.document_ids": documents_BT} if "forward" in spec.stages else {}
    return sides[0] | exact, OracleArrays(sides[1], sides[2], exact)


_softmax = functional.softmax


def _softmax_as_wide_as_its_input(x: torch.Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """transformers' eager attention asks for float32 whatever it is given."""
    return _softmax(x, *args, dtype=x.dtype, **kwargs)


def _named(found: dict[str, torch.Tensor], documents_BT: np.ndarray, spec: CaseSpec) -> Arrays:
    """The stages' arrays under the oracle's names."""
    arrays: Arrays = {}
    layers = sum(name.startswith("hidden.") for name in found) - 2
    for name, tensor in found.items():
        array = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).numpy()
        if name == "logits" or name.startswith("hidden."):
            if "forward" not in spec.stages:
                continue
            array[documents_BT == PADDING] = 0  # eager attends from padding to all tokens, `anchor` to none
            number = int(name.removeprefix("hidden.")) if name != "logits" else -1
            ends = {-1: "logits", 0: "embed", layers + 1: "final_norm"}
            arrays[ends.get(number, f"layers.{number - 1}.residual")] = array
        else:
            arrays[f"gradients.{name}"] = array
    return arrays
