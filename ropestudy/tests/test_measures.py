"""The engine and the measures against a twin in loops, and what must be zero."""

import numpy as np
import pytest

from jaxref.rounding import preset
from jaxref.tests.decoders import tiny
from jaxref.tests.test_model import UNIT_RATIO, assert_float64_of, visible
from jaxref.weights import to_arrays
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
    """The sums of two runs in loops over layers, heads, queries and keys, in long double."""
    config = decoder.config
    p = {name: np.asarray(array).astype(np.longdouble) for name, array in to_arrays(decoder).items()}
    frequency = np.longdouble(config.rope.theta) ** (-np.arange(0, config.head_dim, 2) / np.longdouble(config.head_dim))
    L, H, K, T = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, len(documents)
    C = config.head_dim // 2

    def norm(x, name):
        eps = np.longdouble(config.rms_norm_eps)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p[name + ".weight"]

    def heads(x, name, where):
        x = (x @ p[name + ".weight"].T).reshape(T, -1, config.head_dim)
        return (x[..., :C] + 1j * x[..., C:]) * np.exp(1j * where[:, None, None] * frequency)

    def attend(x, layer, where):
        h = norm(x, layer + "input_layernorm")
        q, k = (heads(h, f"{layer}self_attn.{n}_proj", where) for n in "qk")
        probs, logits = np.zeros((2, H, T, T), np.longdouble)
        for head in range(H):
            for i in range(T):
                seen = [j for j in range(T) if visible(documents, i, j)]
                if not seen:
                    continue
                score = (q[i, head] * k[seen, head * K // H].conj()).real.sum(-1) / np.sqrt(np.longdouble(2 * C))
                exponentials = np.exp(score - score.max())
                probs[head, i, seen], logits[head, i, seen] = exponentials / exponentials.sum(), score
        v = (h @ p[layer + "self_attn.v_proj.weight"].T).reshape(T, K, -1)
        out = np.concatenate([probs[head] @ v[:, head * K // H] for head in range(H)], axis=-1)
        x = x + out @ p[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm")
        gate = h @ p[layer + "mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (h @ p[layer + "mlp.up_proj.weight"].T)
        return probs, logits, x + inner @ p[layer + "mlp.down_proj.weight"].T

    sums = {
        "column_T": np.zeros(T, np.longdouble),
        "logit_T": np.zeros(T, np.longdouble),
        "row_T": np.zeros(T, np.longdouble),
        "mass_T": np.zeros(T, np.longdouble),
    }
    xs = [p["model.embed_tokens.weight"][IDS]] * 2
    for number in range(L):
        layer = f"model.layers.{number}."
        inputs = [xs[0], xs[0]] if mode == "local" else xs
        (pa, la, xa), (pb, lb, xb) = (attend(x, layer, where) for x, where in zip(inputs, positions, strict=True))
        xs = [xa, xb]
        for head in range(H):
            for i in range(T):
                for j in range(T):
                    gap, logit_gap = abs(pa[head, i, j] - pb[head, i, j]), abs(la[head, i, j] - lb[head, i, j])
                    sums["column_T"][j] += gap
                    sums["row_T"][i] += gap
                    sums["mass_T"][j] += pa[head, i, j]
                    sums["logit_T"][j] += logit_gap
    return sums


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


def test_in_exact_arithmetic_a_shift_is_nothing():
    """D is rounding and no more: in float64 it is float32's, smaller by the ratio of their unit roundoffs."""
    decoder, shifted = tiny("llama"), np.arange(TOKENS) + np.array([[0], [16]])
    for mode in ("local", "propagated"):
        d = {}
        for name in ("exact", "fp32", "hf_eager_bf16"):
            streams, pair = [Stream(CONDITIONS[name], shifted)], [Pair((0, 0), (0, 1), mode)]
            sums = compare(decoder, Row(IDS, FULL), streams, pair)[0][0]
            d[name] = sample(sums, FULL)
        assert 0 < d["exact"].d <= 2 * d["fp32"].d * UNIT_RATIO + 2.0**-53 * sums.mass_T.sum()
        assert d["fp32"].d < d["hf_eager_bf16"].d


def test_the_modes_are_the_same_in_the_first_layer():
    decoder, shifted = tiny("llama"), np.arange(TOKENS) + np.array([[0], [16]])
    pairs = [Pair((0, 0), (0, 1), "local"), Pair((0, 0), (0, 1), "propagated")]
    (local, propagated), _ = compare(decoder, Row(IDS, FULL), [Stream(CONDITIONS["hf_eager_bf16"], shifted)], pairs)
    assert not np.array_equal(local.column_T, propagated.column_T)
    one_layer = tiny("llama", num_hidden_layers=1)
    (local, propagated), _ = compare(one_layer, Row(IDS, FULL), [Stream(CONDITIONS["hf_eager_bf16"], shifted)], pairs)
    assert np.array_equal(local.column_T, propagated.column_T)


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
