"""Ring attention: the same function as attention, and what its roundings do."""

import numpy as np
import pytest

from jaxref.attention import attention
from jaxref.rounding import preset
from jaxref.tests.decoders import batch, tiny
from ropestudy.compute.ring import compare_ring, ring_attention, ring_logits, zigzag

pytestmark = pytest.mark.usefixtures("quickly_compiled")

T, H, K, D = 48, 4, 2, 8
DOCUMENTS = np.array([[0] + [1] * 20 + [2] * 5 + [3] * 16 + [-1] * 6])


def noise(x) -> float:
    """Of sums of T terms as large as the largest of x in float64."""
    return T * 2.0**-52 * float(np.abs(np.asarray(x)).max())


@pytest.fixture(scope="module")
def qkv():
    random = np.random.default_rng(0)
    return [random.standard_normal((1, T, heads, D)) for heads in (H, K, K)]


def test_every_rank_holds_as_many_causal_pairs():
    owner_T = zigzag(T, 3)
    assert owner_T.tolist()[::8] == [0, 1, 2, 2, 1, 0]
    pairs = [int((np.flatnonzero(owner_T == rank) + 1).sum()) for rank in range(3)]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize(
    ("ranks", "told"), [(0, "ranks: 0; give 1 or more"), *((n, "ranks: 48 tokens do not divide") for n in (5, 48))]
)
def test_tokens_that_do_not_divide(ranks, told):
    with pytest.raises(ValueError, match=told):
        zigzag(T, ranks)


@pytest.mark.parametrize("ranks", [2, 24])
@pytest.mark.parametrize("documents", [np.ones((1, T), int), DOCUMENTS], ids=["full", "anchor and padding"])
def test_in_exact_arithmetic_it_is_attention(qkv, documents, ranks):
    expected = attention(*qkv, documents, preset("exact"))
    found = ring_attention(*qkv, documents, preset("exact"), zigzag(T, ranks))
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert np.array_equal(np.isinf(mine), np.isinf(theirs))
        seen = np.isfinite(theirs)
        assert np.abs(mine[seen] - theirs[seen]).max() <= noise(theirs[seen])


@pytest.mark.parametrize("name", ["flash_bf16", "hf_eager_bf16"])
def test_one_rank_is_attention_bitwise(qkv, name):
    rounding = preset(name)
    expected = attention(*qkv, DOCUMENTS, rounding)
    found = ring_attention(*qkv, DOCUMENTS, rounding, zigzag(T, 1))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_rounding_each_steps_output_moves_it(qkv):
    """In one arm nothing of the softmax is rounded; in the other the outputs alone are: once by one process, and by
    each step.
    """
    nothing = preset("flash_bf16").replace(carrier="float64", probs=None, attn_out=None)
    outputs, steps = nothing.replace(attn_out="bf16"), 4
    apart = []
    for rounding in (nothing, outputs):
        alone, _ = attention(*qkv, DOCUMENTS, rounding)
        ring, _ = ring_attention(*qkv, DOCUMENTS, rounding, zigzag(T, steps))
        apart.append(np.abs(np.asarray(alone) - np.asarray(ring)).max())
    largest = np.abs(np.asarray(alone)).max()
    assert apart[0] <= noise(largest) < apart[1]
    # Outputs are means of values. A mean of the steps' roundings, the rounding of the whole and that of one process:
    # 2^-8 each.
    assert apart[1] <= 3 * 2.0**-8 * np.abs(qkv[2]).max()


def test_a_decoder_with_one_rank_is_the_decoder_bitwise():
    decoder, made = tiny("llama"), batch("anchor")
    row = (made["input_ids"], made["position_ids"], made["document_ids"])
    tokens = row[0].shape[1]
    expected = decoder(*row, preset("flash_bf16"))
    owner_T = np.zeros(tokens, np.int64)
    assert np.array_equal(ring_logits(decoder, *row, preset("flash_bf16"), owner_T), expected)


def test_what_a_ring_does_to_logits():
    decoder = tiny("llama")
    ids_T = np.random.default_rng(0).integers(0, decoder.config.vocab_size, 64)
    one, two, eight = compare_ring(decoder, ids_T, [1, 2, 8], preset("flash_bf16"))
    assert (one.largest, one.mean, one.argmax_differs) == (0, 0, 0)
    assert two.largest > two.mean > 0
    assert eight.largest > 0
    assert one.error > 0
    exact = next(compare_ring(decoder, ids_T, [8], preset("exact")))
    logits = decoder(ids_T[None], np.arange(64)[None], np.ones((1, 64), np.int64), preset("exact"))
    assert exact.largest <= noise(logits)
