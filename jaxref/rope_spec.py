"""RoPE's type and parameters: read from a `config.json`, checked, written back. `jaxref.rope` computes with them.

A first reader may skip this file: a `RopeSpec` holds `head_dim`, `theta` and the parameters of its type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal, localcontext
from typing import Any

from anchorline.errors import UserError, quoted, quoted_reason

# The base the paper trains each length with (arXiv 2411.13476).
PAPER_ROPE_THETA = {32_768: 1e6, 65_536: 5e6, 131_072: 1e7, 262_144: 5e7}

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
    "proportional": (),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor",),
    "proportional": ("factor", "partial_rotary_factor"),
}
TYPES = tuple(_REQUIRED)

# Positions are whole numbers in float32, so no stretch is larger; a base and its powers are float32 in every model.
LEAST_STRETCH, MOST_STRETCH, MOST_THETA, MOST_DIM = 1e-6, 2**24, 1e38, 2**14

DIGITS = 50  # decimal, of all that becomes a frequency


def paper_theta(length: int) -> float:
    """Return the base the paper trains a context length with. Raises UserError for a length that it has none for."""
    if length not in PAPER_ROPE_THETA:
        raise UserError(
            f"theta: the paper has no base for {length}; it has for {', '.join(map(str, PAPER_ROPE_THETA))}"
        )
    return PAPER_ROPE_THETA[length]


@dataclass(frozen=True)
class RopeSpec:
    """A type and its parameters, under transformers' names. Hashable.

    head_dim: of a head, or of its first part where a config's `partial_rotary_factor` leaves the rest as it is.
    original_max_position_embeddings: the length scaling starts from, in tokens (for `dynamic`, transformers'
        `max_position_embeddings`).
    attention_factor: on cos and sin both; None is what the type derives from `factor` (and `mscale`, `mscale_all_dim`).
    beta_fast, beta_slow: rotations over the original length above which yarn keeps, below which it interpolates a pair.
    low_freq_factor, high_freq_factor: original length over wavelength, below and above which llama3 divides and keeps.
    short_factor, long_factor: one number for each pair; the long ones count beyond the original length.
    partial_rotary_factor: the share of all pairs that `proportional` rotates; the others have frequency 0.

    Raises UserError for an unknown type, a parameter out of range, one that the type needs and has not, and one that
    it has and would ignore.
    """

    head_dim: int
    theta: float
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    partial_rotary_factor: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in TYPES:
            raise UserError(f"rope_type: {quoted(self.rope_type)} is unknown; choose from {', '.join(TYPES)}")
        smallest = 4 if self.rope_type in ("ntk", "dynamic") else 2  # D / (D - 2) is their exponent
        if not isinstance(self.head_dim, int) or not smallest <= self.head_dim <= MOST_DIM or self.head_dim % 2:
            raise UserError(
                f"head_dim: {quoted(self.head_dim)}; RoPE rotates pairs, give an even number from {smallest} to "
                f"{MOST_DIM}"
            )
        if not _is_number(self.theta) or not 1 < self.theta <= MOST_THETA:
            raise UserError(f"theta: {quoted(self.theta)}; give a number above 1, and up to {MOST_THETA:g}")
        for name, value in self._parameters().items():
            if name not in _used_keys(self.rope_type):
                raise UserError(f"{name}: rope_type {self.rope_type!r} does not use it; leave it out")
            least = {"factor": 1, "original_max_position_embeddings": 2}.get(name, LEAST_STRETCH)
            listed = name in ("short_factor", "long_factor")
            if listed and not isinstance(value, tuple):
                raise UserError(f"{name}: {quoted(value)}; give a list of numbers")
            numbers: tuple[Any, ...] = value if listed else (value,)
            if name != "truncate" and not all(_is_number(x) and least <= x <= MOST_STRETCH for x in numbers):
                raise UserError(f"{name}: {quoted(value)}; give numbers from {least:g} to {MOST_STRETCH}")
        for name in _REQUIRED[self.rope_type]:
            if getattr(self, name) is None:
                raise UserError(f"{name}: missing, and rope_type {self.rope_type!r} needs it")
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if factors is not None and len(factors) != self.head_dim // 2:
                raise UserError(f"{name}: {len(factors)} numbers; give one for each of {self.head_dim // 2} pairs")
        if self.low_freq_factor is not None and not self.low_freq_factor < (self.high_freq_factor or 0):
            raise UserError(
                f"low_freq_factor: {self.low_freq_factor!r} is not below high_freq_factor {self.high_freq_factor!r}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], layer_type: str | None = None) -> "RopeSpec":
        """Read a `config.json`: transformers 5's `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

        layer_type: whose parameters, where a config has them by type of layer (Gemma 3).

        What is absent falls back as in transformers. Raises UserError as `RopeSpec` does, and for what would rotate
        otherwise: a part of the head that is no pairs, parameters that differ by layer type without one, keys that are
        unknown.
        """
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(config.get(name) or {}, Mapping):
                raise UserError(f"{name}: {quoted(config[name])} is not a table of parameters")
        given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        if layer_type is not None and any(isinstance(value, Mapping) for value in given.values()):
            if not isinstance(given.get(layer_type), Mapping):
                raise UserError(f"rope_parameters: none for {quoted(layer_type)}; there are {', '.join(given)}")
            given = dict(given[layer_type])
        longest = _length(config, "max_position_embeddings")
        rope_type = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        theta = given.pop("rope_theta", config.get("rope_theta", 10_000.0))
        head_dim = _length(config, "head_dim")
        if head_dim is None:
            hidden, heads = _length(config, "hidden_size"), _length(config, "num_attention_heads")
            if hidden is None or heads is None:
                raise UserError(
                    "head_dim: missing, and so is hidden_size or num_attention_heads; give head_dim or both"
                )
            head_dim = hidden // heads
        partial = given.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial is not None:
            if not _is_number(partial) or not 0 < partial <= 1:
                raise UserError(f"partial_rotary_factor: {quoted(partial)}; give a number above 0, and up to 1")
            whole = rope_type == "proportional"
            rotated = head_dim if whole else int(head_dim * partial)
            given |= {"partial_rotary_factor": partial} if whole else {}
            if rotated % 2 or not rotated:
                raise UserError(
                    f"partial_rotary_factor: {partial} of head_dim {head_dim} rotates {rotated} dimensions, and RoPE "
                    "rotates pairs"
                )
            head_dim = rotated
        if not isinstance(rope_type, str) or rope_type not in TYPES or rope_type == "ntk":
            known = ", ".join(name for name in TYPES if name != "ntk")
            raise UserError(f"rope_type: {quoted(rope_type)} is not implemented; known in a config are {known}")
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise UserError(f"rope_parameters: {quoted_reason(', '.join(sorted(unknown)))} not implemented")

        if rope_type == "dynamic":
            given["original_max_position_embeddings"] = longest
        elif config.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        else:
            given.setdefault("original_max_position_embeddings", longest)
        original = _length(given, "original_max_position_embeddings")
        if given.get("factor") is None and rope_type in ("yarn", "longrope") and longest and original:
            given["factor"] = longest / original
        rest: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if name in _used_keys(rope_type) and value is not None
        }
        return cls(head_dim=head_dim, theta=theta, rope_type=rope_type, **rest)

    def to_hf(self) -> dict[str, Any]:
        """Return `rope_parameters` as transformers 5 writes them; `ntk` becomes the default type with a larger base."""
        if self.rope_type == "ntk":
            with localcontext(prec=DIGITS):
                return {"rope_type": "default", "rope_theta": float(ntk_base(self, None))}
        parameters = self._parameters()
        if self.rope_type == "dynamic":
            del parameters["original_max_position_embeddings"]  # the config's own max_position_embeddings
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in parameters.items()}
        return {"rope_type": self.rope_type, "rope_theta": self.theta, **lists}

    def _parameters(self) -> dict[str, Any]:
        """Return those that are not as they would be if nobody gave them."""
        own = [field for field in fields(self) if field.name not in ("head_dim", "theta", "rope_type")]
        return {field.name: getattr(self, field.name) for field in own if getattr(self, field.name) != field.default}


def ntk_base(spec: RopeSpec, seq_len: int | None) -> Decimal:
    """Return the larger base of `ntk` and `dynamic`; seq_len: as `jaxref.rope.inverse_frequencies`."""
    stretch = decimal(spec.factor)
    if spec.rope_type == "dynamic":
        original = decimal(spec.original_max_position_embeddings)
        stretch = stretch * max(Decimal(seq_len or 0), original) / original - (stretch - 1)
    return Decimal(spec.theta) * stretch ** (Decimal(spec.head_dim) / (spec.head_dim - 2))


def decimal(value: float | None) -> Decimal:
    """Exactly; what a type requires is there, `RopeSpec` has seen to it."""
    assert value is not None
    return Decimal(value)


def _used_keys(rope_type: str) -> tuple[str, ...]:
    return (*_REQUIRED[rope_type], *_OPTIONAL.get(rope_type, ()))


def _length(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 2**31):
        raise UserError(f"{name}: {quoted(value)} is not a positive whole number up to {2**31}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
