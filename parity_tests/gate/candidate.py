"""The candidate's side of a case: the trainer's own code, from documents to twenty steps, on one rank or several.

Each call builds everything again, from the packer to the optimizer. So a patch of any part takes effect.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchtrain
from anchorline.errors import UserError
from parity_tests.gate.case import (
    ADDED,
    BEFORE,
    CHUNKS,
    FACTOR,
    TINY,
    GateCase,
    RowTokens,
    find_folder,
    insert_padding,
    rope_settings,
    tiny_config,
    tiny_weights,
)
from parity_tests.gate.corpus import draw_corpus
from parity_tests.gate.ranks import run_ranks
from parity_tests.gate.small_run import infinite_gradient, run_side
from parity_tests.gate.spec import CaseSpec, Single
from parity_tests.oracle import Arrays, widen
from parity_tests.taps import capture_taps
from torchtrain.attention import make_plan, resolve_engine
from torchtrain.attention.engines.flash import leave_newer
from torchtrain.attention.hf import KEEPS_ANCHOR, implementation_name
from torchtrain.attention.masks import caps_scores
from torchtrain.config import DistributedConfig, ModelConfig, PackConfig, RopeConfig, TrainConfig
from torchtrain.data import stack_rows
from torchtrain.data.rows import SpanTokens, build_row
from torchtrain.data.weights import LossWeights
from torchtrain.distributed.world import World
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.rope import extend, rotated_dimensions
from torchtrain.modeling.rotation import rotate_in_float32
from torchtrain.modeling.source import open_config
from torchtrain.training.schedule import learning_rate
from torchtrain.training.step import StepResult, accumulate, step_batches, take_step
from torchtrain.training.strategy import Replicated, make_strategy

DOMAINS = ["text"]
INPUTS = ("input_ids", "position_ids", "document_ids")  # of a forward pass


def device() -> torch.device:
    """Where candidates run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_capped(model: str) -> bool:
    """Whether the scores of a model have a soft cap, which not every engine computes."""
    if model in TINY:
        return "softcap" in ADDED.get(model, {})
    return caps_scores(open_config(find_folder(model)))


def choose_engine(spec: CaseSpec | Single) -> str:
    """The engine that a case asks for, or the fastest here. Raises UserError: it does not run here."""
    trains, dtype = set(spec.stages) != {"forward"}, getattr(torch, spec.dtype)
    return resolve_engine(spec.engine, device(), dtype, training=trains, capped=is_capped(spec.model))


def why_not_here(spec: CaseSpec) -> str | None:
    """Why this machine cannot run the case, in words; None where it can."""
    leave_newer()  # a process uses one version of FlashAttention at a time; forget that of the previous case
    try:
        choose_engine(spec)
    except UserError as error:
        return str(error)
    if spec.engine == "flex" and device().type == "cpu" and spec.dtype != "bfloat16":
        return (
            f"attention flex: on a CPU its kernel takes a 20-bit exponential, coarser than {spec.dtype}; bfloat16 runs"
        )
    return None


def candidate_side(case: GateCase) -> Arrays:
    """The arrays of the case's stages, by the oracle's names; for an AdamW step `step.before.*`, `step.*`,
    the gradients and `step.stored`, all weights as the models of all ranks hold them after it.

    Raises whatever the trainer raises.
    """
    torchtrain.register()
    packed = _Rows(case)
    stages, arrays = set(case.spec.stages), {}
    if "forward" in stages:
        batch = stack_rows(packed.rows)
        arrays |= {f"inputs.{name}": batch[name].numpy().copy() for name in INPUTS}
        plan = make_plan(batch["document_ids"])
        counts = plan.live_pairs, plan.max_seqlen_q, plan.max_seqlen_k, len(plan.seqlens_q)
        arrays["forward.counts"] = np.array(counts)
        arrays |= _taps(_build(case), packed.rows)
    if "loss" in stages:
        names = ["shift_labels", *["weights"] * case.spec.weights]
        arrays |= {f"inputs.{name}": np.stack([row[name] for row in packed.rows]) for name in names}
    if stages & {"loss", "gradients", "step"}:
        arrays |= _on_ranks(case, packed, _one_step)
    if "trajectory" in stages:
        arrays |= _on_ranks(case, packed, _trajectory)
    if "run" in stages:
        arrays |= run_side(case, _begin(case), lambda folder: _exported_taps(case, folder))
    return arrays


def _exported_taps(case: GateCase, folder: str) -> Arrays:
    """The taps of an exported model, loaded by transformers alone, on the rows that were held out."""
    from transformers import AutoModelForCausalLM

    engine = implementation_name(case.spec.engine)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=engine, trust_remote_code=False
    )
    return _taps(model.to(device()), [pack(row, case.spec) for row in draw_corpus(case.spec).held_out_rows()])


def _taps(model: Any, rows: Sequence[dict[str, np.ndarray]]) -> Arrays:
    """The taps of a model that has seen other documents in the same tensor: its plan has to follow."""
    batch = stack_rows(rows)
    inputs = {name: batch[name].to(device()) for name in INPUTS}
    ids_BT = inputs["document_ids"]
    right_BT = ids_BT.clone()
    model.eval()
    with torch.no_grad():
        model(**inputs | {"document_ids": ids_BT.clamp_(max=1)}, use_cache=False)
    ids_BT.copy_(right_BT)
    return capture_taps(model, **inputs)


class _Rows:
    """The case's rows as the trainer's packer makes them, again and again."""

    def __init__(self, case: GateCase) -> None:
        self.rows = [pack(row, case.spec) for row in case.rows]
        if (settings := case.step.loss_weight) is not None:
            weights = LossWeights.measure(settings, self.rows)
            self.rows = [weights.weigh(row, np.random.default_rng()) for row in self.rows]

    def row_at(self, index: int) -> dict[str, np.ndarray]:
        return self.rows[index % len(self.rows)]


_TokenLosses = dict[int, np.ndarray]  # of a rank's rows in a step, by the number of the row


def _note_losses(world: World, rows: _TokenLosses) -> Callable[[Tensor, Mapping[str, Any]], None]:
    def note(each_BT: Tensor, part: Mapping[str, Any]) -> None:
        # Micro-batches are dealt out to the ranks in turn.
        rows[world.rank + len(rows) * world.size] = widen(each_BT[0])

    return note


def _on_ranks(
    case: GateCase, packed: _Rows, run: Callable[[GateCase, _Rows, Any, World], tuple[Arrays, dict[str, _TokenLosses]]]
) -> Arrays:
    """What the first rank computed; each rank's losses of its own tokens; the weights of all ranks."""
    models = [_build(case) for _ in range(case.spec.ranks)]
    ranks = run_ranks(case.spec.ranks, device(), lambda world: run(case, packed, models[world.rank], world))
    arrays = ranks[0][0]
    for name in ranks[0][1]:
        by_number = {number: row for _, losses in ranks for number, row in losses[name].items()}
        arrays[name] = np.stack([by_number[number] for number in range(len(packed.rows))])
    if "step.stored" in arrays:
        arrays["step.stored"] = np.concatenate([found["step.stored"] for found, _ in ranks])
    return arrays


def _strategy(engine: str, model: Any, train: TrainConfig, world: World) -> Replicated:
    strategy = make_strategy(model, engine, DistributedConfig(), train, world)
    assert isinstance(strategy, Replicated)
    return strategy


def _one_step(case: GateCase, packed: _Rows, model: Any, world: World) -> tuple[Arrays, dict[str, _TokenLosses]]:
    """The first step of a run, held before its update to read the gradients."""
    train, stages, arrays = case.step, set(case.spec.stages), {}
    strategy = _strategy(case.spec.engine, model, train, world)
    optimizer = strategy.optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masters = {
        names[id(parameter)]: master for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True)
    }
    tokens: _TokenLosses = {}
    batches = step_batches(packed, 0, train, DOMAINS, world)
    losses, pairs = accumulate(strategy, batches, DOMAINS, train.loss_chunk, _note_losses(world, tokens))
    assert losses.overall.value is not None, "no token has a label"
    if "loss" in stages:
        arrays["loss"] = np.array([losses.overall.value])
        arrays["loss.counts"] = np.array([pairs, losses.overall.tokens])
    if stages & {"gradients", "step"}:
        arrays |= {f"gradients.{name}": widen(_gradient(master)) for name, master in masters.items()}
    if "step" in stages:
        arrays |= {f"step.before.{name}": widen(master) for name, master in masters.items()}
        strategy.step(learning_rate(0, train))
        arrays |= {f"step.{name}": widen(master) for name, master in masters.items()}
        stored = dict(model.named_parameters())
        arrays["step.stored"] = np.concatenate([widen(stored[name]).ravel() for name in masters])
    return arrays, {"loss.tokens": tokens} if "loss" in stages else {}


def _trajectory(case: GateCase, packed: _Rows, model: Any, world: World) -> tuple[Arrays, dict[str, _TokenLosses]]:
    """The steps of a run, one after another."""
    train = case.trajectory
    strategy = _strategy(case.spec.engine, model, train, world)
    found: list[StepResult] = []
    tokens: dict[str, _TokenLosses] = {}
    for number in range(train.steps):
        batches = step_batches(packed, number, train, DOMAINS, world)
        note = _note_losses(world, tokens.setdefault(f"trajectory.{number}", {}))
        with infinite_gradient(model, number + 1 == case.spec.infinite_step):
            found.append(take_step(strategy, batches, DOMAINS, number, train, lambda _: None, note))
    rates, norms = [step.learning_rate for step in found], [step.gradient_norm for step in found]
    return {"trajectory.rates": np.array(rates), "trajectory.norms": np.array(norms)}, tokens


def pack(row: RowTokens, spec: CaseSpec) -> dict[str, np.ndarray]:
    """The trainer's packer on one row: int64 [T]."""
    pack = PackConfig(sequence_length=spec.tokens - len(row.holes), variant=spec.variant, chunks=CHUNKS)
    spans = [
        SpanTokens(document, domain, tag.tolist(), targets)
        for document, domain, tag, targets in zip(
            row.documents, row.domains, row.tags, row.targets or [None] * len(row.documents), strict=True
        )
    ]
    packed = build_row(spans, pack, row.anchor.tolist(), pad_id=0, random=np.random.default_rng(row.seed))
    return insert_padding(packed | {"position_ids": packed["position_ids"] + spec.position_offset}, row.holes)


def _build(case: GateCase) -> Any:
    """The model, extended and loaded as the trainer does it, in training mode."""
    spec = case.spec
    if case.folder is not None:
        model = _load(case.folder, spec)
    else:
        model = _draw(_extend(_extended_before(spec), spec), spec, getattr(torch, spec.dtype))
        if spec.model == "loaded":
            with TemporaryDirectory() as written:
                model.save_pretrained(written)
                model = _load(written, spec)
        elif spec.rotation == "float32":
            rotate_in_float32(model)
    for module in model.modules():  # as `attach` does
        setattr(module, KEEPS_ANCHOR, spec.beyond_window == "anchor")
    return model.to(device()).train()


def _begin(case: GateCase) -> Any:
    """The model that a whole run begins with, in float32."""
    return _draw(_extended_before(case.spec), case.spec, torch.float32)


def _draw(config: Any, spec: CaseSpec, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    # Built in its dtype: `.to(bfloat16)` would round RoPE's inverse frequencies as well.
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=implementation_name(spec.engine), trust_remote_code=False
    )
    if spec.model in ("capped", "sinks"):
        _add(model, dtype, **ADDED[spec.model])
    weights = {name: torch.from_numpy(array).to(dtype) for name, array in tiny_weights(spec.model, spec.seed).items()}
    # A tied head has no weight of its own.
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return model


def _add(
    model: Any,
    dtype: torch.dtype,
    softcap: float | None = None,
    sinks: bool = False,
    logits_softcap: float | None = None,
    head_bias: bool = False,
) -> None:
    """Let every layer hand a soft cap, as Gemma 2's do, or sinks, as gpt-oss's do, on to its attention; and the head
    have a cap, of which the trainer reads in the config, and a bias.
    """
    if head_bias:
        model.lm_head.bias = nn.Parameter(torch.zeros(model.config.vocab_size, dtype=dtype))
    if (cap := logits_softcap) is not None:
        model.config.final_logit_softcapping = cap
        model.lm_head.register_forward_hook(lambda _, args, out: torch.tanh(out / cap) * cap)

    def hand_on(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"softcap": softcap, "s_aux": module.sinks if sinks else None}

    for layer in model.model.layers:
        if sinks:
            layer.self_attn.sinks = nn.Parameter(torch.zeros(model.config.num_attention_heads, dtype=dtype))
        layer.self_attn.register_forward_pre_hook(hand_on, with_kwargs=True)


def _extended_before(spec: CaseSpec) -> Any:
    """The tiny model's config, after its first extension where it had one."""
    config = tiny_config(spec)
    if spec.rope_before == "default":
        return config
    first = spec.model_copy(update={"rope": spec.rope_before, "rope_before": "default", "rope_parameters": "usual"})
    settings: dict[str, Any] = rope_settings(first, config.head_dim // 2) | {"factor": BEFORE}
    rope = RopeConfig(type=spec.rope_before, **settings)
    longer = config.max_position_embeddings * (1 if spec.rope_before == "dynamic" else BEFORE)
    return extend(config, rope, longer)


def _load(folder: str, spec: CaseSpec) -> Any:
    config = open_config(folder)
    config = config if spec.model == "loaded" else _extend(config, spec)  # which was extended before it was written
    # The schema of the trainer knows no float16; its loader takes any dtype of torch by name.
    recomputes: Any = {
        "dtype": spec.dtype,
        "rotation": spec.rotation,
        "activation_checkpointing": spec.model == "loaded",
    }
    settings = ModelConfig.model_construct(source=folder, **recomputes)
    return load_for_training(folder, config, settings, spec.engine, device())


def _extend(config: Any, spec: CaseSpec) -> Any:
    settings = rope_settings(spec, rotated_dimensions(config) // 2)
    rope = RopeConfig(type=spec.rope, **settings)
    if spec.rope == "keep" and rope.theta == "keep":
        return config
    # `dynamic` scales beyond the length that the model is made for; so it is made for no more.
    held = config.max_position_embeddings // (1 if spec.rope_before in ("default", "dynamic") else BEFORE)
    as_it_is = spec.rope in ("keep", "default") or ("factor" in settings and spec.rope == "dynamic")
    return extend(config, rope, held if as_it_is else held * int(FACTOR))


def _gradient(master: Tensor) -> Tensor:
    return torch.zeros_like(master) if master.grad is None else master.grad
