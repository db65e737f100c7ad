"""Which numbers are rounded, where, and to what.

All arithmetic runs in one carrier, float64 or float32. Right after a value is computed it is rounded at its named site,
or left as the carrier has it. So a cast that some implementation makes is one word here, and can be switched on and off
alone.

A first reader needs the table, `Rounding` and the comment over `PRESETS`. Gradients (the end of this page) and
`round_to`, which keeps a format's subnormals, may be skipped.

| site           | rounds                                                     | where                |
| -------------- | ---------------------------------------------------------- | -------------------- |
| `position`     | the positions that angles are made of                      | `rope.cos_sin`       |
| `inv_freq`     | RoPE's inverse frequencies                                 | `rope.cos_sin`       |
| `angle`        | position times inverse frequency                           | `rope.cos_sin`       |
| `table`        | cos and sin, times attention scaling                       | `rope.cos_sin`       |
| `rope_product` | each of the products x cos, x sin                          | `rope.rotate`        |
| `rope_sum`     | their sums                                                 | `rope.rotate`        |
| `q_rotated`    | queries after rotation                                     | `rope.rotate`        |
| `k_rotated`    | keys after rotation                                        | `rope.rotate`        |
| `kv_heads`     | k and v once more for each query head (a no-op forward)    | `attention`          |
| `qk`           | each dot product of a query and a key                      | `attention`          |
| `scaled`       | the same times the scale                                   | `attention`          |
| `probs`        | what multiplies V: see `normalise`                         | `attention`          |
| `pv`           | the sum over keys of that times V                          | `attention`          |
| `attn_out`     | the output of attention                                    | `attention`          |
| `embed`        | rows of the embedding                                      | `model`              |
| `proj`         | q, k, v and output projections (bias included)             | `model`              |
| `norm`         | RMSNorm's quotient, and the quotient times the weight      | `model`              |
| `mlp`          | gate, up, activation, their product, down                  | `model`              |
| `residual`     | both sums of a layer                                       | `model`              |
| `logits`       | the last projection                                        | `model`              |

Formats are those of `FORMATS` and any `eXmY`, X exponent and Y mantissa bits, as IEEE 754 would define it: to nearest,
ties to even, overflow to infinity, subnormals kept. Two names mean what hardware has under them: `e4m3` is OCP's, whose
largest number is 448 and which has no infinity (overflow is NaN), and the `_sat` formats give their largest number in
place of overflow, as the conversion instructions of GPUs do. `tf32` is rounded to nearest too, which tensor cores that
cut the last bits off do not. Matrix products accumulate in the carrier, whose sum order is XLA's, unless `accumulator`
gives the sums of attention fewer bits. In a float32 carrier
`fp32` adds nothing, and compiled code may contract a product and a sum into one FMA; in a float64 carrier it is IEEE
float32 exactly, for + - x / and square roots.

Gradients: a site rounds the cotangent that arrives at it to the same format, as autograd stores the gradient of a bf16
tensor in bf16. Where a value is used more than once the cotangents meet in the carrier and are rounded once; torch
rounds each and then their sum. Keys and values shared by a group of query heads have a site for it, `kv_heads`, because
every engine rounds there. With `after_pv` the backward pass of attention is FlashAttention-2's own, which is not its
forward transposed: it rounds P and dS where the transpose would round dP.
"""

import re
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from anchorline.errors import UserError


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating point format: exponent and explicit mantissa bits.

    finite: it has no infinity; the largest exponent holds numbers, and only its last mantissa is NaN (OCP's E4M3).
    saturates: what is too large becomes the largest number instead of infinity or NaN.
    scale: a power of two; numbers are multiplied by it before they are rounded, and divided after.
    """

    exponent_bits: int
    mantissa_bits: int
    finite: bool = False
    saturates: bool = False
    scale: float = 1.0

    @property
    def smallest_normal_exponent(self) -> int:
        """-126 of float32."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def largest(self) -> float:
        """The largest finite number, the scale left aside."""
        top = 2 ** (self.exponent_bits - 1) - (0 if self.finite else 1)
        return (2 - 2.0 ** (1 - self.mantissa_bits if self.finite else -self.mantissa_bits)) * 2.0**top


FORMATS = {
    "bf16": FloatFormat(8, 7),
    "fp16": FloatFormat(5, 10),
    "fp32": FloatFormat(8, 23),
    "tf32": FloatFormat(8, 10),
    "e5m2": FloatFormat(5, 2),
    "e5m2_sat": FloatFormat(5, 2, saturates=True),
    "e4m3": FloatFormat(4, 3, finite=True),
    "e4m3_sat": FloatFormat(4, 3, finite=True, saturates=True),
    # The unnormalised probabilities of FlashAttention-3 in fp8: exp(logit - max), at most 1, is kept times 2^8.
    "e4m3_probs": FloatFormat(4, 3, finite=True, saturates=True, scale=2.0**8),
}
_ANY = re.compile(r"e([1-9]\d?)m([1-9]\d?)", re.ASCII)  # one spelling each: e4m03 is not another e4m3
MOST_EXPONENT_BITS, MOST_MANTISSA_BITS = 11, 52  # float64's, the widest carrier
CARRIERS = ("float64", "float32")
ACCUMULATED = 32  # terms that one instruction of Hopper's tensor cores adds, of fp8 operands

Format = str | None  # a name of `FORMATS` or `eXmY`; None is not rounded


@cache
def find_format(name: str) -> FloatFormat | None:
    """Return the format of a name, or None if there is none such."""
    if name in FORMATS:
        return FORMATS[name]
    match = _ANY.fullmatch(name)
    if match is None:
        return None
    exponent, mantissa = map(int, match.groups())
    possible = 2 <= exponent <= MOST_EXPONENT_BITS and 1 <= mantissa <= MOST_MANTISSA_BITS
    return FloatFormat(exponent, mantissa) if possible else None


@dataclass(frozen=True)
class Rounding:
    """The carrier, and the format of each site (None: not rounded). Hashable, so it can be a static argument of `jit`.

    normalise: `before_pv` divides by the softmax sum and then multiplies by V, as eager code does. `after_pv`
        multiplies V by exp(logit - max), rounded at `probs`, and divides the result, as FlashAttention-2 does (arXiv
        2307.08691, section 3.1); the backward pass is FlashAttention-2's too.
    accumulator: significant bits of the running sums of QK^T and P V in attention's forward pass, which are cut
        towards zero after every `ACCUMULATED` terms, as tensor cores do with fp8 operands; None: the carrier's.

    Raises UserError for a carrier, format or order that does not exist.
    """

    carrier: Literal["float64", "float32"]
    position: Format = None
    inv_freq: Format = None
    angle: Format = None
    table: Format = None
    rope_product: Format = None
    rope_sum: Format = None
    q_rotated: Format = None
    k_rotated: Format = None
    kv_heads: Format = None
    qk: Format = None
    scaled: Format = None
    probs: Format = None
    pv: Format = None
    attn_out: Format = None
    embed: Format = None
    proj: Format = None
    norm: Format = None
    mlp: Format = None
    residual: Format = None
    logits: Format = None
    normalise: Literal["before_pv", "after_pv"] = "before_pv"
    accumulator: int | None = None

    def __post_init__(self) -> None:
        known = {"carrier": CARRIERS, "normalise": ("before_pv", "after_pv")}
        for name, value in vars(self).items():
            if name == "accumulator":
                if value is not None and not 2 <= value <= 24:
                    raise UserError(f"accumulator: {value} significant bits; give 2 to 24, or None")
            elif name in known:
                if value not in known[name]:
                    raise UserError(f"{name}: {value!r} is unknown; choose from {', '.join(known[name])}")
            elif value is not None and (fmt := find_format(value) if isinstance(value, str) else None) is None:
                raise UserError(
                    f"{name}: {value!r} is unknown; choose from None, {', '.join(FORMATS)} or eXmY with 2 to "
                    f"{MOST_EXPONENT_BITS} exponent and 1 to {MOST_MANTISSA_BITS} mantissa bits"
                )
            elif value is not None and fmt.mantissa_bits > jnp.finfo(self.carrier).nmant:
                raise UserError(f"{name}: {value!r} has more mantissa bits than its carrier, {self.carrier}")

    @property
    def dtype(self) -> Any:
        """The carrier as a dtype."""
        return jnp.dtype(self.carrier)

    def round(self, site: str, x: jax.Array) -> jax.Array:
        """Return `x`, of the carrier's dtype, rounded as `site` says."""
        assert x.dtype == self.dtype, f"{site}: {x.dtype} in a {self.carrier} carrier"
        fmt = getattr(self, site)
        return x if fmt is None else round_to(x, fmt)

    def replace(self, **changes: Any) -> "Rounding":
        """Return a copy with other values: `preset("hf_eager_bf16").replace(carrier="float64", table="fp32")`."""
        _check_names(changes)
        return replace(self, **changes)

    def only(self, *sites: str) -> "Rounding":
        """Return a copy that rounds at these sites and nowhere else."""
        _check_names(sites)
        return replace(self, **dict.fromkeys(set(SITES) - set(sites)))

    def without(self, *sites: str) -> "Rounding":
        """Return a copy that does not round at these sites."""
        _check_names(sites)
        return replace(self, **dict.fromkeys(sites))


NO_SITES = ("carrier", "normalise", "accumulator")
SITES = tuple(field.name for field in fields(Rounding) if field.name not in NO_SITES)


def _check_names(names: Any) -> None:
    for name in names:
        if name not in (*SITES, *NO_SITES):
            raise UserError(f"{name}: no such site; the sites are {', '.join(SITES)}")


def cut_to(x: jax.Array, bits: int) -> jax.Array:
    """Return float32 or float64 `x` cut towards zero to so many significant bits; dtype unchanged, no gradient."""
    integer = {4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
    dropped = jnp.finfo(x.dtype).nmant + 1 - bits
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, integer) >> dropped << dropped, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def round_to(x: jax.Array, fmt: str) -> jax.Array:
    """Return float32 or float64 `x`, any shape, rounded to a format of `find_format`; dtype unchanged. Its gradient is
    rounded alike.

    `lax.reduce_precision` and not a pair of casts: compilers drop those, and from float64 `astype` rounds twice.
    """
    form, carrier = find_format(fmt), jnp.finfo(x.dtype)
    assert form is not None, f"{fmt}: no such format"
    if form.scale != 1:
        return _round(x * form.scale, form, carrier) / form.scale
    return _round(x, form, carrier)


def _round(x: jax.Array, form: FloatFormat, carrier: Any) -> jax.Array:
    exponent_bits = form.exponent_bits + form.finite  # the largest exponent holds numbers: one of the next format's
    mantissa_bits = min(form.mantissa_bits, carrier.nmant)
    rounded = jax.lax.reduce_precision(x, min(exponent_bits, carrier.nexp), mantissa_bits)
    if form.exponent_bits >= carrier.nexp:
        return rounded  # the carrier's own subnormals, which XLA keeps or flushes as the device does
    if form.finite:
        rounded = jnp.where(jnp.abs(rounded) > form.largest, jnp.nan, rounded)
    if form.saturates:
        over = ~(jnp.abs(rounded) <= form.largest) & ~jnp.isnan(x)
        rounded = jnp.where(over, jnp.copysign(form.largest, x), rounded)
    # reduce_precision flushes subnormals to zero, hardware casts keep them: they are the multiples of one quantum. In
    # fp16 that is every probability below 6.1e-5.
    quantum = 2.0 ** (form.smallest_normal_exponent - mantissa_bits)
    subnormal = jax.lax.round(x / quantum, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * quantum
    return jnp.where(jnp.abs(x) < 2.0**form.smallest_normal_exponent, subnormal, rounded)


def _forward(x: jax.Array, fmt: str) -> tuple[jax.Array, None]:
    return round_to(x, fmt), None


def _backward(fmt: str, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (round_to(cotangent, fmt),)


round_to.defvjp(_forward, _backward)


def _half_precision(fmt: Format) -> dict[str, Rounding]:
    everywhere = Rounding("float32").replace(**dict.fromkeys(SITES, fmt))
    hf_eager = everywhere.replace(position="fp32", inv_freq="fp32", angle="fp32")
    flash = hf_eager.replace(qk=None, scaled=None, pv=None, normalise="after_pv")
    paper = flash.replace(table="fp32", rope_product="fp32", rope_sum="fp32")
    return {f"hf_eager_{fmt}": hf_eager, f"flash_{fmt}": flash, f"paper_{fmt}": paper}


# exact          float64, nothing rounded: the truth.
# fp32           a float32 carrier, nothing rounded further.
# flash_fp32     the same with FlashAttention-2's order of operations, forward and backward.
# fp32_sites     float64 arithmetic, every site rounded to float32: storage in float32 without float32's sums.
# hf_eager_bf16  cast by cast what transformers' eager attention and RoPE do in bf16: inverse frequencies, angles, cos
#                and sin in float32, the table rounded, then every product and sum; softmax in float32, its result
#                rounded.
# flash_bf16     the same up to q and k, then FlashAttention-2: logits, softmax and accumulator in float32, the
#                unnormalised probabilities rounded for P V, the output rounded.
# paper_bf16     rotation in float32, q and k rounded once, then as flash_bf16 (what arXiv 2411.13476 describes).
# `fp32` at a site says in words what a float32 carrier does anyway, and keeps it said under replace(carrier="float64").
PRESETS: dict[str, Rounding] = {
    "exact": Rounding("float64"),
    "fp32": Rounding("float32"),
    "flash_fp32": Rounding("float32", normalise="after_pv"),
    "fp32_sites": Rounding("float64").replace(**dict.fromkeys(SITES, "fp32")),
    **_half_precision("bf16"),
    **_half_precision("fp16"),
}


def preset(name: str) -> Rounding:
    """Return a rounding of `PRESETS`. Raises UserError for a name that is not there."""
    if name not in PRESETS:
        raise UserError(f"rounding: {name!r} is not a preset; choose from {', '.join(PRESETS)}")
    return PRESETS[name]
