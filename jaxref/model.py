"""The decoder: Llama, Mistral, Qwen 1.5/2 and Qwen 3 in Flax NNX, slow and obvious, every rounding by name.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · C = D/2 rotated pairs · M model
width · F MLP width · V vocabulary · N inputs and O outputs of a projection.

The order of operations and of roundings is that of transformers 5 (`models/llama/modeling_llama.py` and its siblings):
where its bfloat16 model writes a bfloat16 tensor, this file has a site of `Rounding`. Attributes carry Hugging Face's
names, so a parameter's path is its name in a checkpoint.

A first reader may skip the taps: each part also returns its intermediate arrays by name, so that those of another
implementation can be compared with them.

Parameters keep their dtype. Where they are used, they are cast exactly to the carrier; no preset rounds them. So a
bfloat16 model needs a preset and `jaxref.storage.weights.cast(decoder, "bfloat16")`. A decoder is a JAX pytree:
`jax.grad` of a function of a decoder returns a decoder of gradients. A layer is compiled once for each window, and
Python calls it for every layer. So 80 layers make no larger XLA program than 2. Do not `jit` the decoder.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import Precision

from jaxref.attention import attention
from jaxref.decoder_config import DecoderConfig
from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rounding import Rounding

__all__ = ["Decoder", "DecoderConfig"]

INITIALIZER_RANGE = 0.02  # transformers' default standard deviation of a fresh matrix

Taps = dict[str, jax.Array]  # arrays made on the way, by name: `Decoder.hidden` lists them


class Embedding(nnx.Module):
    """A table [V, M]; `__call__` takes ids [B, T] to rows [B, T, M]."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs | None):
        self.weight = _normal(rngs, (size, width))

    def __call__(self, ids: jax.Array, rounding: Rounding) -> jax.Array:
        """Rows of the table: [B, T] -> [B, T, M]."""
        return rounding.round("embed", _in_carrier(self.weight[ids], rounding))


class Linear(nnx.Module):
    """y = x W^T (+ b), W stored [O, N] as torch stores it; the bias joins the sum before its one rounding."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rngs: nnx.Rngs | None):
        self.weight = _normal(rngs, (outputs, inputs))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None

    def __call__(self, x: jax.Array, rounding: Rounding, site: str) -> jax.Array:
        """[..., N] -> [..., O], rounded at `site`."""
        y = _matmul(x, _in_carrier(self.weight[...], rounding))
        if self.bias is not None:
            y = y + _in_carrier(self.bias[...], rounding)
        return rounding.round(site, y)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the quotient is rounded before the weight and after it."""

    def __init__(self, width: int, eps: float):
        self.weight = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array, rounding: Rounding) -> jax.Array:
        """[..., width] -> the same shape. Statistics stay in the carrier (float32 in transformers)."""
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        normalised = rounding.round("norm", x * jax.lax.rsqrt(mean_square + self.eps))
        return rounding.round("norm", _in_carrier(self.weight[...], rounding) * normalised)


class Attention(nnx.Module):
    """Projections, the norms of Qwen 3, rotation, attention, output projection."""

    def __init__(self, config: DecoderConfig, window: int | None, rngs: nnx.Rngs | None):
        width, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim
        self.window, self.keep_anchor, self.softcap = window, config.keep_anchor, config.softcap
        self.scale = config.scale
        self.q_proj = Linear(width, heads * head_dim, config.qkv_bias, rngs)
        self.k_proj = Linear(width, kv_heads * head_dim, config.qkv_bias, rngs)
        self.v_proj = Linear(width, kv_heads * head_dim, config.qkv_bias, rngs)
        self.o_proj = Linear(heads * head_dim, width, config.o_bias, rngs)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = _normal(rngs, (heads,)) if config.sinks else None

    def __call__(
        self,
        x_BTM: jax.Array,
        cos_BTC: jax.Array,
        sin_BTC: jax.Array,
        document_ids_BT: jax.Array,
        rounding: Rounding,
        query_block: int | None,
    ) -> tuple[jax.Array, Taps]:
        """[B, T, M] -> ([B, T, M], taps)."""
        q_BTHD, k_BTKD, v_BTKD, taps = self.project(x_BTM, rounding)
        q_BTHD = taps["q_rope"] = rotate(q_BTHD, cos_BTC, sin_BTC, rounding, "q_rotated")
        k_BTKD = taps["k_rope"] = rotate(k_BTKD, cos_BTC, sin_BTC, rounding, "k_rotated")
        taps["attn"], taps["lse"] = attention(
            *(q_BTHD, k_BTKD, v_BTKD, document_ids_BT, rounding),
            scale=self.scale,
            query_block=query_block,
            sinks_H=None if self.sinks is None else _in_carrier(self.sinks[...], rounding),
            softcap=self.softcap,
            window=self.window,
            keep_anchor=self.keep_anchor,
        )
        out_BTM = taps["attn_out"] = self.output(taps["attn"], rounding)
        return out_BTM, taps

    def project(self, x_BTM: jax.Array, rounding: Rounding) -> tuple[jax.Array, jax.Array, jax.Array, Taps]:
        """[B, T, M] -> q [B, T, H, D], k and v [B, T, K, D] before the rotation, and the taps up to there."""
        by_head = (*x_BTM.shape[:2], -1, self.head_dim)
        taps = {}
        q_BTHD = taps["q"] = self.q_proj(x_BTM, rounding, "proj").reshape(by_head)
        k_BTKD = taps["k"] = self.k_proj(x_BTM, rounding, "proj").reshape(by_head)
        v_BTKD = taps["v"] = self.v_proj(x_BTM, rounding, "proj").reshape(by_head)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD = taps["q_norm"] = self.q_norm(q_BTHD, rounding)
            k_BTKD = taps["k_norm"] = self.k_norm(k_BTKD, rounding)
        return q_BTHD, k_BTKD, v_BTKD, taps

    def output(self, attn_BTHD: jax.Array, rounding: Rounding) -> jax.Array:
        """Compute the output projection of the heads' results: [B, T, H, D] -> [B, T, M]."""
        return self.o_proj(attn_BTHD.reshape(*attn_BTHD.shape[:2], -1), rounding, "proj")


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU. All five results are rounded at the site `mlp`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs | None):
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, False, rngs)
        self.up_proj = Linear(width, inner, False, rngs)
        self.down_proj = Linear(inner, width, False, rngs)

    def __call__(self, x_BTM: jax.Array, rounding: Rounding) -> jax.Array:
        """[B, T, M] -> [B, T, M]."""
        gate_BTF = self.gate_proj(x_BTM, rounding, "mlp")
        up_BTF = self.up_proj(x_BTM, rounding, "mlp")
        act_BTF = rounding.round("mlp", jax.nn.silu(gate_BTF))
        product_BTF = rounding.round("mlp", act_BTF * up_BTF)
        return self.down_proj(product_BTF, rounding, "mlp")


class Layer(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, window: int | None, rngs: nnx.Rngs | None):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, window, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x_BTM: jax.Array,
        cos_BTC: jax.Array,
        sin_BTC: jax.Array,
        document_ids_BT: jax.Array,
        rounding: Rounding,
        query_block: int | None,
    ) -> tuple[jax.Array, Taps]:
        """[B, T, M] -> ([B, T, M], taps). The taps are always computed, so looking at them cannot change a number."""
        taps = {}
        normed_BTM = taps["input_norm"] = self.input_layernorm(x_BTM, rounding)
        attn_out_BTM, attention_taps = self.self_attn(
            normed_BTM, cos_BTC, sin_BTC, document_ids_BT, rounding, query_block
        )
        x_BTM, later_taps = self.after_attention(x_BTM, attn_out_BTM, rounding)
        return x_BTM, taps | attention_taps | later_taps

    def after_attention(self, x_BTM: jax.Array, attn_out_BTM: jax.Array, rounding: Rounding) -> tuple[jax.Array, Taps]:
        """Compute both sums and the MLP: a layer's input and its attention's output [B, T, M] -> ([B, T, M], taps)."""
        taps = {}
        x_BTM = taps["attn_residual"] = rounding.round("residual", x_BTM + attn_out_BTM)
        normed_BTM = taps["post_norm"] = self.post_attention_layernorm(x_BTM, rounding)
        mlp_BTM = taps["mlp"] = self.mlp(normed_BTM, rounding)
        x_BTM = taps["residual"] = rounding.round("residual", x_BTM + mlp_BTM)
        return x_BTM, taps


class Decoder(nnx.Module):
    """A whole model. A fresh one has transformers' initialisation in float32: N(0, 0.02), norms 1, biases 0; without
    `rngs`, for who sets them all, the random ones are 0.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs | None):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs)
        self.layers = nnx.List([Layer(config, window, rngs) for window in config.windows])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        untied = not config.tie_word_embeddings
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.head_bias, rngs) if untied else None

    def __call__(
        self,
        input_ids_BT: Any,
        position_ids_BT: Any,
        document_ids_BT: Any,
        rounding: Rounding,
        query_block: int | None = None,
        taps: bool = False,
    ) -> Any:
        """Logits [B, T, V] in the carrier; with `taps`, (logits, dict of every intermediate by name).

        Arguments and errors: see `hidden`. At long T the logits are what fills memory: `jaxref.loss` takes them in
        chunks.
        """
        arguments = (input_ids_BT, position_ids_BT, document_ids_BT, rounding, query_block)
        if not taps:
            return self.logits(self.hidden(*arguments), rounding)
        hidden_BTM, named = self.hidden(*arguments, taps=True)
        named["logits"] = self.logits(hidden_BTM, rounding)
        return named["logits"], named

    def hidden(
        self,
        input_ids_BT: Any,
        position_ids_BT: Any,
        document_ids_BT: Any,
        rounding: Rounding,
        query_block: int | None = None,
        taps: bool = False,
    ) -> Any:
        """Return the output of the final norm [B, T, M] in the carrier; with `taps`, (hidden, dict of intermediates by
        name).

        The three arguments are integer arrays [B, T]. `query_block`: query rows of attention at a time (None: dense).
        Taps: `rope_table` [B, T, 2 C], cos and then sin; `embed`, `layers.{i}.` + `input_norm q k v [q_norm k_norm]
        q_rope k_rope attn lse attn_out attn_residual post_norm mlp residual`, `final_norm`. By head [B, T, H or K, D]:
        q to attn; `lse` is [B, H, T]; the rest [B, T, M].

        Raises ValueError for shapes that differ, tokens outside the vocabulary (JAX would clamp them silently) and
        parameters that the carrier cannot hold exactly.
        """
        ids, positions, documents = _check_ids(self.config, input_ids_BT, position_ids_BT, document_ids_BT)
        inv_freq, attention_scaling = inverse_frequencies(self.config.rope, int(positions.max()) + 1)
        cos_BTC, sin_BTC = cos_sin(positions, inv_freq, attention_scaling, rounding)

        named = {"rope_table": jnp.concatenate([cos_BTC, sin_BTC], axis=-1)}
        x_BTM = named["embed"] = self.embed_tokens(ids, rounding)
        for i, layer in enumerate(self.layers):
            x_BTM, layer_taps = _run_layer(layer, x_BTM, cos_BTC, sin_BTC, documents, rounding, query_block)
            if taps:
                named |= {f"layers.{i}.{name}": value for name, value in layer_taps.items()}
        hidden_BTM = named["final_norm"] = self.norm(x_BTM, rounding)
        return (hidden_BTM, named) if taps else hidden_BTM

    def logits(self, hidden: jax.Array, rounding: Rounding) -> jax.Array:
        """[..., M] -> [..., V] in the carrier."""
        return head_logits(self.head, hidden, rounding, **self.head_rule)

    @property
    def head(self) -> nnx.Param:
        """The last matrix [V, M]: the embedding's own where the two are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def head_rule(self) -> dict[str, Any]:
        """What else makes the logits: the last arguments of `head_logits`."""
        bias = None if self.lm_head is None else self.lm_head.bias
        return {"bias": bias, "divisor": self.config.logits_divisor, "cap": self.config.logits_softcap}


@partial(jax.jit, static_argnames=("rounding", "query_block"))
def _run_layer(
    layer: Layer,
    x_BTM: jax.Array,
    cos_BTC: jax.Array,
    sin_BTC: jax.Array,
    document_ids_BT: jax.Array,
    rounding: Rounding,
    query_block: int | None,
) -> tuple[jax.Array, Taps]:
    # Recomputed in the backward pass: a whole model's residuals would be all its MLP and attention intermediates.
    @jax.checkpoint
    def run(layer: Layer, x_BTM: jax.Array) -> tuple[jax.Array, Taps]:
        return layer(x_BTM, cos_BTC, sin_BTC, document_ids_BT, rounding, query_block)

    return run(layer, x_BTM)


@partial(jax.jit, static_argnames=("rounding", "divisor", "cap"))
def head_logits(
    head: nnx.Param,
    hidden: jax.Array,
    rounding: Rounding,
    bias: nnx.Param | None = None,
    divisor: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Return logits of final hidden states: a matrix [V, M], perhaps a bias [V], and [..., M] -> [..., V] in the
    carrier. Each step is rounded at `logits`: cap tanh(x / divisor / cap).
    """
    x = _matmul(hidden, _in_carrier(head[...], rounding))
    x = rounding.round("logits", x if bias is None else x + _in_carrier(bias[...], rounding))
    if divisor is not None:
        x = rounding.round("logits", x / divisor)
    if cap is not None:
        share = rounding.round("logits", jnp.tanh(rounding.round("logits", x / cap)))
        x = rounding.round("logits", share * cap)
    return x


def _matmul(x: jax.Array, weight_ON: jax.Array) -> jax.Array:
    return jnp.einsum("...n,on->...o", x, weight_ON, precision=Precision.HIGHEST)


def _in_carrier(parameter: jax.Array, rounding: Rounding) -> jax.Array:
    """Return the parameter in the carrier, exactly: a cast that rounds would be one without a name."""
    if jnp.finfo(parameter.dtype).nmant > jnp.finfo(rounding.dtype).nmant:
        raise ValueError(
            f"carrier: {rounding.carrier} cannot hold {parameter.dtype} parameters exactly; "
            "cast them first (jaxref.storage.weights.cast) or use the float64 carrier"
        )
    return parameter.astype(rounding.dtype)


def _normal(rngs: nnx.Rngs | None, shape: tuple[int, ...]) -> nnx.Param:
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, jnp.float32))
    return nnx.Param(INITIALIZER_RANGE * jax.random.normal(rngs.params(), shape, jnp.float32))


def _check_ids(config: DecoderConfig, *arrays: Any) -> list[jax.Array]:
    """Return the three arguments as integer arrays of one shape [B, T]."""
    names = ("input_ids", "position_ids", "document_ids")
    checked = [np.asarray(array) for array in arrays]
    for name, array in zip(names, checked, strict=True):
        if array.ndim != 2 or array.size == 0 or array.shape != checked[0].shape:
            raise ValueError(
                f"{name}: shape {array.shape}; input_ids, position_ids and document_ids share one shape [B, T]"
            )
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name}: dtype {array.dtype} is not an integer")
    lowest, highest = checked[0].min(), checked[0].max()
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(f"input_ids: {lowest}..{highest} leave the vocabulary 0..{config.vocab_size - 1}")
    if checked[2].min() < -1:
        raise ValueError(f"document_ids: {checked[2].min()}; known are -1 padding, 0 anchor and 1..n documents")
    return [jnp.asarray(array) for array in checked]


def to_arrays(decoder: Decoder) -> dict[str, jax.Array]:
    """Return every parameter by its name, as stored. Works on a decoder of gradients just as well."""
    return dict(name_leaves(nnx.split(decoder)[1]))


def name_leaves(state: nnx.State) -> Iterator[tuple[str, Any]]:
    """Yield (Hugging Face name, array or shape) of every parameter, in the order of the state's leaves.

    Attributes carry the names of transformers' modules, so the path of a parameter is its name:
    `layers.0.mlp.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`; `lm_head.weight` stays as it is.
    """
    for path, leaf in jax.tree.leaves_with_path(state):
        parts = [str(getattr(key, "key", key)) for key in path if not isinstance(key, jax.tree_util.GetAttrKey)]
        yield ".".join(parts if parts[0] == "lm_head" else ["model", *parts]), leaf
