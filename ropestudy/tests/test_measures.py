"""The engine and the measures against a twin in loops, and what must be zero."""

import numpy as np
import pytest

from jaxref.rounding import preset
from jaxref.tests.decoders import assert_float64_of, tiny
from jaxref.tests.test_model import numpy_layer, numpy_parameters, visible
from ropestudy.compute.conditions import CONDITIONS
from ropestudy.compute.engine import Pair, Row, Stream, compare
from ropestudy.compute.measures import Sums, queries_of_columns, sample, weights

TOKENS = 7
IDS = np.random.default_rng(2).permutation(29)[:TOKENS]
FULL = np.ones(TOKENS, np.int64)
ANCHOR = np.array([0, 1, 1, 2, 2, 2, -1])
# Not a shift of one another, so that every measure is far from zero without a rounding.
POSITIONS = np.stack([np.arange(TOKENS), 3 * np.arange(TOKENS) + 5])


def twin(decoder, documents, positions, mode) -> dict[str, np.ndarray]:
    """The sums of two runs from a model in loops, in long double."""
    config, p = decoder.config, numpy_parameters(decoder)
    xs = [p["model.embed_tokens.weight"][IDS]] * 2
    sums = {name: np.zeros(len(documents), np.longdouble) for name in ("column_T", "logit_T", "row_T", "mass_T")}
    for number in range(config.num_hidden_layers):
        inputs = [xs[0], xs[0]] if mode == "local" else xs
        (a, probs_a, logits_a), (b, probs_b, logits_b) = (
            numpy_layer(config, p, number, x, where, documents) for x, where in zip(inputs, positions, strict=True)
        )
        xs = [a, b]
        apart = np.abs(probs_a - probs_b)
        sums["column_T"] += apart.sum((0, 1))
        sums["row_T"] += apart.sum((0, 2))
        sums["mass_T"] += probs_a.sum((0, 1))
        sums["logit_T"] += np.abs(logits_a - logits_b).sum((0, 1))
    return sums


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mode", ["local", "propagated"])
@pytest.mark.parametrize(("family", "documents"), [("llama", FULL), ("mistral", ANCHOR)], ids=["full", "anchor"])
def test_the_sums_are_the_ones_in_loops(mode, family, documents):
    """However many queries a block has: that changes the order of sums alone."""
    decoder, pair = tiny(family), [Pair((0, 0), (0, 1), mode)]
    truth = twin(decoder, documents, POSITIONS, mode)
    assert all(np.abs(value).max() > 0 for value in truth.values())

    def joined(name: str, query_block: int) -> np.ndarray:
        """Each in units of its own size: alone some have too few elements for their largest errors to be compared."""
        streams = [Stream(CONDITIONS[name], POSITIONS)]
        sums = compare(decoder, Row(IDS, documents), streams, pair, query_block=query_block)[0][0]
        return np.concatenate([np.ravel(getattr(sums, of) / np.abs(value).max()) for of, value in truth.items()])

    expected = np.concatenate([np.ravel(value / np.abs(value).max()) for value in truth.values()])
    for query_block in (1, 3, TOKENS + 1) if family == "llama" else (3,):
        assert_float64_of(joined("exact", query_block), joined("fp32", query_block), expected)


def test_divergences():
    """KL in loops over the vocabulary, from the decoder's own logits."""
    decoder, documents = tiny("llama"), ANCHOR
    rounding = preset("hf_eager_bf16")
    streams = [Stream(CONDITIONS["exact"], POSITIONS[:1]), Stream(CONDITIONS["hf_eager_bf16"], POSITIONS[:1])]
    ends = ((0, 0), (1, 0))
    _, (got,) = compare(decoder, Row(IDS, documents), streams, [], [ends])
    kl, differs, real = 0.0, 0, documents >= 0
    logits = [
        np.asarray(decoder(IDS[None], POSITIONS[:1], documents[None], r)[0]).astype(np.longdouble)
        for r in (preset("exact"), rounding)
    ]
    logs = [x - x.max(-1, keepdims=True) for x in logits]
    logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logs]
    for t in np.flatnonzero(real):
        kl += float((np.exp(logs[0][t]) * (logs[0][t] - logs[1][t])).sum())
        differs += logits[0][t].argmax() != logits[1][t].argmax()
    # A log-probability is made by two subtractions, each rounded once: four on both sides, in a mean of weights that
    # sum to one.
    largest = float(max(np.abs(x).max() for x in logs))
    assert abs(got.kl - kl / real.sum()) <= 4 * 2.0**-53 * largest
    assert got.argmax_differs == differs / real.sum()
    _, (same,) = compare(decoder, Row(IDS, documents), streams, [], [(ends[1], ends[1])])
    assert (same.kl, same.argmax_differs) == (0, 0)


def test_n_is_one_over_the_queries_that_see_a_column():
    assert weights(FULL).tolist() == [1 / (TOKENS - j) for j in range(TOKENS)]
    for documents in (FULL, ANCHOR, np.array([0, 0, 1, 1, 2, 2, -1]), np.array([1, 1, 2, 2, 2, 3, 3])):
        count = [sum(visible(documents, i, j) for i in range(TOKENS)) for j in range(TOKENS)]
        assert queries_of_columns(documents).tolist() == count
        assert weights(documents).tolist() == [1 / n if n else 0 for n in count]


def test_a_sample_of_sums_written_out():
    sums = Sums(
        column_T=np.array([3.0, 1.0, 2.0]),
        logit_T=np.array([6.0, 4.0, 2.0]),
        row_T=np.array([0.0, 2.0, 4.0]),
        mass_T=np.array([4.0, 1.0, 1.0]),
        heads=4,
    )
    got = sample(sums, np.ones(3, np.int64))
    assert got.d == 3 / 3 + 1 / 2 + 2
    assert got.first_share == 1 / 3.5
    assert got.first_mass_unweighted == 4 / 6
    assert (got.d_logit_first, got.d_logit_rest) == (2.0, (4 / 2 + 2) / 2)
    assert got.row == 6 / (3 * 4)
