"""What a decoder is: the numbers of a Hugging Face `config.json` that this reference implements, and a refusal of the
rest.

Llama 2/3, Mistral, Qwen 1.5/2 (`qwen2`: biases on q, k, v) and Qwen 3 (RMSNorm on every head of q and k) are one
decoder with three switches. Absent fields take the defaults that transformers' configuration classes give them.

The model reads the fields of `DecoderConfig` and nothing else here. A first reader may skip what fills them in, refuses
and writes them back.
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
            rope=RopeSpec.from_hf({**config, "head_dim": head_dim}),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` that transformers 4 and 5 and `from_hf` read back as this decoder."""
        fields = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "hidden_act": "silu",
            "attention_bias": self.o_bias,
            "sliding_window": None,
            **_rope_fields(self.rope, self.max_position_embeddings),
        }
        derived = {"qkv_bias", "o_bias", "qk_norm", "rope"}
        return fields | {name: value for name, value in vars(self).items() if name not in derived}


def _rope_fields(rope: RopeSpec, longest: int) -> dict[str, Any]:
    """Return RoPE as transformers 5 reads it and, beside it, as 4 does, which takes a theta of 10,000 where it finds no
    other.
    """
    parameters = rope.to_hf()
    beside = {"rope_theta": parameters["rope_theta"], "rope_scaling": None}
    if parameters["rope_type"] == "longrope":
        # 4 looks for this length outside of rope_scaling, and derives the attention factor from the two lengths.
        original = beside["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
        if rope.factor != longest / original:
            parameters.setdefault("attention_factor", inverse_frequencies(rope)[1])
    if parameters["rope_type"] != "default":
        beside["rope_scaling"] = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {"rope_parameters": parameters, **beside}


def _refuse_what_is_not_implemented(config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    if config["model_type"].startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    longest = config.get("max_position_embeddings")
    if window is not None and (not isinstance(window, int) or not isinstance(longest, int) or window < longest):
        raise UserError(
            f"sliding_window: {window} is shorter than max_position_embeddings {longest}, and sliding windows are not "
            "implemented; set it to null if every row is to be attended to in full"
        )
    layers = config.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        other = sorted({str(layer) for layer in layers} - {"full_attention"}) if isinstance(layers, list) else layers
        raise UserError(f"layer_types: {quoted(other)} not implemented; known is full_attention")
    for field, implemented in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("attention_dropout", 0),
        ("quantization_config", None),
    ):
        if config.get(field, implemented) != implemented:
            raise UserError(f"{field}: {quoted(config[field])} is not implemented; known is {implemented!r}")


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise UserError(f"{field}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST.get(field, 2**31):
        raise UserError(f"{field}: {quoted(value)} is not a positive whole number up to {MOST.get(field, 2**31)}")
    return value


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise UserError(f"{field}: {quoted(value)} is not true or false")
    return value
