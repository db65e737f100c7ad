"""Ring attention emulated: how far a row's logits move when its keys go round a ring of ranks.

Every rank holds a part of the row. Keys and values pass from rank to rank; at each step a rank attends to those it
holds, and merges that output into what it has through the log-sum-exps. So a row's roundings are others than those of
one process: each step's output is stored in the kernel's format before it is merged, and its probabilities are rounded
relative to the step's own maximum. Ulysses has none of that: there every head sees the whole row. Merging is in the
carrier (float32 in ring-flash-attention), and the result is rounded once more.

The paper's table (appendix, arXiv 2411.13476) has 0.75 for zigzag ring attention and 0 for Ulysses: largest difference
of logits from one process.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · G query heads per key/value head · D head_dim
· M model width · V vocabulary · R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anchorline.errors import UserError
from jaxref.attention import attend_under
from jaxref.mask import visible
from jaxref.model import Decoder, Layer
from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rounding import Rounding, preset


def zigzag(tokens: int, ranks: int) -> np.ndarray:
    """Return the rank of each token, int64 [T]: the row is cut into 2 R chunks, and rank r holds the r-th and the r-th
    from the end.

    So each has as many pairs of a causal mask as any other (`zigzag_ring_flash_attn`,
    github.com/zhuzilin/ring-flash-attention).
    Raises UserError unless 2 R divides T.
    """
    if ranks < 1:
        raise UserError(f"ranks: {ranks}; give 1 or more")
    if tokens % (2 * ranks):
        raise UserError(
            f"ranks: {tokens} tokens do not divide into twice {ranks} chunks; give a multiple of {2 * ranks}"
        )
    chunk_T = np.arange(tokens) // (tokens // (2 * ranks))
    return np.minimum(chunk_T, 2 * ranks - 1 - chunk_T)


def ring_attention(
    q_BTHD: Any, k_BTKD: Any, v_BTKD: Any, document_ids_BT: Any, rounding: Rounding, owner_T: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Compute `jaxref.attention.attention` by a ring of ranks.

    Args:
        q_BTHD, k_BTKD, v_BTKD, document_ids_BT, rounding: as there.
        owner_T: rank of each token (`zigzag`); a rank attends to its own keys first, then to those of the rank before
            it, and so on.

    Returns:
        out [B, T, H, D] and log-sum-exp [B, H, T], both in the carrier. On one rank they are `attention`'s own.
    """
    q, k, v = (jnp.asarray(x).astype(rounding.dtype) for x in (q_BTHD, k_BTKD, v_BTKD))
    document_BT, owner = jnp.asarray(document_ids_BT), jnp.asarray(owner_T)
    B, T, H, D = q.shape
    K, ranks = k.shape[2], int(owner_T.max()) + 1
    q_BTKGD = q.reshape(B, T, K, H // K, D)
    k_BTKGD, v_BTKGD = (rounding.round("kv_heads", jnp.broadcast_to(x[:, :, :, None], q_BTKGD.shape)) for x in (k, v))
    index_T = jnp.arange(T)
    seen_BTT = visible(document_BT[:, :, None], document_BT[:, None, :], index_T[None, :, None], index_T[None, None, :])

    def attend(step: int) -> tuple[jax.Array, jax.Array]:
        here_TT = owner[None, :] == (owner[:, None] - step) % ranks
        mask = (seen_BTT & here_TT)[:, None, None]
        return attend_under(mask, q_BTKGD, k_BTKGD, v_BTKGD, rounding, D**-0.5)

    out, lse = attend(0)
    for step in range(1, ranks):
        out, lse = _merge(out, lse, *attend(step))
    out = rounding.round("attn_out", out)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D), lse.reshape(B, H, T)


def _merge(out: jax.Array, lse: jax.Array, part: jax.Array, part_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two outputs over different keys as one over all of them: out [B, K, G, T, D], lse [B, K, G, T]."""
    both = jnp.logaddexp(lse, part_lse)
    finite = jnp.where(jnp.isfinite(both), both, 0.0)  # a query that has seen nothing yet keeps 0 and -inf
    share, part_share = jnp.exp(lse - finite), jnp.exp(part_lse - finite)
    return share[..., None] * out + part_share[..., None] * part, both


def ring_logits(
    decoder: Decoder, ids_BT: Any, positions_BT: Any, documents_BT: Any, rounding: Rounding, owner_T: np.ndarray
) -> jax.Array:
    """Return the decoder's logits [B, T, V] with `ring_attention` in every layer; arguments as `Decoder.__call__`.

    Raises UserError: a decoder with windows, a soft cap or sinks.
    """
    decoder.config.check_plain()
    positions = np.asarray(positions_BT)
    inv_freq, scaling = inverse_frequencies(decoder.config.rope, int(positions.max()) + 1)
    table = cos_sin(positions, inv_freq, scaling, rounding)
    x_BTM = decoder.embed_tokens(jnp.asarray(ids_BT), rounding)
    for layer in decoder.layers:
        x_BTM = _layer(layer, x_BTM, *table, jnp.asarray(documents_BT), rounding, tuple(owner_T.tolist()))
    return decoder.logits(decoder.norm(x_BTM, rounding), rounding)


@partial(jax.jit, static_argnames=("rounding", "owners"))
def _layer(
    layer: Layer,
    x_BTM: jax.Array,
    cos_BTC: jax.Array,
    sin_BTC: jax.Array,
    documents_BT: jax.Array,
    rounding: Rounding,
    owners: tuple[int, ...],
) -> jax.Array:
    q, k, v, _ = layer.self_attn.project(layer.input_layernorm(x_BTM, rounding), rounding)
    q = rotate(q, cos_BTC, sin_BTC, rounding, "q_rotated")
    k = rotate(k, cos_BTC, sin_BTC, rounding, "k_rotated")
    out, _ = ring_attention(q, k, v, documents_BT, rounding, np.array(owners))
    return layer.after_attention(x_BTM, layer.self_attn.output(out, rounding), rounding)[0]


@dataclass(frozen=True)
class RingDifference:
    """How a row's logits differ from those of one process, and how far they are from float64.

    Differences are of single logits.
    """

    ranks: int
    largest: float
    mean: float
    argmax_differs: float  # share of the positions
    error: float  # root mean square of the distance from float64


def compare_ring(decoder: Decoder, ids_T: np.ndarray, ranks: list[int], rounding: Rounding) -> Iterator[RingDifference]:
    """Yield, for each number of ranks, what a zigzag ring does to the logits of one document [T], positions from 0.

    Raises UserError: see `zigzag`, before anything is computed.
    """
    owners = [zigzag(len(ids_T), count) for count in ranks]
    row = (ids_T[None], np.arange(len(ids_T))[None], np.ones((1, len(ids_T)), np.int64))
    truth_TV = np.asarray(decoder(*row, preset("exact")))[0]
    alone_TV = np.asarray(decoder(*row, rounding), np.float64)[0]
    for count, owner_T in zip(ranks, owners, strict=True):
        ring_TV = np.asarray(ring_logits(decoder, *row, rounding, owner_T), np.float64)[0]
        apart_TV = np.abs(ring_TV - alone_TV)
        yield RingDifference(
            ranks=count,
            largest=float(apart_TV.max()),
            mean=float(apart_TV.mean()),
            argmax_differs=float((ring_TV.argmax(-1) != alone_TV.argmax(-1)).mean()),
            error=float(np.sqrt(np.mean((ring_TV - truth_TV) ** 2))),
        )
