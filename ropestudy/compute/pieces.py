"""The parts of a layer, compiled one by one from the oracle's own functions, and the sums over a pair of runs.

Conditions that round alike at the sites of a part share the compiled code; positions are arguments.

Legend: S runs of a stream · R runs of a comparison · P pairs · T tokens of a row · Q queries of a block · n blocks · H
query heads · K key/value heads · G = H / K · D head_dim · M model width.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxref.attention import attention, masked_logits, softmax_parts
from jaxref.mask import PADDING, visible
from jaxref.model import Layer
from jaxref.rounding import Rounding
from ropestudy.compute.conditions import Condition
from ropestudy.compute.methods import Method, Tables, rotate_heads, round_per_head

# The sites that act in each piece.
PROJECTION = ("norm", "proj")
ROTATION = ("rope_product", "rope_sum", "q_rotated", "k_rotated")
SOFTMAX = ("kv_heads", "qk", "scaled", "probs")
REST = (*SOFTMAX, "pv", "attn_out", "proj", "residual", "norm", "mlp")


class QKV(NamedTuple):
    """The inputs of attention, [S, T, heads, D] each."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Side(NamedTuple):
    """The runs of a condition in a comparison: q [S, T, H, D] and k [S, T, K, D], rotated."""

    condition: Condition
    q: jax.Array
    k: jax.Array


class LayerSums(NamedTuple):
    """`measures.Sums` of one layer, pair by pair. All float64."""

    column_PT: np.ndarray
    logit_PT: np.ndarray
    row_PT: np.ndarray
    mass_PT: np.ndarray


class _BlockSums(NamedTuple):
    """The sums that blocks of queries add to."""

    column_PT: jax.Array
    logit_PT: jax.Array
    mass_RT: jax.Array


def restrict(condition: Condition, sites: tuple[str, ...]) -> Rounding:
    """Return the condition's rounding at these sites alone."""
    order = condition.rounding.normalise if "probs" in sites else "before_pv"
    return condition.rounding.only(*sites).replace(normalise=order)


def project_and_rotate(layer: Layer, x_STM: jax.Array, table: Tables, condition: Condition) -> QKV:
    """Return q [S, T, H, D] and k [S, T, K, D] rotated, v; one input row serves all runs of the tables."""
    projected = _project(layer, x_STM, restrict(condition, PROJECTION))
    return _rotate(*projected, table, restrict(condition, ROTATION), condition.method)


@partial(jax.jit, static_argnames="rounding")
def _project(layer: Layer, x_STM: jax.Array, rounding: Rounding) -> QKV:
    q, k, v, _ = layer.self_attn.project(layer.input_layernorm(x_STM, rounding), rounding)
    return QKV(q, k, v)


@partial(jax.jit, static_argnames=("rounding", "method"))
def _rotate(
    q_STHD: jax.Array, k_STKD: jax.Array, v_STKD: jax.Array, table: Tables, rounding: Rounding, method: Method
) -> QKV:
    kv_heads, fmt, when = k_STKD.shape[2], method.per_head, method.per_head_when
    if fmt is not None and when == "before":
        q_STHD, k_STKD = (round_per_head(x, fmt, kv_heads) for x in (q_STHD, k_STKD))
    q_STHD = rotate_heads(q_STHD, table, rounding, method, "q_rotated")
    k_STKD = rotate_heads(k_STKD, table, rounding, method, "k_rotated")
    if fmt is not None:
        if when == "after":
            q_STHD, k_STKD = (round_per_head(x, fmt, kv_heads) for x in (q_STHD, k_STKD))
        v_STKD = round_per_head(v_STKD, fmt, kv_heads)
    return QKV(q_STHD, k_STKD, v_STKD)


def finish_layer(
    layer: Layer,
    x_STM: jax.Array,
    qkv: QKV,
    documents_T: jax.Array,
    condition: Condition,
    scale: float,
    query_block: int,
) -> jax.Array:
    """Return the layer's output [S, T, M] from its input and its q, k, v."""
    at_once = None if query_block >= x_STM.shape[1] else query_block
    return _finish(layer, x_STM, *qkv, documents_T, restrict(condition, REST), scale, at_once)


@partial(jax.jit, static_argnames=("rounding", "scale", "query_block"))
def _finish(
    layer: Layer,
    x_STM: jax.Array,
    q_STHD: jax.Array,
    k_STKD: jax.Array,
    v_STKD: jax.Array,
    documents_T: jax.Array,
    rounding: Rounding,
    scale: float,
    query_block: int | None,
) -> jax.Array:
    """Return the layer's output, from q, k, v: `jaxref.model.Layer` after the rotation."""
    documents_ST = jnp.broadcast_to(documents_T, (len(q_STHD), len(documents_T)))
    attn_STHD, _ = attention(q_STHD, k_STKD, v_STKD, documents_ST, rounding, scale, query_block)
    return layer.after_attention(x_STM, layer.self_attn.output(attn_STHD, rounding), rounding)[0]


def compare_layer(
    sides: list[Side], documents_T: jax.Array, index_P2: np.ndarray, scale: float, query_block: int
) -> LayerSums:
    """Return the sums of each pair in one layer. index_P2: the places of a and b among all runs of the sides."""
    queries, keys = tuple(side.q for side in sides), tuple(side.k for side in sides)
    roundings = tuple(restrict(side.condition, SOFTMAX) for side in sides)
    sums, row_PT = _sums(queries, keys, documents_T, index_P2, roundings, scale, query_block)
    return LayerSums(
        column_PT=np.asarray(sums.column_PT),
        logit_PT=np.asarray(sums.logit_PT),
        row_PT=np.asarray(row_PT),
        mass_PT=np.asarray(sums.mass_RT)[index_P2[:, 0]],
    )


def probabilities(
    q_SQKGD: jax.Array, k_STKGD: jax.Array, mask: jax.Array, rounding: Rounding, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return what multiplies V and the scaled logits, both [S, K, G, Q, T]; the logits are -inf where the mask is
    false.

    With `after_pv` the unnormalised weights are rounded, as FlashAttention-2 does, and divided by their sum: what its
    output amounts to.
    """
    logits = masked_logits(q_SQKGD, k_STKGD, mask, rounding, scale)
    exponentials, total, _ = softmax_parts(logits, mask)
    if rounding.normalise == "after_pv":
        return rounding.round("probs", exponentials) / total[..., None], logits
    return rounding.round("probs", exponentials / total[..., None]), logits


@partial(jax.jit, static_argnames=("roundings", "scale", "query_block"))
def _sums(
    queries: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    documents_T: jax.Array,
    index_P2: jax.Array,
    roundings: tuple[Rounding, ...],
    scale: float,
    query_block: int,
) -> tuple[_BlockSums, jax.Array]:
    """Return all but the sums of rows, and these, [P, T]."""
    T, query_block = len(documents_T), min(query_block, len(documents_T))
    blocks = -(-T // query_block)
    widest = jnp.result_type(*(rounding.dtype for rounding in roundings))

    def split(q_STHD: jax.Array, kv_heads: int) -> jax.Array:
        """[S, T, H, D] -> [n, S, Q, K, G, D], the last block filled with queries that see nothing."""
        S, _, H, D = q_STHD.shape
        filled = jnp.pad(q_STHD, ((0, 0), (0, blocks * query_block - T), (0, 0), (0, 0)))
        return filled.reshape(S, blocks, query_block, kv_heads, H // kv_heads, D).swapaxes(0, 1)

    def per_head(q_STHD: jax.Array, k_STKD: jax.Array, rounding: Rounding) -> jax.Array:
        shape = (*k_STKD.shape[:3], q_STHD.shape[2] // k_STKD.shape[2], k_STKD.shape[3])
        return rounding.round("kv_heads", jnp.broadcast_to(k_STKD[:, :, :, None], shape))

    copies = [per_head(*side) for side in zip(queries, keys, roundings, strict=True)]

    def one_block(carry: _BlockSums, given: Any) -> tuple[_BlockSums, jax.Array]:
        index_Q, q_blocks = given
        document_Q = jnp.where(index_Q < T, documents_T[jnp.minimum(index_Q, T - 1)], PADDING)
        mask_QT = visible(document_Q[:, None], documents_T[None], index_Q[:, None], jnp.arange(T)[None])
        all_probs, all_logits = [], []
        for q, k, rounding in zip(q_blocks, copies, roundings, strict=True):
            probs, logits = probabilities(q, k, mask_QT, rounding, scale)
            flat = (len(q), -1, query_block, T)
            all_probs.append(probs.reshape(flat).astype(widest))
            all_logits.append(jnp.where(mask_QT, logits, 0).reshape(flat).astype(widest))
        probs_RHQT, logits_RHQT = jnp.concatenate(all_probs), jnp.concatenate(all_logits)

        def one_pair(ends: jax.Array) -> tuple[jax.Array, ...]:
            d_HQT = jnp.abs(probs_RHQT[ends[0]] - probs_RHQT[ends[1]])
            d_logit_HQT = jnp.abs(logits_RHQT[ends[0]] - logits_RHQT[ends[1]])
            return d_HQT.sum(1).sum(0), d_logit_HQT.sum((0, 1)), d_HQT.sum((0, 2))

        column, logit, row = lax.map(one_pair, index_P2)
        sums = _BlockSums(column, logit, probs_RHQT.sum((1, 2)))
        added = jax.tree.map(lambda before, now: before + now.astype(jnp.float64), carry, sums)
        return added, row.astype(jnp.float64)

    P, R = len(index_P2), sum(len(q) for q in queries)
    nothing = _BlockSums(jnp.zeros((P, T)), jnp.zeros((P, T)), jnp.zeros((R, T)))
    index_nQ = jnp.arange(blocks * query_block).reshape(blocks, query_block)
    q_blocks = tuple(split(q, k.shape[2]) for q, k in zip(queries, keys, strict=True))
    sums, row_nPQ = lax.scan(one_block, nothing, (index_nQ, q_blocks))
    return sums, row_nPQ.swapaxes(0, 1).reshape(P, -1)[:, :T]


@jax.jit
def log_probabilities(logits_TV: jax.Array) -> jax.Array:
    """Return them in float64 from any carrier: KL takes the difference of two that are almost the same."""
    return jax.nn.log_softmax(logits_TV.astype(jnp.float64))


@jax.jit
def losses(log_p_TV: jax.Array, targets_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (sum of the targets' negative log-probabilities, how many targets are the argmax); targets below 0 are
    left out.
    """
    real_T = targets_T >= 0
    taken_T = jnp.take_along_axis(log_p_TV, jnp.maximum(targets_T, 0)[:, None], axis=-1)[:, 0]
    right_T = log_p_TV.argmax(-1) == targets_T
    return -jnp.where(real_T, taken_T, 0).sum(), (real_T & right_T).sum()


@jax.jit
def kl(log_p_TV: jax.Array, log_q_TV: jax.Array, real_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (sum over positions of KL(p || q) in nats, how many differ in their argmax), of log-probabilities [T, V].

    Summed as p log(p / q) - p + q, whose every term is at least 0: the plain terms cancel, and leave float64's noise of
    either sign.
    """
    p_TV, q_TV, log_ratio_TV = jnp.exp(log_p_TV), jnp.exp(log_q_TV), log_p_TV - log_q_TV
    near_TV = log_ratio_TV > -1  # elsewhere q - p loses nothing, and exp(-log_ratio) could overflow
    rest_TV = jnp.where(near_TV, p_TV * jnp.expm1(-jnp.where(near_TV, log_ratio_TV, 0)), q_TV - p_TV)
    kl_T = (p_TV * log_ratio_TV + rest_TV).sum(-1)
    return jnp.where(real_T, kl_T, 0).sum(), (real_T & (log_p_TV.argmax(-1) != log_q_TV.argmax(-1))).sum()
