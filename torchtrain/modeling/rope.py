"""RoPE for the new context length: the config's `rope` section applied to a Hugging Face config.

This must happen before the model is built: inverse frequencies are computed once, at construction, in float32.

What a config says stays unless the run's `rope` changes that very key. A new type changes the keys that only the old
type takes: they go with it. A family's own keys (`llama_4_scaling_beta`, `mrope_section`) always stay.

transformers has no static NTK-aware type. It is the default type with a larger base (theta), where s is the factor and
d the rotated dimensions of a head:  base' = base * s ** (d / (d - 2)).  The slowest frequency is then divided by
exactly s and the fastest kept.

Upstream: transformers/modeling_rope_utils.py. NTK-aware scaling: github.com/jquesnelle/yarn, arXiv 2309.00071, section
3.1.
"""

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anchorline.errors import UserError, quoted
from torchtrain.config import MOST_TOKENS, PAPER_ROPE_THETA, ROPE_PARAMETERS, RopeConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNSCALED = ("keep", "default", "dynamic")  # in training: dynamic scales only beyond max_position_embeddings
_WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
_SCALED = (*_WITH_ORIGINAL_LENGTH, "linear")
_ORIGINAL = "original_max_position_embeddings"
_OF_A_TYPE = {_ORIGINAL}.union(*ROPE_PARAMETERS.values())
_OF_ANY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LISTS = ("short_factor", "long_factor")
_NEEDED = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": _LISTS}
_ASCENDING = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}
_BETAS = {"beta_slow": 1, "beta_fast": 32}  # transformers' defaults
_MAY_BE_NULL = ("factor", "attention_factor", *_BETAS, "mscale", "mscale_all_dim")
_MOST_TIMES = 64  # the paper's longest rows are 64 times its models' (arXiv 2411.13476)


def extend(config: "PretrainedConfig", rope: RopeConfig, length: int) -> "PretrainedConfig":
    """Return a copy of a model's config that holds `length` positions, with RoPE as the `rope` section asks.

    `max_position_embeddings` becomes `length`, or stays what it was where that is more and still holds. A length that
    the model holds, with settings that say nothing new, changes nothing.

    Where a model has one set of parameters per layer type (Gemma 3), those of the layers that see whole rows change. A
    layer with a window sees no farther than before.

    Factors count from the original length, so that two extensions equal one: what the model's theta holds alone. That
    is its `original_max_position_embeddings` where it has one, else `max_position_embeddings`. A linear model made
    elsewhere records none, and its `max_position_embeddings` is the scaled length to some and the unscaled one to
    others: then `rope.original_max_position_embeddings` must say it. What this returns records it.

    config: the model's config, left as it is.
    length: positions wanted (`pack.sequence_length`).
    Raises UserError: the length is beyond the model's, and theta is not raised nor the factor large enough to reach it;
        a factor below 1; lists of another length than half a head; parameters that the type needs, or that are no
        numbers; a model without RoPE; a linear model whose original length is open; a type that the model's own config
        class changes, that cannot replace the model's, or that transformers does not know.
    """
    held: int = config.max_position_embeddings
    kinds, own = _tables(config), parameters_of(config)
    for table in kinds.values():
        if (fault := find_fault(table)) is not None:
            raise UserError(f"rope: the model's config has {fault}; correct it there")
    changed = copy.deepcopy(config)
    keeps = rope.type == "keep" and rope.theta == "keep"
    if own is None:
        if not keeps:
            raise UserError(
                f"rope: the model ({config.model_type}) does not use one RoPE in all layers that see whole rows; "
                "rope.type and rope.theta must be keep"
            )
        if length > held:
            raise UserError(
                f"pack.sequence_length {length}: the model ({config.model_type}) holds {held} positions and has no "
                f"RoPE to extend; give at most {held}"
            )
        return changed
    if rope.type == "keep":
        _check_known(config, own["rope_type"])
    if length <= held and _says_nothing_new(rope, own, length):
        return changed

    original = _original_length(config, own, rope.original_max_position_embeddings)
    if rope.original_max_position_embeddings == held and own["rope_type"] == "linear":
        held = round(held * own["factor"])  # the scaled length, as we write it
    if keeps and length > held:
        raise too_long(length, held)
    new = _parameters(config, own, rope, length, original)
    ((kind, _),) = _of_whole_rows(kinds).items()
    changed.rope_parameters = new if kind is None else changed.rope_parameters | {kind: new}
    if rope.type != "keep":
        held = original  # whatever stretched the model is replaced
    theta_is_raised = new["rope_theta"] > own["rope_theta"]
    if length > held and rope.type in _UNSCALED and not theta_is_raised:
        raise too_long(length, held)
    changed.max_position_embeddings = max(length, held)
    _record_original_length(changed, new, original)
    _change_what_repeats_it(changed, own["rope_theta"], new["rope_theta"])
    _check_read_back(changed, new["rope_type"])
    return changed


def parameters_of(config: "PretrainedConfig") -> dict[str, Any] | None:
    """Return RoPE's parameters in the layers that see whole rows; None: they have none, or not all the same."""
    whole = list(_of_whole_rows(_tables(config)).values())
    return whole[0] if len(whole) == 1 else None


def _tables(config: "PretrainedConfig") -> dict[str | None, dict[str, Any]]:
    """Return RoPE's parameters by type of layer; None: of all layers. A family may have them and not use them."""
    unused = (
        _own_field(config, "alibi", False)  # Falcon
        or not _own_field(config, "use_mem_rope", True)  # Zamba 2
        or _own_field(config, "position_embedding_type", "rope") != "rope"  # Granite 4
        or not hasattr(config, "hidden_size")  # BLT is made of models with a config each
    )
    own: dict[Any, Any] = {} if unused else getattr(config, "rope_parameters", None) or {}
    tables = {kind: table for kind, table in own.items() if isinstance(table, dict)}
    return tables or ({None: own} if "rope_type" in own or "rope_theta" in own else {})


def _own_field(config: "PretrainedConfig", name: str, otherwise: Any) -> Any:
    """Return a field of the family's config class; another family's config.json may hold anything under that name."""
    return getattr(config, name) if hasattr(type(config), name) else otherwise


def _of_whole_rows(tables: dict[str | None, dict[str, Any]]) -> dict[str | None, dict[str, Any]]:
    return {kind: table for kind, table in tables.items() if kind is None or "sliding" not in kind}


def find_fault(table: Mapping[str, Any]) -> str | None:
    """Return, in words, the first of a config's RoPE parameters that is no number in its range, or None."""
    for name, value in table.items():
        if name in ("rope_type", "type"):
            if not isinstance(value, str):
                return f"{name} {quoted(value)}, which is not a name"
        elif value is None and name in _MAY_BE_NULL:
            continue
        elif name == "truncate":
            if not isinstance(value, bool):
                return f"truncate {quoted(value)}, which is not true or false"
        elif name in _LISTS:
            if not isinstance(value, list | tuple) or not all(_is_number(x) and x > 0 for x in value):
                return f"{name} {quoted(value)}, which is not a list of numbers above 0"
        elif name in ("rope_theta", "partial_rotary_factor", *_OF_A_TYPE):
            least, most = {"rope_theta": (1, 1e38), "partial_rotary_factor": (0, 1)}.get(name, (0, MOST_TOKENS))
            optional = name in _MAY_BE_NULL and name != "factor"  # where 0 is the same as null
            if not _is_number(value) or not (least <= value if optional else least < value) or value > most:
                return f"{name} {quoted(value)}, which is not a number above {least} and up to {most:g}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _says_nothing_new(rope: RopeConfig, own: dict[str, Any], length: int) -> bool:
    given = rope.model_dump(exclude={"type", "theta"}, exclude_none=True)
    theta = PAPER_ROPE_THETA.get(length) if rope.theta == "paper" else rope.theta
    same_theta = theta in ("keep", own["rope_theta"])
    same_type = rope.type in ("keep", own["rope_type"])
    return same_theta and same_type and all(own.get(name) == value for name, value in given.items())


def _check_known(config: "PretrainedConfig", rope_type: str) -> None:
    """Refuse a type that transformers cannot make frequencies of; of a model with code of its own nothing is known."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = ("default", *ROPE_INIT_FUNCTIONS)
    if rope_type not in known and not getattr(config, "auto_map", None):
        raise UserError(
            f"rope: the model's config.json has rope_type {quoted(rope_type)}, which transformers does not know "
            f"({', '.join(known)}): correct it there, or give rope.type"
        )


def check_resets(config: "PretrainedConfig", length: int, variant: str) -> None:
    """Refuse RoPE that depends on the batch, for rows whose positions restart in each document.

    transformers' longrope takes the long factors if the largest position of the batch is beyond the original length,
    else the short ones. Rows whose positions run through reach the last one, so there it is always the same. Raises
    UserError: longrope, and rows longer than the original length.
    """
    own = parameters_of(config) or {}
    if own.get("rope_type") == "longrope" and length > own[_ORIGINAL]:
        raise UserError(
            f"pack.variant {variant}: longrope takes short or long factors by the longest document of each "
            "micro-batch, so training would depend on how rows are batched; choose another variant, or another "
            "rope.type"
        )


def describe(config: "PretrainedConfig", before: "PretrainedConfig | None" = None) -> str:
    """Return a line on an extended config's RoPE, what training must know of it, and what changed since `before`."""
    own = parameters_of(config)
    if not own:
        return "the model's own positions"
    line = f"{own['rope_type']}, theta {own['rope_theta']:g}"
    if own.get("factor") is not None:
        line += f", factor {own['factor']:g}"
    if own["rope_type"] == "dynamic":
        # transformers scales by the longest position seen relative to max_position_embeddings, which is the new length.
        line += f"; unscaled up to {config.max_position_embeddings:,} positions, so training sees theta alone"
    if before is None:
        return line
    old = parameters_of(before) or {}
    changes = [
        f"{name} {_brief(old, name)} -> {_brief(own, name)}"
        for name in dict.fromkeys((*old, *own))
        if old.get(name) != own.get(name)
    ]
    return f"{line}; {'changed: ' + ', '.join(changes) if changes else 'as in its config.json'}"


def _brief(table: dict[str, Any], name: str) -> str:
    value = table.get(name)
    if value is None:
        return "(none)"
    return f"({len(value)} numbers)" if isinstance(value, list) else f"{value:g}" if _is_number(value) else str(value)


def warn_of_stretch(held: int, length: int) -> str:
    """Return a warning of rows that are many more times the model's length than the paper's, or an empty text."""
    if length <= _MOST_TIMES * held:
        return ""
    return (
        f"pack.sequence_length {length:,} is {length / held:,.0f} times the {held:,} positions of the model, and the "
        f"paper's is at most {_MOST_TIMES} times: extend it in several runs, each from the model of the last"
    )


def rotated_dimensions(config: "PretrainedConfig") -> int:
    """Return how many dimensions of a head RoPE rotates."""
    return int(_head_dim(config) * (parameters_of(config) or {}).get("partial_rotary_factor", 1.0))


def _head_dim(config: "PretrainedConfig") -> int:
    if getattr(config, "is_heterogeneous", False):  # Gemma 4's heads are larger there
        ((kind, _),) = _of_whole_rows(_tables(config)).items()
        by_kind: Any = config.per_layer_config
        config = by_kind[kind]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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
    """Set the field beside `rope_parameters` that says where scaling begins, which transformers 5 lets overrule them.
    For linear it is our own record.
    """
    if new["rope_type"] == "linear":
        setattr(config, _ORIGINAL, original)
    elif hasattr(type(config), _ORIGINAL):  # a field of this family (Phi-3), always there
        setattr(config, _ORIGINAL, new.get(_ORIGINAL, config.max_position_embeddings))
    else:
        vars(config).pop(_ORIGINAL, None)


def _change_what_repeats_it(config: "PretrainedConfig", old: float, new: float) -> None:
    """Set fields that repeat what RoPE's parameters say, or that transformers cannot do without."""
    thetas: list[float] | None = getattr(config, "layer_rope_theta", None)
    if thetas and new != old:
        if any(theta not in (0, old) for theta in thetas):  # 0: a layer without RoPE
            raise UserError(
                "rope.theta: the model's config.json sets layer_rope_theta layer by layer, and not all are its "
                f"rope_theta {old:g}; set rope.theta: keep, and a rope.type that leaves theta as it is"
            )
        config.layer_rope_theta = [new if theta else theta for theta in thetas]  # pyright: ignore
    if vars(config).get("head_dim", 0) is None:  # Mixtral: yarn, longrope and dynamic take it as it stands
        config.head_dim = config.hidden_size // config.num_attention_heads


def _check_read_back(config: "PretrainedConfig", rope_type: str) -> None:
    """Refuse what would be trained and then read as something else: Phi-3's config takes yarn for longrope."""
    wanted = config.rope_parameters
    try:
        read: Any = type(config).from_dict(config.to_dict()).rope_parameters
    except Exception:  # whatever a family's class says of parameters that it does not take
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
    kind = own["rope_type"]
    if own.get("alpha") and rope.type != kind:
        raise UserError(
            f"rope.type {rope.type}: the model's alpha {own['alpha']:g} counts with its own type {kind} alone; set "
            "rope.type: keep and a larger rope.theta"
        )
    if kind == "proportional" and rope.type != "ntk":
        raise UserError(
            f"rope.type {rope.type}: the model's own type {kind} rotates other dimensions; set rope.type: ntk, or keep "
            "and a larger rope.theta"
        )

    needed = length / original
    if rope.type == kind == "dynamic":  # its original length has grown; its factor tells from what
        needed *= own["factor"]
    factor = needed if rope.factor is None else rope.factor
    if rope.type not in ("default", "dynamic") and factor < needed:
        raise UserError(
            f"rope.factor {factor:g}: {rope.type} stretches the {original} positions the model was made for to "
            f"{factor * original:g}, below pack.sequence_length {length}; give at least {needed:g}, or leave it out"
        )
    if factor < 1 and rope.type != "default":
        raise UserError(
            f"rope.factor {factor:g}: pack.sequence_length {length} is within the {original} positions the model was "
            f"made for, so {rope.type} has nothing to stretch; set rope.type: keep"
        )
    new_type = {"ntk": "default"}.get(rope.type, rope.type) if kind != "proportional" else kind
    takes = {name for name in (*ROPE_PARAMETERS.get(new_type, ("factor",)), _ORIGINAL)}
    if new_type not in _WITH_ORIGINAL_LENGTH and not own.keys() - _OF_A_TYPE - _OF_ANY:
        takes.remove(_ORIGINAL)  # where a family has keys of its own, it may read this one, too: Ministral 3
    parameters = {name: value for name, value in own.items() if name not in _OF_A_TYPE - takes}
    parameters |= {"rope_type": new_type, "rope_theta": theta}
    if "type" in own:
        parameters["type"] = new_type  # the older name
    if rope.type == "ntk":
        pairs, denominator = -(-rotated_dimensions(config) // 2), rotated_dimensions(config)
        if kind == "proportional":
            denominator = _head_dim(config)
        if pairs < 2:
            raise UserError("rope.type ntk: the model rotates one pair of each head, whose frequency no theta changes")
        parameters["rope_theta"] = theta * factor ** (denominator / (2 * pairs - 2))
    elif rope.type != "default":
        parameters["factor"] = factor
    if rope.type in _WITH_ORIGINAL_LENGTH:
        parameters[_ORIGINAL] = original
    given = rope.model_dump(exclude={"type", "theta", "factor", _ORIGINAL}, exclude_none=True)
    parameters |= given
    _check_parameters(config, parameters, given)
    return parameters


def _check_parameters(config: "PretrainedConfig", parameters: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse parameters that do not fit each other or the model, and settings that transformers would ignore."""
    rope_type: str = parameters["rope_type"]
    for name in _NEEDED.get(rope_type, ()):
        if parameters.get(name) is None:
            raise UserError(f"rope.{name}: missing; rope.type {rope_type} needs it, and the model's config has none")
    dimensions = rotated_dimensions(config) if rope_type in ("yarn", "longrope") else 0
    if dimensions % 2:
        raise UserError(
            f"rope.type {rope_type}: the model rotates {dimensions} dimensions of a head, and {rope_type} is made for "
            "pairs; choose another rope.type"
        )
    for name in _LISTS if rope_type == "longrope" else ():
        if len(parameters[name]) != dimensions // 2:
            raise UserError(
                f"rope.{name}: {len(parameters[name])} numbers; the model rotates {dimensions} dimensions of a head, "
                f"give {dimensions // 2}"
            )
    if rope_type in _ASCENDING:
        lower, upper = _ASCENDING[rope_type]
        low, high = (parameters.get(name) or _BETAS[name] for name in (lower, upper))
        if high <= low:
            raise UserError(f"rope.{upper} {high:g} must be above {lower} {low:g}")
    if "mscale" in given and (not parameters.get("mscale_all_dim") or parameters.get("attention_factor") is not None):
        raise UserError(
            f"rope.mscale {given['mscale']:g}: counts beside mscale_all_dim and without attention_factor alone; set "
            "these, or leave it out"
        )
    if "truncate" in given and None not in _tables(config):
        raise UserError(
            "rope.truncate: transformers ignores it where a model has RoPE's parameters by type of layer; leave it out"
        )


def too_long(length: int, held: int) -> UserError:
    """Return the refusal of a length that the settings do nothing for."""
    return UserError(
        f"pack.sequence_length {length}: the model holds {held} positions and the rope settings leave them as they "
        f"are; set rope.theta to a larger base than its own (paper, or a number), or rope.type to ntk, yarn or linear"
    )
