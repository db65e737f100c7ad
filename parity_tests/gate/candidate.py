"""The candidate's side of a case: the trainer's own road, from documents to twenty steps.

Everything is built anew in each call, from the packer to the optimizer: what is patched takes effect.

Legend: B batch · T tokens of a row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchtrain
from anchorline.errors import UserError
from parity_tests.gate.material import (
    CHUNKS,
    TINY,
    TRAIN,
    TRAJECTORY,
    Row,
    rope_settings,
    rows,
    source,
    tiny_config,
    tiny_weights,
)
from parity_tests.gate.spec import CaseSpec
from parity_tests.taps import capture_taps
from torchtrain.attention import make_plan, resolve_engine
from torchtrain.attention.hf import implementation_name
from torchtrain.config import ModelConfig, PackConfig, RopeConfig
from torchtrain.data.rows import Segment, build_row
from torchtrain.modeling.load import load_model, open_config
from torchtrain.modeling.rope import extend
from torchtrain.training.loop import backward
from torchtrain.training.optimizer import Optimizer

Arrays = dict[str, np.ndarray]


def device() -> torch.device:
    """Where candidates run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def why_not_here(spec: CaseSpec) -> str | None:
    """Why this machine cannot run the case, in words; None where it can."""
    trains = set(spec.stages) != {"forward"}
    try:
        resolve_engine(spec.engine, device(), getattr(torch, spec.dtype), training=trains)
    except UserError as error:
        return str(error)
    if spec.engine == "flex" and device().type == "cpu" and spec.dtype != "bfloat16":
        return (
            f"attention flex: on a CPU its kernel takes a 20-bit exponential, coarser than {spec.dtype}; bfloat16 runs"
        )
    return None


def candidate_side(spec: CaseSpec) -> Arrays:
    """The arrays of the case's stages, by the oracle's names; for an AdamW step `step.before.*`, `step.*`,
    the gradients and `step.stored`, all weights as the model holds them after it.

    Raises whatever the trainer raises.
    """
    torchtrain.register()
    parts = [_packed(row, spec) for row in rows(spec)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    stages, arrays = set(spec.stages), {}
    if "forward" in stages:
        names = ("input_ids", "position_ids", "document_ids")
        arrays |= {f"inputs.{name}": batch[name].numpy() for name in names}
        arrays |= _taps(_build(spec).eval(), {name: batch[name].to(device()) for name in names})
    if "loss" in stages:
        arrays["inputs.shift_labels"] = batch["shift_labels"].numpy()
    if stages & {"loss", "gradients", "step"}:
        arrays |= _one_step(_build(spec), parts, stages)
    if "trajectory" in stages:
        model = _build(spec)
        optimizer = Optimizer(model, TRAJECTORY)
        for number in range(TRAJECTORY.steps):
            arrays[f"trajectory.{number}"] = _backward(model, parts)[1]
            optimizer.step(TRAJECTORY.learning_rate)
    return arrays


def _taps(model: Any, inputs: dict[str, Tensor]) -> Arrays:
    return capture_taps(model, **inputs, plan=make_plan(inputs["document_ids"]))


def _one_step(model: Any, parts: list[dict[str, Tensor]], stages: set[Any]) -> Arrays:
    optimizer = Optimizer(model, TRAIN)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masters = {
        names[id(parameter)]: master for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True)
    }
    loss, nll_BT = _backward(model, parts)
    arrays = {"loss": np.array([loss]), "loss.tokens": nll_BT} if "loss" in stages else {}
    if stages & {"gradients", "step"}:
        arrays |= {f"gradients.{name}": _numpy(_gradient(master)) for name, master in masters.items()}
    if "step" in stages:
        arrays |= {f"step.before.{name}": _numpy(master) for name, master in masters.items()}
        optimizer.step(TRAIN.learning_rate)
        arrays |= {f"step.{name}": _numpy(master) for name, master in masters.items()}
        stored = dict(model.named_parameters())
        arrays["step.stored"] = np.concatenate([_numpy(stored[name]).ravel() for name in masters])
    return arrays


def _backward(model: Any, parts: list[dict[str, Tensor]]) -> tuple[float, np.ndarray]:
    """One step's backward pass, a row a micro-batch: the mean loss, and the loss of every token [B, T].

    Every token is its own domain, so that the trainer's sums by domain are the losses of the tokens.
    """
    B, T = len(parts), parts[0]["input_ids"].shape[1]
    domains_BT = torch.arange(B * T).view(B, 1, T)
    parts = [part | {"domain_ids": domain} for part, domain in zip(parts, domains_BT, strict=True)]
    losses, _ = backward(model, parts, [str(token) for token in range(B * T)], TRAIN.loss_chunk)
    assert losses.overall.value is not None, "no token has a label"
    by_token = [mean.total for mean in losses.by_domain.values()]
    return losses.overall.value, np.array(by_token).reshape(B, T)


def _packed(row: Row, spec: CaseSpec) -> dict[str, Tensor]:
    """The trainer's packer on one row: int64 [1, T]."""
    pack = PackConfig(sequence_length=spec.tokens, variant=spec.variant, chunks=CHUNKS)
    segments = [
        Segment(document, domain=0, tag=tag.tolist()) for document, tag in zip(row.documents, row.tags, strict=True)
    ]
    packed = build_row(segments, pack, row.anchor.tolist(), pad_id=0, random=np.random.default_rng(row.seed))
    packed["position_ids"] = packed["position_ids"] + spec.position_offset
    return {name: torch.from_numpy(array)[None] for name, array in packed.items()}


def _build(spec: CaseSpec) -> Any:
    """The model, extended and loaded as the trainer does it, in training mode."""
    from transformers import AutoModelForCausalLM

    dtype, where = getattr(torch, spec.dtype), device()
    if spec.model not in TINY:
        folder = source(spec.model)
        config = _extended(open_config(folder), spec)
        # The schema of the trainer knows no float16; its loader takes any dtype of torch by name.
        settings = ModelConfig.model_construct(source=folder, dtype=spec.dtype, activation_checkpointing=False)  # type: ignore[arg-type]
        return load_model(folder, config, settings, spec.engine, where)
    config = _extended(tiny_config(spec.model), spec)
    # Built in its dtype: `.to(bfloat16)` would round RoPE's inverse frequencies as well.
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=implementation_name(spec.engine), trust_remote_code=False
    )
    weights = {name: torch.from_numpy(array).to(dtype) for name, array in tiny_weights(spec.model, spec.seed).items()}
    # A tied head has no weight of its own.
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return model.to(where).train()


def _extended(config: Any, spec: CaseSpec) -> Any:
    if spec.rope == "keep":
        return config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = RopeConfig(type=spec.rope, **rope_settings(spec.rope, head_dim // 2))
    # `dynamic` scales beyond the length that the model is made for; so it is made for no more.
    held = config.max_position_embeddings
    stretched = held if spec.rope in ("default", "dynamic") else held * 8
    return extend(config, rope, stretched)


def _gradient(master: Tensor) -> Tensor:
    return torch.zeros_like(master) if master.grad is None else master.grad


def _numpy(x: Tensor) -> np.ndarray:
    """A copy, widened exactly to float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().to("cpu", wide, copy=True).numpy()
