"""Ring attention: the same function as attention, and what its roundings do."""

import numpy as np
import pytest

from jaxref.attention import attention
from jaxref.ring import moved, ring_attention, ring_logits, zigzag
from jaxref.rounding import preset
from jaxref.tests.decoders import batch, tiny

T, H, K, D = 48, 4, 2, 8
DOCUMENTS = np.array([[0] + [1] * 20 + [2] * 5 + [3] * 16 + [-1] * 6])


@pytest.fixture(scope="module")
def qkv():
    random = np.random.default_rng(0)
    return [random.standard_normal((1, T, heads, D)) for heads in (H, K, K)]


def test_every_rank_holds_as_many_causal_pairs():
    owner_T = zigzag(T, 3)
    assert owner_T.tolist()[::8] == [0, 1, 2, 2, 1, 0]
    pairs = [int((np.flatnonzero(owner_T == rank) + 1).sum()) for rank in range(3)]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("ranks", [0, 5, 48])
def test_tokens_that_do_not_divide(ranks):
    with pytest.raises(ValueError, match="ranks: 48 tokens do not divide"):
        zigzag(T, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 24])
@pytest.mark.parametrize("documents", [np.ones((1, T), int), DOCUMENTS], ids=["full", "anchor and padding"])
def test_in_exact_arithmetic_it_is_attention(qkv, documents, ranks):
    expected = attention(*qkv, documents, preset("exact"))
    found = ring_attention(*qkv, documents, preset("exact"), zigzag(T, ranks))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["exact", "flash_bf16", "hf_eager_bf16"])
def test_one_rank_is_attention_bitwise(qkv, name):
    rounding = preset(name)
    expected = attention(*qkv, DOCUMENTS, rounding)
    found = ring_attention(*qkv, DOCUMENTS, rounding, zigzag(T, 1))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_rounding_each_ranks_output_is_what_moves_it(qkv):
    """Without the rounding of outputs a ring differs by the carrier's noise alone; with it by bf16's."""
    rounding, owner_T = preset("flash_bf16").replace(carrier="float64"), zigzag(T, 4)
    for kept, least, most in ((rounding, 1e-4, 1e-1), (rounding.replace(attn_out=None, pv=None, probs=None), 0, 1e-13)):
        alone, ring = attention(*qkv, DOCUMENTS, kept)[0], ring_attention(*qkv, DOCUMENTS, kept, owner_T)[0]
        apart = np.abs(np.asarray(alone) - np.asarray(ring)).max()
        assert least <= apart <= most


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
    one, two, eight = moved(decoder, ids_T, [1, 2, 8], preset("flash_bf16"))
    assert (one.largest, one.mean, one.argmax_differs) == (0, 0, 0)
    assert two.largest > two.mean > 0
    assert eight.largest > 0
    assert one.error > 0
    exact = next(moved(decoder, ids_T, [8], preset("exact")))
    assert exact.largest < 1e-12
