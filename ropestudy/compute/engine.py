"""Run a decoder under several conditions at once, layer by layer, and sum how far their attentions are apart.

No array of size T x T is kept: the probabilities of all runs are computed for a block of queries, compared pair by
pair, and dropped. Positions are arguments of the compiled functions, so a shift compiles nothing. Projections,
rotation, softmax and the rest of a layer are the oracle's own functions: a rounding has the same place here and there.

Legend: S runs of a stream · R runs of a comparison · P pairs · T tokens of a row · H heads · D head_dim · M model width
· L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxref.mask import PADDING
from jaxref.model import Decoder, head_logits
from jaxref.rope import inverse_frequencies
from jaxref.rounding import Rounding
from ropestudy.compute.conditions import Condition
from ropestudy.compute.measures import DivergenceSample, Sums
from ropestudy.compute.methods import tables
from ropestudy.compute.pieces import (
    LayerSums,
    Side,
    compare_layer,
    finish_layer,
    kl,
    log_probabilities,
    losses,
    project_and_rotate,
    restrict,
)
from ropestudy.schema import Mode

HEAD_NUMBERS = 10_000_000  # logits over the vocabulary that are held at a time, of each run


@dataclass(frozen=True)
class Row:
    """One sequence, which all runs of a comparison share."""

    ids_T: np.ndarray  # int64
    documents_T: np.ndarray  # int64, the contract's document_ids
    targets_T: np.ndarray | None = None  # int64, the next token; below 0: no loss is taken. None: of none


@dataclass(frozen=True)
class Stream:
    """A condition and the position ids of its runs; run 0 gives the inputs of the mode `local`."""

    condition: Condition
    positions_ST: np.ndarray  # int64


class Run(NamedTuple):
    """A run of a comparison: the place of its stream, and its place in the stream."""

    stream: int
    number: int


@dataclass(frozen=True)
class Pair:
    """Two runs whose attentions are compared. In `local` both get the inputs of run 0 of a's stream."""

    a: Run
    b: Run
    mode: Mode


def compare(
    decoder: Decoder,
    row: Row,
    streams: Sequence[Stream],
    pairs: Sequence[Pair],
    divergences: Sequence[tuple[Run, Run]] = (),
    query_block: int = 64,
) -> tuple[list[Sums], list[DivergenceSample]]:
    """Compare the attention of pairs of runs over all layers, and the output distributions of `divergences`' pairs.

    RoPE's frequencies are those of the row's length, without the shift. The types that look at the largest position
    (`dynamic`, `longrope`) would otherwise be two functions at two shifts.

    decoder: parameters that every carrier holds exactly.
    row, streams, pairs: see the classes.
    divergences: pairs (p, q) of runs; each is a forward pass of its own.
    query_block: queries at a time; memory is R H query_block T.

    Returns the sums of each pair and KL(p || q) of each divergence, in order.
    """
    T, scale = len(row.ids_T), decoder.config.head_dim**-0.5
    inv_freq, scaling = inverse_frequencies(decoder.config.rope, T)
    ready = [tables(s.positions_ST, inv_freq, scaling, s.condition.rounding, s.condition.method) for s in streams]
    groups = _groups(pairs)
    advanced = _list_runs(len(streams), pairs, divergences)
    documents_T = jnp.asarray(row.documents_T)
    totals: list[LayerSums | None] = [None] * len(groups)
    # Indexing outside of compiled code is slow, so it is done once and not in every layer.
    own_tables = {i: ready[i].take(runs) for i, runs in advanced.items()}
    group_tables = [{i: ready[i].take(runs) for i, runs in group.runs.items()} for group in groups]
    group_places = [
        {i: jnp.asarray([advanced[i].index(run) for run in runs]) for i, runs in group.runs.items()}
        if group.source is None
        else {}
        for group in groups
    ]

    x = {}
    for i, runs in advanced.items():
        rounding = streams[i].condition.rounding
        embedded = decoder.embed_tokens(jnp.asarray(row.ids_T)[None], rounding)
        x[i] = jnp.broadcast_to(embedded, (len(runs), *embedded.shape[1:]))

    for layer in decoder.layers:
        own = {}
        for i in advanced:
            own[i] = project_and_rotate(layer, x[i], own_tables[i], streams[i].condition)
        for number, (group, table, places) in enumerate(zip(groups, group_tables, group_places, strict=True)):
            sides = []
            for i in group.runs:
                condition = streams[i].condition
                if group.source is None:
                    sides.append(Side(condition, _at(own[i].q, places[i]), _at(own[i].k, places[i])))
                else:
                    fed = project_and_rotate(
                        layer, _first(x[group.source], condition.rounding.dtype), table[i], condition
                    )
                    sides.append(Side(condition, fed.q, fed.k))
            sums, before = compare_layer(sides, documents_T, group.index_P2, scale, query_block), totals[number]
            totals[number] = sums if before is None else LayerSums(*(a + b for a, b in zip(before, sums, strict=True)))
        for i in advanced:
            x[i] = finish_layer(layer, x[i], own[i], documents_T, streams[i].condition, scale, query_block)

    hidden = {i: decoder.norm(x[i], streams[i].condition.rounding) for i in advanced} if divergences else {}
    ends = {
        Run(i, run): (hidden[i][place], restrict(streams[i].condition, ("logits",)))
        for i in hidden
        for place, run in enumerate(advanced[i])
    }
    outputs = _divergences(decoder, ends, divergences, row.documents_T, row.targets_T)
    heads = decoder.config.num_attention_heads * len(decoder.layers)
    of_pairs = {
        pair: Sums(total.column_PT[place], total.logit_PT[place], total.row_PT[place], total.mass_PT[place], heads)
        for group, total in zip(groups, totals, strict=True)
        for place, pair in enumerate(group.pairs)
        if total is not None
    }
    return [of_pairs[pair] for pair in range(len(pairs))], outputs


def final_hidden(
    decoder: Decoder,
    ids_ST: np.ndarray,
    positions_ST: np.ndarray,
    documents_T: np.ndarray,
    condition: Condition,
    query_block: int = 64,
) -> jax.Array:
    """Return the output of the final norm [S, T, M] of several rows at once, in the condition's carrier."""
    rounding, method = condition.rounding, condition.method
    scale, T = decoder.config.head_dim**-0.5, ids_ST.shape[1]
    inv_freq, scaling = inverse_frequencies(decoder.config.rope, T)
    table, documents = tables(positions_ST, inv_freq, scaling, rounding, method), jnp.asarray(documents_T)
    x = decoder.embed_tokens(jnp.asarray(ids_ST), rounding)
    for layer in decoder.layers:
        own = project_and_rotate(layer, x, table, condition)
        x = finish_layer(layer, x, own, documents, condition, scale, query_block)
    return decoder.norm(x, rounding)


def divergences_of_rows(
    decoder: Decoder, hidden: Sequence[tuple[jax.Array, Condition]], documents_T: np.ndarray, targets_ST: np.ndarray
) -> list[list[DivergenceSample]]:
    """Return the divergence of the outputs of each of `hidden` from those of the first, row by row.

    hidden: (`final_hidden` [S, T, M], its condition).
    documents_T: of the outputs that count; the others have `PADDING`.
    """
    pairs = [(Run(0, 0), Run(i, 0)) for i in range(1, len(hidden))]
    by_row = []
    for number, targets_T in enumerate(targets_ST):
        ends = {
            Run(i, 0): (x_STM[number], restrict(condition, ("logits",))) for i, (x_STM, condition) in enumerate(hidden)
        }
        by_row.append(_divergences(decoder, ends, pairs, documents_T, targets_T))
    return [list(samples) for samples in zip(*by_row, strict=True)]


@jax.jit
def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    return x[places]


@partial(jax.jit, static_argnames="dtype")
def _first(x: jax.Array, dtype: Any) -> jax.Array:
    """Return the inputs of run 0, [1, T, M], in a carrier that holds them."""
    assert jnp.promote_types(x.dtype, dtype) == dtype, "the inputs would be rounded"
    return x[:1].astype(dtype)


@dataclass
class _Group:
    """Pairs that are compared in one call: they share a mode, a source and the streams."""

    source: int | None  # stream whose run 0 feeds every run; None: each its own
    runs: dict[int, list[int]]  # stream -> runs, in the order in which they are stacked
    pairs: list[int]  # index of each pair
    index_P2: np.ndarray  # places of a and b among the runs


def _groups(pairs: Sequence[Pair]) -> list[_Group]:
    keys: dict[Any, list[int]] = {}
    for number, pair in enumerate(pairs):
        source = pair.a[0] if pair.mode == "local" else None
        keys.setdefault((source, tuple(sorted({pair.a[0], pair.b[0]}))), []).append(number)
    groups = []
    for (source, used), numbers in keys.items():
        ends = sorted({end for number in numbers for end in (pairs[number].a, pairs[number].b)})
        runs = {i: [run for stream, run in ends if stream == i] for i in used}
        index = np.array([[ends.index(pairs[number].a), ends.index(pairs[number].b)] for number in numbers])
        groups.append(_Group(source, runs, numbers, index))
    return groups


def _list_runs(streams: int, pairs: Sequence[Pair], divergences: Sequence[Any]) -> dict[int, list[int]]:
    """Return the runs of each stream that need a forward pass, run 0 first where it feeds others."""
    needed: dict[int, set[int]] = {i: set() for i in range(streams)}
    for pair in pairs:
        if pair.mode == "local":
            needed[pair.a[0]].add(0)
        else:
            for stream, run in (pair.a, pair.b):
                needed[stream].add(run)
    for ends in divergences:
        for stream, run in ends:
            needed[stream].add(run)
    return {i: sorted(runs) for i, runs in needed.items() if runs}


def _divergences(
    decoder: Decoder,
    ends: dict[Run, tuple[jax.Array, Rounding]],
    pairs: Sequence[tuple[Run, Run]],
    documents_T: np.ndarray,
    targets_T: np.ndarray | None,
) -> list[DivergenceSample]:
    """Return KL(p || q) in nats and how often the argmax differs, means over the positions that are not padding; and
    the loss of both and how often they are right, means over the targets.

    ends: the final hidden states [T, M] of each run and its rounding. A run's logits are computed once, some rows at a
        time.
    """
    totals, known = np.zeros((len(pairs), 2)), targets_T is not None and bool((targets_T >= 0).any())
    of_ends = {end: np.zeros(2) for pair in pairs for end in pair}
    used = {end for pair in pairs for end in pair}
    at_once = max(1, HEAD_NUMBERS // decoder.config.vocab_size)
    for start in range(0, len(documents_T), at_once):
        rows = slice(start, start + at_once)
        real_T = jnp.asarray(documents_T[rows] != PADDING)
        logs = {end: log_probabilities(head_logits(decoder.head, ends[end][0][rows], ends[end][1])) for end in used}
        totals += np.array([kl(logs[p], logs[q], real_T) for p, q in pairs]).reshape(totals.shape)
        if targets_T is not None and known:
            for end, total in of_ends.items():
                total += np.array(losses(logs[end], jnp.asarray(targets_T[rows])))
    count = int((documents_T != PADDING).sum())
    samples = [DivergenceSample(kl=kl / count, argmax_differs=differs / count) for kl, differs in totals]
    if targets_T is None or not known:
        return samples
    (*means,) = ([of_ends[end] / (targets_T >= 0).sum() for end in pair] for pair in pairs)
    return [
        one.model_copy(update={"nll_p": p[0], "nll_q": q[0], "right_p": p[1], "right_q": q[1]})
        for one, (p, q) in zip(samples, means, strict=True)
    ]
