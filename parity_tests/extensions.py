"""What extending keeps: the config of every causal family of transformers, by every type of RoPE. No weights.

`parity_tests.families` writes what comes out into docs/families.md, and a test compares.

The family's own rotary module is built from the config that `extend` returns, and from one whose parameters are merged
here by the rule: what the config says, and the keys that the settings change. Both run transformers' own code, in
float64, so that nothing but the formulas counts. Truth is the oracle's, of the merged parameters. All three must be one
in float32, and the attention factor and every key that the settings do not change, too.
"""

import copy
import re
import sys
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from anchorline.errors import UserError
from anchorline.marked import MarkedPlace
from jaxref.rope import inverse_frequencies
from jaxref.rope_spec import RopeSpec
from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import extend, parameters_of, rotated_dimensions

_OTHERS = re.compile("Vision|Audio|Depth")  # rotary modules that do not rotate text
TABLE = MarkedPlace("<!-- made by parity_tests/extensions.py -->", "<!-- end of extensions -->")
STRETCH = 2  # of the length that a config names
ORIGINAL = "original_max_position_embeddings"
# `rope` sections; longrope's lists depend on the model.
SETTINGS: dict[str, dict[str, Any]] = {
    "theta": {"theta": 1e9},
    "default": {"type": "default", "theta": 1e9},
    "linear": {"type": "linear"},
    "ntk": {"type": "ntk"},
    "dynamic": {"type": "dynamic", "theta": 1e9, "factor": 3.0},
    "yarn": {"type": "yarn"},
    "yarn with its parameters": {
        "type": "yarn",
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.75,
        "mscale_all_dim": 0.5,
    },
    "llama3": {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"type": "longrope"},
}


# What a family's default config leaves open: a head of 42 dimensions, or RoPE not used.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "zamba2": {"use_mem_rope": True},
}


def config_of(family: str) -> PretrainedConfig | None:
    """Return a family's default config; None: it has no RoPE that a config could change."""
    config = CONFIG_MAPPING[family](**_PUBLISHED.get(family, {}))
    has_rope = getattr(config, "rope_parameters", None) and getattr(config, "max_position_embeddings", None)
    return config if has_rope else None


def refusals(family: str) -> dict[str, str]:
    """Extend a family's config by all `SETTINGS`; return the refusals by name of the settings. Raises AssertionError:
    something differs from the rule.
    """
    config, refused = config_of(family), dict[str, str]()
    assert config is not None
    for name, settings in SETTINGS.items():
        try:
            fault = find_fault(config, settings)
        except UserError as error:
            refused[name] = str(error)
        else:
            assert not fault, f"{family}, {name}: {fault}"
    return refused


def describe(families: list[str]) -> str:
    """Which families extend, and which refuse what, as Markdown."""
    rows = {family: refusals(family) for family in families if config_of(family) is not None}
    groups: dict[tuple[str, str], list[str]] = {}
    for family, refused in rows.items():
        if refused:
            first = next(iter(refused.values())).replace(f"({family}) ", "").replace(f": {family} ", ": the family ")
            reason = first.partition(": ")[2].partition(";")[0]
            which = "all" if len(refused) == len(SETTINGS) else ", ".join(refused)
            groups.setdefault((which, reason), []).append(family)
    table = [f"| {', '.join(families)} | {which} | {why} |" for (which, why), families in groups.items()]
    whole = sum(not refused for refused in rows.values())
    head = f"{len(rows)} families, each by {', '.join(SETTINGS)}. {whole} take all of it."
    return "\n".join([head, "\n| families | refused | why |\n| --- | --- | --- |", *table])


def find_fault(config: PretrainedConfig, settings: dict[str, Any]) -> str:
    """Extend a config; return what differs from the rule, or nothing.

    config: of a family, with RoPE.
    settings: of the section `rope`.
    Raises UserError: `extend` refuses.
    """
    own = parameters_of(config)
    if settings.get("type") == "longrope" and own is not None and own["rope_type"] != "longrope":
        pairs = rotated_dimensions(config) // 2
        rising = np.linspace(0, 1, pairs)
        settings = settings | {"short_factor": (1 + rising).tolist(), "long_factor": (2**rising).tolist()}
    before = copy.deepcopy(config)
    extended = extend(config, RopeConfig(**settings), STRETCH * config.max_position_embeddings)
    if config.to_dict() != before.to_dict():
        return "the config that was given has changed"
    by_hand = copy.deepcopy(extended)
    tables = _tables(config)
    merged = {kind: table if _has_window(kind) else _merge(config, table, settings) for kind, table in tables.items()}
    by_hand.rope_parameters = {**config.rope_parameters, **merged} if None not in merged else merged[None]  # noqa: SIM401
    layers = set(getattr(config, "layer_types", None) or ())
    for kind, own in tables.items():
        new = _tables(extended)[kind]
        lost = [name for name in own if new.get(name) != merged[kind].get(name) and _stays(name, own, new)]
        if lost:
            return f"{lost[0]} is {new.get(lost[0])!r}, and {merged[kind].get(lost[0])!r} by the rule"
        if kind is not None and kind not in layers:  # by default Laguna, Mellum and Zaya have no layers with windows
            continue
        truth, factor = _oracle(config, kind, merged[kind], extended.max_position_embeddings)
        sources = {"extend": extended} | ({} if new == merged[kind] else {"merged": by_hand})
        for source, of in sources.items():
            frequencies, scaling = model_frequencies(of, kind)
            if frequencies.shape != truth.shape:
                return f"{source}: {len(frequencies)} frequencies, the oracle has {len(truth)}"
            if not np.array_equal(frequencies.astype(np.float32), truth.astype(np.float32)):
                return f"{source}: frequencies off by up to {np.abs(frequencies / truth - 1).max():.1%}"
            if abs(scaling / factor - 1) > 2**-50:
                return f"{source}: attention factor {scaling}, the oracle has {factor}"
    return ""


def _tables(config: PretrainedConfig) -> dict[str | None, dict[str, Any]]:
    own: dict[Any, Any] = config.rope_parameters
    nested = {kind: table for kind, table in own.items() if isinstance(table, dict)}
    return nested or {None: own}


def _has_window(kind: str | None) -> bool:
    return kind is not None and "sliding" in kind


def _merge(config: PretrainedConfig, own: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a model's parameters, and the keys that the settings change."""
    length = STRETCH * config.max_position_embeddings
    changes: dict[str, Any] = {name: value for name, value in settings.items() if name not in ("type", "theta")}
    changes["rope_theta"] = settings.get("theta", own["rope_theta"])
    rope_type = settings.get("type", own["rope_type"])
    original = own.get(ORIGINAL) or config.max_position_embeddings
    if rope_type == "ntk":  # by its definition: the slowest frequency is divided by the factor, the fastest kept
        proportional = own["rope_type"] == "proportional"
        rope_type = own["rope_type"] if proportional else "default"
        whole = _head_dim(config) if proportional else rotated_dimensions(config)
        pairs = -(-rotated_dimensions(config) // 2)
        changes["rope_theta"] *= (length / original) ** (whole / (2 * pairs - 2))
    elif rope_type not in ("default", "dynamic") and "type" in settings:
        changes["factor"] = length / original
    if rope_type in ("yarn", "llama3", "longrope"):
        changes[ORIGINAL] = original
    return own | changes | {"rope_type": rope_type} | ({"type": rope_type} if "type" in own else {})


def _stays(name: str, own: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a key may not go: it is no parameter of the old type alone."""
    of_types = RopeConfig.model_fields.keys() | {ORIGINAL}
    return own["rope_type"] == new["rope_type"] or name not in of_types or name in new


def _oracle(
    config: PretrainedConfig, kind: str | None, table: dict[str, Any], longest: int
) -> tuple[np.ndarray, float]:
    known = RopeConfig.model_fields.keys() | {ORIGINAL, "rope_type", "rope_theta", "partial_rotary_factor"}
    parameters = {name: value for name, value in table.items() if name in known}
    fields = {"head_dim": _head_dim(config, kind), "max_position_embeddings": longest, "rope_parameters": parameters}
    return inverse_frequencies(RopeSpec.from_hf(fields))


def _head_dim(config: PretrainedConfig, kind: str | None = "full_attention") -> int:
    by_kind: Any = config.per_layer_config if config.is_heterogeneous else {}
    of = by_kind[kind] if by_kind else config
    return getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads


class in_float64(TorchFunctionMode):  # noqa: N801
    """Make every cast to float32 one to float64. Models cast softmax, norms and states to float32 whatever they are."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        given, named = [_widened(x) for x in args], {name: _widened(x) for name, x in (kwargs or {}).items()}
        return function(*given, **named)


def _widened(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given


def model_frequencies(config: PretrainedConfig, kind: str | None = None) -> tuple[np.ndarray, float]:
    """Return inverse frequencies, float64 [C], and attention factor of a family's own rotary module.

    config: of the family.
    kind: of layers, where a config has RoPE's parameters by type of layer.
    """
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    (rotary,) = [
        value
        for name, value in vars(module).items()
        if name.endswith("RotaryEmbedding") and value.__module__ == module.__name__ and not _OTHERS.search(name)
    ]
    with in_float64():
        built = rotary(copy.deepcopy(config))
    prefix = "" if kind is None else f"{kind}_"
    frequencies = getattr(built, f"{prefix}inv_freq")
    assert frequencies.dtype == torch.float64
    return frequencies.numpy(), float(getattr(built, f"{prefix}attention_scaling", 1.0))
