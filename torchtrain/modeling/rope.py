"""RoPE for the new context length: the config's `rope` section applied to a Hugging Face config.

This must happen before the model is built: inverse frequencies are computed once, at construction, in float32.

transformers has no static NTK-aware type. It is the default type with a larger base (theta), where s is the factor and
d the rotated dimensions of a head:  base' = base * s ** (d / (d - 2)).  The slowest frequency is then divided by
exactly s and the fastest kept.

Upstream: transformers/modeling_rope_utils.py. NTK-aware scaling: github.com/jquesnelle/yarn, arXiv 2309.00071, section
3.1.
"""

import copy
from typing import TYPE_CHECKING, Any

from anchorline.errors import UserError, quoted
from torchtrain.config import PAPER_ROPE_THETA, RopeConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNSCALED = ("keep", "default", "dynamic")  # in training: dynamic scales only beyond max_position_embeddings
_WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
_SCALED = (*_WITH_ORIGINAL_LENGTH, "linear")
_ORIGINAL = "original_max_position_embeddings"
_WHOLE_ROWS = "full_attention"  # where parameters are given per layer type


def extend(config: "PretrainedConfig", rope: RopeConfig, length: int) -> "PretrainedConfig":
    """Return a copy of a model's config that holds `length` positions, with RoPE as the `rope` section asks.

    `max_position_embeddings` becomes `length`, or stays what it was where that is more and still holds.

    Where a model has one set of parameters per layer type (Gemma 3), those of the layers that see whole rows change. A
    layer with a window sees no farther than before.

    Factors count from the original length, so that two extensions equal one: what the model's theta holds alone. That
    is its `original_max_position_embeddings` where it has one, else `max_position_embeddings`. A linear model made
    elsewhere records none, and its `max_position_embeddings` is the scaled length to some and the unscaled one to
    others: then `rope.original_max_position_embeddings` must say it. What this returns records it.

    Args:
        config: the model's config, left as it is.
        rope: the settings.
        length: positions wanted (`pack.sequence_length`).

    Raises:
        UserError: the length is beyond the model's, and theta is not raised nor the factor large enough to reach it; a
            factor below 1; lists of another length than half a head; a model without RoPE; a linear model whose
            original length is open; a type that the model's own config class changes, or that transformers does not
            know.
    """
    held: int = config.max_position_embeddings
    own = parameters_of(config)
    changed = copy.deepcopy(config)
    keeps = rope.type == "keep" and rope.theta == "keep"
    if not own:
        if not keeps:
            what = "does not use RoPE in layers that see whole rows"
            raise UserError(f"rope: the model ({config.model_type}) {what}; rope.type and rope.theta must be keep")
        if length > held:
            raise UserError(
                f"pack.sequence_length {length}: the model ({config.model_type}) holds {held} positions and has no "
                f"RoPE to extend; give at most {held}"
            )
        return changed
    if rope.type == "keep":
        _check_known(config, own["rope_type"])
    if keeps and length <= held and rope.original_max_position_embeddings is None:
        return changed

    original = _original_length(config, own, rope.original_max_position_embeddings)
    if rope.original_max_position_embeddings == held and own["rope_type"] == "linear":
        held = round(held * own["factor"])  # the scaled length, as we write it
    if keeps and length > held:
        raise _too_long(length, held)
    new = _parameters(config, own, rope, length, original)
    whole: dict[str, Any] = changed.rope_parameters
    changed.rope_parameters = new if "rope_type" in whole else whole | {_WHOLE_ROWS: new}
    if rope.type != "keep":
        held = original  # whatever stretched the model is replaced
    theta_is_raised = new["rope_theta"] > own["rope_theta"]
    if length > held and rope.type in _UNSCALED and not theta_is_raised:
        raise _too_long(length, held)
    changed.max_position_embeddings = max(length, held)
    _record_original_length(changed, new, original)
    _check_read_back(changed, new["rope_type"])
    return changed


def parameters_of(config: "PretrainedConfig") -> dict[str, Any] | None:
    """Return RoPE's parameters in the layers that see whole rows, or None."""
    own: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    return own.get(_WHOLE_ROWS) if own and "rope_type" not in own else own


def _check_known(config: "PretrainedConfig", rope_type: str) -> None:
    """Refuse a type that transformers cannot make frequencies of; of a model with code of its own nothing is known."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = ("default", *ROPE_INIT_FUNCTIONS)
    if rope_type not in known and not getattr(config, "auto_map", None):
        raise UserError(
            f"rope: the model's config.json has rope_type {quoted(rope_type)}, which transformers does not know "
            f"({', '.join(known)}): mend it there, or give rope.type"
        )


def check_resets(config: "PretrainedConfig", length: int, variant: str) -> None:
    """Refuse RoPE that depends on the batch, for rows whose positions restart in each document.

    transformers' longrope takes the long factors if the largest position of the batch is beyond the original length,
    else the short ones. Rows whose positions run through reach the last one, so there it is always the same.

    Args:
        config: what `extend` returned.
        length: tokens of a row.
        variant: of the rows, for the message.

    Raises:
        UserError: longrope, and rows longer than the original length.
    """
    own = parameters_of(config) or {}
    if own.get("rope_type") == "longrope" and length > own[_ORIGINAL]:
        raise UserError(
            f"pack.variant {variant}: longrope takes short or long factors by the longest document of each "
            "micro-batch, so training would depend on how rows are batched; choose another variant, or another "
            "rope.type"
        )


def describe(config: "PretrainedConfig") -> str:
    """Return one line on a config's RoPE: type, theta and what a reader must know of training with it."""
    own = parameters_of(config)
    if not own:
        return "the model's own positions"
    line = f"{own['rope_type']}, theta {own['rope_theta']:g}"
    if "factor" in own:
        line += f", factor {own['factor']:g}"
    if own["rope_type"] == "dynamic":
        # transformers scales by the longest position seen relative to max_position_embeddings, which is the new length.
        line += f"; unscaled up to {config.max_position_embeddings:,} positions, so training sees theta alone"
    return line


def rotated_dimensions(config: "PretrainedConfig") -> int:
    """Return how many dimensions of a head RoPE rotates."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * (parameters_of(config) or {}).get("partial_rotary_factor", 1.0))


def _original_length(config: "PretrainedConfig", own: dict[str, Any], answer: int | None) -> int:
    held: int = config.max_position_embeddings
    recorded = own.get(_ORIGINAL) or (None if hasattr(type(config), _ORIGINAL) else getattr(config, _ORIGINAL, None))
    if own["rope_type"] == "linear" and own["factor"] != 1 and recorded is None:
        shorter = round(held / own["factor"])
        if answer is None:
            raise UserError(
                f"rope.{_ORIGINAL}: missing; the model is linear with factor {own['factor']:g}, and its config.json "
                f"leaves open whether max_position_embeddings {held} is the length after scaling or before; give "
                f"{shorter} if it holds {held} positions, {held} if it holds {round(held * own['factor'])}"
            )
        possible = [shorter, held]
    else:
        # Outside of scaled types it says nothing: a default model may carry what it was before theta was raised.
        possible = [recorded if recorded and own["rope_type"] in _SCALED else held]
    if answer is not None and answer not in possible:
        raise UserError(
            f"rope.{_ORIGINAL} {answer}: by its config.json the model began with "
            f"{' or '.join(map(str, possible))} positions; give that, or leave it out"
        )
    return possible[0] if answer is None else answer


def _record_original_length(config: "PretrainedConfig", new: dict[str, Any], original: int) -> None:
    """Set the field beside `rope_parameters` that says where scaling begins.

    transformers 5 lets it overrule `rope_parameters`, so an old one must not stay. For linear it is our own record; no
    reader looks at it there.
    """
    if new["rope_type"] == "linear":
        setattr(config, _ORIGINAL, original)
    elif hasattr(type(config), _ORIGINAL):  # a field of this family (Phi-3), always there
        setattr(config, _ORIGINAL, new.get(_ORIGINAL, config.max_position_embeddings))
    else:
        vars(config).pop(_ORIGINAL, None)


def _check_read_back(config: "PretrainedConfig", rope_type: str) -> None:
    """Refuse what would be trained and then read as something else: Phi-3's config takes yarn for longrope."""
    from huggingface_hub.errors import StrictDataclassError

    wanted = config.rope_parameters
    try:
        read: Any = type(config).from_dict(config.to_dict()).rope_parameters
    except (KeyError, TypeError, ValueError, StrictDataclassError):
        read = None
    if read != wanted:
        raise UserError(
            f"rope.type {rope_type}: {config.model_type} does not read it back from its config.json as it is "
            "written; choose another rope.type"
        )


def _parameters(
    config: "PretrainedConfig", own: dict[str, Any], rope: RopeConfig, length: int, original: int
) -> dict[str, Any]:
    named: dict[Any, float | None] = {"keep": own["rope_theta"], "paper": PAPER_ROPE_THETA.get(length)}
    theta: Any = named.get(rope.theta, rope.theta)
    if rope.type == "keep":
        return {**own, "rope_theta": theta}
    kept = {key: own[key] for key in ("partial_rotary_factor",) if key in own}
    if rope.type == "default":
        return {**kept, "rope_type": "default", "rope_theta": theta}

    needed = length / original
    if rope.type == own["rope_type"] == "dynamic":  # its original length has grown; its factor tells from what
        needed *= own["factor"]
    factor = needed if rope.factor is None else rope.factor
    if rope.type != "dynamic" and factor < needed:
        raise UserError(
            f"rope.factor {factor:g}: {rope.type} stretches the {original} positions the model was made for to "
            f"{factor * original:g}, below pack.sequence_length {length}; give at least {needed:g}, or leave it out"
        )
    if factor < 1:
        raise UserError(
            f"rope.factor {factor:g}: pack.sequence_length {length} is within the {original} positions the model was "
            f"made for, so {rope.type} has nothing to stretch; set rope.type: keep"
        )
    if rope.type == "ntk":
        d = rotated_dimensions(config)
        return {**kept, "rope_type": "default", "rope_theta": theta * factor ** (d / (d - 2))}

    parameters = {**kept, "rope_type": rope.type, "rope_theta": theta, "factor": factor}
    given = rope.model_dump(exclude={"type", "theta", "factor", _ORIGINAL}, exclude_none=True)
    for name in given.keys() & {"short_factor", "long_factor"}:
        if len(given[name]) != rotated_dimensions(config) // 2:
            raise UserError(
                f"rope.{name}: {len(given[name])} numbers; the model rotates {rotated_dimensions(config)} dimensions "
                f"of a head, give {rotated_dimensions(config) // 2}"
            )
    if rope.type in _WITH_ORIGINAL_LENGTH:
        parameters[_ORIGINAL] = original
    return parameters | given


def _too_long(length: int, held: int) -> UserError:
    return UserError(
        f"pack.sequence_length {length}: the model holds {held} positions and the rope settings leave them as they "
        f"are; set rope.theta to a larger base than its own (paper, or a number), or rope.type to ntk, yarn or linear"
    )
