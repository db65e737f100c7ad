"""The next-token loss: one number per token, then sums. Logits only ever exist for a chunk of tokens.

Legend: B batch · T tokens of a row · M model width · V vocabulary · N the tokens of all rows · S domains.

`token_nll` is the loss and `mean_and_gradients` what a trainer steps with. A first reader may skip `domain_totals`, the
same sums domain by domain.

A batch is a dict of int arrays [B, T]: `input_ids`, `position_ids`, `document_ids`, `shift_labels` (and `domain_ids`).
A mean is a sum over counted tokens divided by the counted tokens of the WHOLE batch, over all rows and ranks: a mean of
means weighs a short row's tokens more. With `weights` [B, T] in the batch it is the sum of each loss times its weight,
divided by the weights of all counted tokens.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxref.mask import visible_BQJ
from jaxref.model import Decoder, head_logits, to_arrays
from jaxref.rounding import Rounding

IGNORED = -100  # the label of a token that predicts nothing; torch's `ignore_index`


def token_nll(logits: jax.Array, shift_labels: Any) -> jax.Array:
    """Return -log softmax(logits)[label]: [..., V] and int [...] -> [...] in the logits' dtype; exactly 0 where the
    label is -100.

    The maximum is subtracted before anything else, so large logits neither overflow nor cancel (torch does the same). A
    label is the token that follows: already shifted.
    """
    labels = jnp.asarray(shift_labels)
    counted = labels != IGNORED
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.where(counted, -jnp.take_along_axis(log_probs, jnp.where(counted, labels, 0)[..., None], -1)[..., 0], 0)


def batch_nll(
    decoder: Decoder, batch: Mapping[str, Any], rounding: Rounding, query_block: int | None = None, chunk: int = 1024
) -> jax.Array:
    """Return the loss of every token of a batch: [B, T] in the carrier, 0 where ignored. `chunk`: tokens whose logits
    exist at a time.

    Raises ValueError as `Decoder.hidden` does, and for a label that is neither -100 nor in the vocabulary.
    """
    labels_BT, vocabulary = np.asarray(batch["shift_labels"]), decoder.config.vocab_size
    if labels_BT.shape != np.shape(batch["input_ids"]):
        raise ValueError(
            f"shift_labels: shape {labels_BT.shape} is not that of input_ids {np.shape(batch['input_ids'])}"
        )
    wrong_BT = (labels_BT != IGNORED) & ((labels_BT < 0) | (labels_BT >= vocabulary))
    if wrong_BT.any():
        raise ValueError(
            f"shift_labels: {labels_BT[wrong_BT][0]} is neither -100 nor in the vocabulary 0..{vocabulary - 1}"
        )
    hidden_BTM = decoder.hidden(batch["input_ids"], batch["position_ids"], batch["document_ids"], rounding, query_block)
    hidden_NM, labels_N = hidden_BTM.reshape(-1, hidden_BTM.shape[-1]), labels_BT.reshape(-1)
    nll_N = [
        _chunk_nll(
            *(decoder.head, hidden_NM[start : start + chunk], labels_N[start : start + chunk], rounding),
            **decoder.head_rule,
        )
        for start in range(0, labels_N.size, chunk)
    ]
    return jnp.concatenate(nll_N).reshape(labels_BT.shape)


def totals(nll_BT: jax.Array, shift_labels_BT: Any) -> tuple[jax.Array, int]:
    """Return (sum of the losses, number of counted tokens). Their quotient is the mean."""
    return nll_BT.sum(), int((np.asarray(shift_labels_BT) != IGNORED).sum())


def total_weight(batch: Mapping[str, Any]) -> float:
    """Return what the counted tokens of a batch weigh together: their number where it has no `weights`."""
    counted_BT = np.asarray(batch["shift_labels"]) != IGNORED
    return float(np.where(counted_BT, batch.get("weights", 1), 0).sum(dtype=np.float64))


def context_weights(document_ids_BT: Any, shift_labels_BT: Any, tail: int, extra: float, most: float) -> np.ndarray:
    """Return a weight for each token, float32 [B, T], by how many tokens it sees.

    Below `tail` it is 1. From there on, octave by octave, it is 1 + min(most, extra x N / (K x n)): n of the N counted
    tokens of the tail are in this octave, and K octaves have any. Source: EXACT, arXiv 2605.10544.
    """
    seen_BT = np.stack([visible_BQJ(np.asarray(row)[None])[0].sum(1) for row in document_ids_BT])
    octave_BT = np.array([[next(k for k in range(64) if n < tail << k) for n in row] for row in seen_BT.tolist()])
    counted_BT = (np.asarray(shift_labels_BT) != IGNORED) & (octave_BT > 0)
    found = [(counted_BT & (octave_BT == k)).sum() for k in range(octave_BT.max() + 1)]
    octaves = sum(n > 0 for n in found)
    by_octave = [1 + (most if not n else min(most, extra * sum(found) / (octaves * n))) for n in found]
    return np.where(octave_BT == 0, 1, np.array(by_octave)[octave_BT]).astype(np.float32)


def domain_totals(
    nll_BT: jax.Array, shift_labels_BT: Any, domain_ids_BT: Any, domains: int
) -> tuple[jax.Array, np.ndarray]:
    """Return (sums [S], counted tokens [S]) of domains 0..S-1. Raises ValueError: a counted token has no domain."""
    counted_BT, domain_ids_BT = np.asarray(shift_labels_BT) != IGNORED, np.asarray(domain_ids_BT)
    homeless_BT = counted_BT & ((domain_ids_BT < 0) | (domain_ids_BT >= domains))
    if homeless_BT.any():
        raise ValueError(
            f"domain_ids: {domain_ids_BT[homeless_BT][0]} on a token with a label; known are 0..{domains - 1}"
        )
    member_SBT = counted_BT & (domain_ids_BT == np.arange(domains)[:, None, None])
    return jnp.where(member_SBT, nll_BT, 0).sum((1, 2)), member_SBT.sum((1, 2))


def mean_and_gradients(
    decoder: Decoder,
    batch: Mapping[str, Any],
    rounding: Rounding,
    query_block: int | None = None,
    chunk: int = 1024,
    count: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Return (sum of the losses / `count`, its gradient by parameter name, each in the dtype its parameter is stored
    in, the loss of every token [B, T] of the same pass).

    `count`: `total_weight` of the global batch, where this batch is one share of it (None: this batch is all). The sum
    is divided before it is differentiated, as a trainer does it.
    Raises ValueError as `batch_nll` does, and for a batch in which no token is counted.
    """
    counted = total_weight(batch) if count is None else count
    if not counted:
        raise ValueError("shift_labels: every label is -100, so the batch has no loss")

    def mean(decoder: Decoder) -> tuple[jax.Array, jax.Array]:
        nll_BT = batch_nll(decoder, batch, rounding, query_block, chunk)
        weighted_BT = nll_BT * batch["weights"].astype(nll_BT.dtype) if "weights" in batch else nll_BT
        return weighted_BT.sum() / counted, nll_BT

    (value, nll_BT), gradients = jax.value_and_grad(mean, has_aux=True)(decoder)
    return value, to_arrays(gradients), nll_BT


@partial(jax.jit, static_argnames=("rounding", "divisor", "cap"))
def _chunk_nll(
    head: nnx.Param, hidden_NM: jax.Array, labels_N: jax.Array, rounding: Rounding, bias: Any, **rule: Any
) -> jax.Array:
    # Recomputed in the backward pass, so that a chunk's logits are never kept.
    @jax.checkpoint
    def run(head: nnx.Param, hidden_NM: jax.Array, bias: Any) -> jax.Array:
        return token_nll(head_logits(head, hidden_NM, rounding, bias, **rule), labels_N)

    return run(head, hidden_NM, bias)
