"""The plug-in for transformers: attention implementation `anchor`, and one name per engine (`implementation_name`).

Use `torchtrain.attach(model)` (`torchtrain.attention.attach`): it checks the whole model. Without it,

    torchtrain.register()
    model.set_attn_implementation("anchor")
    model(input_ids, position_ids=position_ids, document_ids=document_ids, use_cache=False)

refuses at the first call the faults that an attention function and a mask builder (`masks`) can see. They do not see
layers that are not attention: only `attach` finds those.

Extra keyword arguments of `model(...)` travel to every layer's attention function, through gradient checkpointing too:
`document_ids` [B, T], and optionally `plan`, built once per batch by `make_plan`. Without a plan, the
first layer builds it from the document ids and keeps it on that tensor for the others.

Upstream: transformers/modeling_utils.py (AttentionInterface), transformers/masking_utils.py (AttentionMaskInterface).

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · E head_dim of values.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from anchorline.errors import UserError
from torchtrain.attention.callers import callers, is_generating, say_no_cache
from torchtrain.attention.engines.choice import ENGINES, attend, resolve_engine
from torchtrain.attention.masks import read_mask, window_of
from torchtrain.attention.plan import AttentionPlan, make_plan
from torchtrain.attention.remember import remember
from torchtrain.attention.rounding import round_after_rope

logger = logging.getLogger(__name__)
announced: set[tuple[str, str, torch.dtype]] = set()
_watching: list[set[torch.dtype]] = []
# Why torch.compile leaves attention as it is when it compiles a model's layers:
APART = "attention stands apart: its documents are others in every step"
KEEPS_ANCHOR = "keeps_anchor"  # attribute of attention layers that see the anchor beyond their window
ROTATED = "rotated_in_float32"  # attribute of the modules of a model whose rotation is float32's

MISSING = (
    "document_ids: missing; give rows of torchtrain.pack and torchtrain.collate (in a Trainer with "
    "remove_unused_columns=False; in TRL also packing=True with packing_strategy='bfd'), or an integer [batch, tokens] "
    "tensor: 0 anchor, 1.. documents, -1 padding"
)

# Arguments of a layer's attention that change the result and that no engine honours:
ARGUMENTS_REFUSED = (
    *("sinks", "position_bias", "head_mask"),
    *("indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k"),
)


@contextmanager
def watch_queries() -> Iterator[set[torch.dtype]]:
    """Yield a set that collects the dtypes of attention's queries and keys while the block runs."""
    dtypes: set[torch.dtype] = set()
    _watching.append(dtypes)
    try:
        yield dtypes
    finally:
        _watching[:] = [others for others in _watching if others is not dtypes]


def implementation_name(engine: str) -> str:
    """Name of an engine among transformers' attention implementations: `auto` is `anchor`, `dense` is `anchor_dense`.

    `flash` is `anchor_varlen`, `flash3` is `anchor_varlen3`: transformers takes every name with "flash" in it for a
    kernel of its own. `sdpa` is `anchor_segments`: transformers asks of every name with "sdpa" in it whether the family
    has SDPA.
    """
    return "anchor" if engine == "auto" else f"anchor_{engine.replace('flash', 'varlen').replace('sdpa', 'segments')}"


def register() -> None:
    """Register `anchor` (engine chosen by `auto`), and `implementation_name` of each of `ENGINES`.

    Registration is global to the process and may be repeated. It changes no model: choose with
    `model.set_attn_implementation("anchor")` or `from_pretrained(..., attn_implementation="anchor")`.
    """
    for engine in ("auto", *ENGINES):
        name = implementation_name(engine)
        AttentionInterface.register(name, partial(_anchor_attention, engine=engine))
        AttentionMaskInterface.register(name, read_mask)


def _anchor_attention(module: nn.Module, *given: Any, **options: Any) -> tuple[Tensor, None]:
    """Attend as transformers calls it. torch.compile takes a model that `attach` checked into one graph."""
    in_graph = torch.compiler.is_compiling() and hasattr(module, KEEPS_ANCHOR)
    return (_compute_attention if in_graph else _compute_outside_graph)(module, *given, **options)


def _compute_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    engine: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    document_ids: Tensor | None = None,
    plan: AttentionPlan | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    row_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: q [B, H, T, D] in, out [B, T, H, D]. row_window: the layer's, if ranks share a row."""
    window = _window(window_of(attention_mask) or row_window, sliding_window, query.shape[2])
    _refuse(module, query, key, dropout, kwargs)
    compiling, keep_anchor = torch.compiler.is_compiling(), getattr(module, KEEPS_ANCHOR, False)
    if compiling and plan is not None:
        document_ids = plan.document_ids_BT
    if plan is None and not compiling:
        if document_ids is None:
            raise UserError(_say_why_missing())
        plan = remembered_plan(document_ids, query)
    if not compiling:
        if engine == "auto":
            _announce(resolve_engine(engine, value.device, value.dtype, capped=softcap is not None), value)
        for dtypes in _watching:
            dtypes |= {query.dtype, key.dtype}
    query, key = round_to_values(module, query, key, value)
    query, key = round_after_rope(module, query, key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options = (engine, scaling, softcap, window, keep_anchor)
    if plan is not None and not compiling:
        return _attend_with(query, key, value, s_aux, plan, *options), None
    if document_ids is None:
        raise UserError(MISSING)
    return torch.ops.anchorline.attend(query, key, value, s_aux, document_ids, *options), None


_compute_outside_graph: Any = torch.compiler.disable(_compute_attention, reason=APART)


def _attend_with(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, sinks_H: Tensor | None, plan: AttentionPlan, *options: Any
) -> Tensor:
    """Return out [B, T, H, E] of `attend`, whose last options are given in the order of the graph's operation."""
    named = dict(zip(_OPTIONS, options, strict=True))
    return attend(q_BTHD, k_BTKD, v_BTKE, plan, sinks_H=sinks_H, **named)[0]


# In a graph of torch.compile attention is one operation, whatever the documents are. It keeps queries, keys and values
# for the backward pass and attends once more there. The backward operation calls autograd, so it has no kernel that
# switches autograd off, as `torch.library.custom_op` would make one.
_OPTIONS = ("engine", "scale", "softcap", "window", "keep_anchor")
_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor document_ids, str engine, float? scale, "
_SCHEMA += "float? softcap, int? window, bool keep_anchor"
torch.library.define("anchorline::attend", f"({_SCHEMA}) -> Tensor")
torch.library.define("anchorline::attend_backward", f"(Tensor grad, {_SCHEMA}) -> Tensor[]")


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, document_ids: Tensor, *options: Any) -> Tensor:
    return _attend_with(q, k, v, sinks, remembered_plan(document_ids, q), *options).contiguous()


def _backward(grad: Tensor, *given: Any) -> list[Tensor]:
    leaves = [None if x is None else x.detach().requires_grad_() for x in given[:4]]
    with torch.enable_grad():
        out = _forward(*leaves, *given[4:])  # type: ignore[arg-type]
    gradients = torch.autograd.grad(out, [x for x in leaves if x is not None], grad)
    return [x.contiguous() for x in gradients]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.anchorline.attend_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None for _ in range(5 + len(_OPTIONS) - len(gradients)))


torch.library.impl("anchorline::attend", "CompositeExplicitAutograd", _forward)
torch.library.impl("anchorline::attend_backward", "CompositeExplicitAutograd", _backward)
torch.library.register_fake("anchorline::attend", lambda q, k, v, *_: q.new_empty((*q.shape[:3], v.shape[3])))
torch.library.register_fake(
    "anchorline::attend_backward", lambda grad, *given: [x.new_empty(x.shape) for x in given[:4] if x is not None]
)
torch.library.register_autograd("anchorline::attend", _differentiate, setup_context=_save)


def _window(said: int | None, sliding_window: int | None, tokens: int) -> int | None:
    """Return the layer's window, by its mask; None where it hides nothing. Raises UserError: layer and mask differ."""
    told = sliding_window if sliding_window is not None and sliding_window < tokens else None
    if told is not None and said != told:
        raise UserError(
            f"sliding_window: {told} for the layer, and its attention mask has {said}; set config.sliding_window=None"
        )
    return said


def round_to_values(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Round queries and keys that were rotated in float32, once, to the dtype of the values.

    The engine refuses any other difference of dtypes.

    module: the attention layer; `torchtrain.modeling.rotation` marks those of its models.
    """
    if not getattr(module, ROTATED, False):
        return query, key
    return query.to(value.dtype), key.to(value.dtype)


def _refuse(module: nn.Module, query: Tensor, key: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse every argument that would change the result and that no engine honours."""
    T = query.shape[2]
    if key.shape[2] != T:
        raise UserError(say_no_cache(f"past_key_values: {T} queries against {key.shape[2]} keys"))
    if dropout:
        raise UserError(f"attention_dropout: {dropout} is not honoured by `anchor`; set config.attention_dropout=0")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UserError(
            "is_causal: False, every token would see later ones; `anchor` is causal: set config.is_decoder=True"
        )
    for name in ARGUMENTS_REFUSED:
        if kwargs.get(name) is not None:
            raise UserError(f"{name}: not honoured by `anchor`; remove it (documents are told by document_ids)")
    if kwargs.get("output_attentions"):
        raise UserError("output_attentions: `anchor` makes no attention weights; use the eager implementation for them")


def _say_why_missing() -> str:
    """Say why `document_ids` are missing, by the callers' frames. Called only before an error is raised."""
    if is_generating():
        return say_no_cache("generate")
    for frame in callers():
        module = frame.f_locals.get("self")
        given = frame.f_locals.get("kwargs", {}), frame.f_locals
        if isinstance(module, nn.Module) and any(x.get("document_ids") is not None for x in given):
            return (
                f"document_ids: {type(module).__name__} was given them and does not hand them on to its attention, so "
                "`anchor` cannot run in it; choose another model"
            )
    return MISSING


def remembered_plan(document_ids: Any, query: Tensor) -> AttentionPlan:
    """Build the plan in the first layer, and keep it on the tensor. Raises UserError: ids that no plan is made of."""
    if not isinstance(document_ids, Tensor):
        raise UserError(f"document_ids: a {type(document_ids).__name__}; give an integer tensor [batch, tokens]")
    return remember(f"_anchor_plan_{query.device}", document_ids, lambda: make_plan(document_ids).to(query.device))


def _announce(chosen: str, value: Tensor) -> None:
    what = (chosen, value.device.type, value.dtype)
    if what not in announced:
        announced.add(what)
        logger.info("attention auto: %s on %s in %s", *what)
