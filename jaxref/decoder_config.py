"""What a decoder is: the numbers of a Hugging Face `config.json` that this reference implements, and a refusal of the
rest.

Llama 2/3, Mistral, Qwen 1.5/2 (`qwen2`: biases on q, k, v) and Qwen 3 (RMSNorm on every head of q and k) are one
decoder with three switches and a window for each layer. Absent fields take the defaults that transformers'
configuration classes give them.

The model reads only the fields of `DecoderConfig`. A first reader may skip the code that reads, checks and writes
these fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anchorline.errors import UserError, quoted
from jaxref.rope import inverse_frequencies
from jaxref.rope_spec import RopeSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
# Fields of `DecoderConfig` that no config.json of these families has.
ADDED = ("keep_anchor", "softcap", "sinks", "scale", "logits_divisor", "logits_softcap", "head_bias")
# What no decoder has more of: its shapes alone would take for ever.
MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
}


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder. Hashable, so that a compiled layer can be keyed by it.

    `qkv_bias`: q, k and v projections carry a bias. `o_bias`: so does the output projection.
    `qk_norm`: q and k are RMS-normalised per head before the rotation.
    `windows`: the sliding window of each layer, or None.

    What none of these families has is set with `dataclasses.replace`, and `to_hf` refuses it. `keep_anchor`: the anchor
    stays visible beyond the windows. `softcap`: of the logits of attention, as in Gemma 2. `sinks`: each layer has a
    sink for each query head, as in gpt-oss. `scale`: of the logits, where it is not head_dim ** -0.5, as Granite's
    attention_multiplier. `jaxref.attention.attention` says what they compute. `logits_divisor`, `logits_softcap` and
    `head_bias`: of the logits (Granite, Gemma 2, Phi). And `rope` may rotate a part of the head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    rope: RopeSpec
    windows: tuple[int | None, ...]
    keep_anchor: bool = False
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    logits_divisor: float | None = None
    logits_softcap: float | None = None
    head_bias: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read a `config.json` as a dict. Every field that would change a number and is not implemented is refused.

        Raises UserError, one line naming the field, its value and what is known.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise UserError(
                f"model_type: {quoted(model_type)} is not implemented; known are {', '.join(ARCHITECTURES)}"
            )
        _refuse_what_is_not_implemented(config)

        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        # An absent field is 8 or 32 in transformers for Mistral and Qwen, whatever the heads: there it has to be
        # written.
        same_as_heads = model_type == "llama" or "num_key_value_heads" in config
        kv_heads = _size(config, "num_key_value_heads", heads if same_as_heads else None)
        if heads % kv_heads:
            raise UserError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
        if config.get("head_dim") is None and hidden % heads and model_type != "qwen3":
            raise UserError(f"hidden_size: {hidden} is not a multiple of num_attention_heads {heads}; give head_dim")
        head_dim = _size(config, "head_dim", 128 if model_type == "qwen3" else hidden // heads)
        if head_dim % 2:
            raise UserError(f"head_dim: {head_dim} is odd, and RoPE rotates pairs")
        eps = config.get("rms_norm_eps", 1e-6)
        if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 < eps < 1:
            raise UserError(f"rms_norm_eps: {quoted(eps)} is not a number between 0 and 1")
        bias = model_type in ("llama", "qwen3") and _flag(config, "attention_bias")
        rope = RopeSpec.from_hf({**config, "head_dim": head_dim})
        if rope.head_dim != head_dim:
            raise UserError(f"partial_rotary_factor: {model_type} rotates whole heads; leave it out")
        return cls(
            model_type=model_type,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_size(config, "max_position_embeddings"),
            rms_norm_eps=float(eps),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=bias or model_type == "qwen2",
            o_bias=bias,
            qk_norm=model_type == "qwen3",
            rope=rope,
            windows=_read_windows(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` that transformers 4 and 5 and `from_hf` read back as this decoder.

        Raises UserError: the decoder has a property that no `config.json` of these families can state.
        """
        for name in ADDED:
            if getattr(self, name):
                raise UserError(f"{name}: {getattr(self, name)} is in no config.json of {self.model_type}")
        if self.rope.head_dim != self.head_dim:
            raise UserError(f"rope: {self.model_type} rotates whole heads, not {self.rope.head_dim} dimensions")
        fields = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "hidden_act": "silu",
            "attention_bias": self.o_bias,
            **_window_fields(self.model_type, self.windows),
            **_rope_fields(self.rope, self.max_position_embeddings),
        }
        derived = {"qkv_bias", "o_bias", "qk_norm", "rope", "windows", *ADDED}
        fields |= {name: value for name, value in vars(self).items() if name not in derived}
        if _read_windows(fields) != self.windows:
            raise UserError(f"windows: {self.windows} is in no config.json of {self.model_type}")
        return fields

    def check_plain(self) -> None:
        """Refuse what the mask rule and a plain head do not compute: a window, a soft cap, sinks, a scale, ...

        Raises UserError. A window as long as the longest row that the model is made for hides nothing, and is taken.
        """
        shortest = min((window for window in self.windows if window is not None), default=None)
        if shortest is not None and shortest < self.max_position_embeddings:
            raise UserError(
                f"sliding_window: {shortest} is shorter than max_position_embeddings {self.max_position_embeddings}, "
                "and this computes no windows; set it to null if every row is to be attended to in full"
            )
        for name in ADDED[1:]:
            if getattr(self, name):
                raise UserError(f"{name}: this does not compute it; choose another model")


def _read_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer: all of Mistral's have one, of Qwen's those that `layer_types` names."""
    family, layers = config["model_type"], _size(config, "num_hidden_layers")
    qwen = family.startswith("qwen")
    has_window = _flag(config, "use_sliding_window") if qwen else family == "mistral"
    window = None
    if has_window and config.get("sliding_window", 4096) is not None:
        window = _size(config, "sliding_window", 4096)
    first = _size(config, "max_window_layers", 28, least=0) if qwen else 0
    own = [FULL if window is None or layer < first else SLIDING for layer in range(layers)]
    kinds = config.get("layer_types")
    kinds = own if kinds is None else kinds
    possible = (FULL, SLIDING) if window is not None and qwen else own[:1]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in possible for kind in kinds):
        raise UserError(
            f"layer_types: {quoted(kinds)} is not implemented; with this sliding_window {family} takes a list of "
            f"{layers} from {', '.join(possible)}"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _window_fields(model_type: str, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return the fields from which transformers and `_read_windows` read these windows, all of one length."""
    window = max((window for window in windows if window is not None), default=None)
    if window is None or not model_type.startswith("qwen"):
        return {"sliding_window": window}
    kinds = [FULL if own is None else SLIDING for own in windows]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}


def _rope_fields(rope: RopeSpec, longest: int) -> dict[str, Any]:
    """Return RoPE in the fields of transformers 5, and in those of 4, which falls back to a theta of 10,000."""
    parameters = rope.to_hf()
    older = {"rope_theta": parameters["rope_theta"], "rope_scaling": None}
    if parameters["rope_type"] == "longrope":
        # 4 looks for this length outside of rope_scaling, and derives the attention factor from the two lengths.
        original = older["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
        if rope.factor != longest / original:
            parameters.setdefault("attention_factor", inverse_frequencies(rope)[1])
    if parameters["rope_type"] != "default":
        older["rope_scaling"] = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {"rope_parameters": parameters, **older}


def _refuse_what_is_not_implemented(config: Mapping[str, Any]) -> None:
    for field, implemented in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("attention_dropout", 0),
        ("quantization_config", None),
    ):
        if config.get(field, implemented) != implemented:
            raise UserError(f"{field}: {quoted(config[field])} is not implemented; known is {implemented!r}")


def _size(config: Mapping[str, Any], field: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise UserError(f"{field}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST.get(field, 2**31):
        raise UserError(f"{field}: {quoted(value)} is not a positive whole number up to {MOST.get(field, 2**31)}")
    return value


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise UserError(f"{field}: {quoted(value)} is not true or false")
    return value
