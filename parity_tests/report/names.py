"""What the name of an array says: its stage, its layer, which array of the layer it is, and when it is computed."""

import re
from typing import Any, get_args

from parity_tests.report.schema import Group

_PREFIX = re.compile(r"^(run\.(exported\.|masters\.)?)?((inputs|forward|gradients|step|trajectory|loss)\.)?(model\.)?")
# `layers.3.q`, `model.layers.3.mlp`, `transformer.h.3.attn`, `layers_3.mlp`, `decoder.block_3`, `blk.3.q`, `block3/q`.
_LAYER = re.compile(r"(?:^|[./])(?:\w*layers?|h|blk|\w*blocks?)[._/]?(\d+)(?:[./](.+))?$", re.IGNORECASE)
# Stems of names in the order in which a decoder computes them. Whatever has none comes last.
_STEMS = """input_ids position_ids document_ids embed embed_tokens tok_embeddings wte rotary rope_table
    input_layernorm input_norm attention_norm ln_1 qkv q_proj q k_proj k v_proj v q_norm k_norm q_rope
    k_rope lse sinks attn o_proj out_proj attn_out self_attn attn_residual post_attention_layernorm
    post_norm ffn_norm ln_2 router gate_proj up_proj down_proj mlp residual output norm final_norm lm_head
    logits"""
_ORDER = _STEMS.split()
_LETTERS = {"B": "row", "T": "token", "H": "head", "K": "head", "E": "expert", "O": "row", "I": "column"}


def split(name: str) -> tuple[str, str, str]:
    """Of `step 3: loss [rank 1]` what comes before the array's own name, the name, and what comes behind."""
    own, _, rank = name.rpartition(": ")[2].partition(" [rank ")
    return name.rpartition(": ")[0], own, rank


def bare(name: str) -> str:
    """Without the step and the rank."""
    return split(name)[1]


def whole(name: str) -> str:
    """Without the rank."""
    return name.partition(" [rank ")[0]


def axis_names(axes: str | None, dimensions: int) -> tuple[str, ...]:
    """What a person calls the axes of an array. axes: their letters, as `BTHD` or `OI`; None: not known."""
    if axes is None:
        return ("row", "column") if dimensions == 2 else tuple(f"axis {n} index" for n in range(dimensions))
    return tuple(_LETTERS.get(letter, "channel") for letter in axes)


def group_of(name: str) -> Group:
    """The stage that an array belongs to."""
    name = bare(name)
    if name.startswith("loss") or name in ("inputs.shift_labels", "inputs.weights"):
        return "loss"
    for group in ("gradients", "step", "trajectory", "run"):
        if name.startswith(f"{group}."):
            return group
    return "forward"


def layer_and_tap(name: str) -> tuple[int | None, str]:
    """The layer of an array and its tap: `gradients.model.layers.0.mlp.up_proj.weight` -> 0, `mlp.up_proj.weight`."""
    rest = _PREFIX.sub("", bare(name), count=1)
    found = _LAYER.search(rest)
    return (int(found[1]), found[2] or "output") if found else (None, rest)


def sort_key(name: str) -> tuple[Any, ...]:
    """Sorts names by stage, then as a decoder computes them, gradients in the opposite order."""
    group, (layer, tap) = group_of(name), layer_and_tap(name)
    is_input = group == "forward" and layer is None and "token" in tap and not has_place(name)
    stem = -1 if is_input else _stem(tap)
    before = layer is None and stem < _ORDER.index("input_layernorm")
    where = (0 if before else 2 if layer is None else 1, layer or 0, stem)
    back = tuple(-x for x in where) if group == "gradients" else where
    return natural(name.removesuffix(bare(name))), get_args(Group).index(group), back, natural(tap)


def _stem(tap: str) -> int:
    return next((_ORDER.index(word) for word in reversed(re.split(r"[./]", tap)) if word in _ORDER), len(_ORDER))


def has_place(name: str) -> bool:
    """Whether a name tells when its array is computed: by a word that is known, and its layer, if it has a number."""
    layer, tap = layer_and_tap(name)
    return _stem(tap) < len(_ORDER) and (layer is not None or not re.search(r"\d", tap))


def natural(name: Any) -> tuple[Any, ...]:
    """Sorts `layer 10` behind `layer 9`."""
    parts = re.split(r"(\d+)", str(name))
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part)
