"""The loss of a token, its sums, and its gradients in chunks."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from jaxref.loss import batch_nll, context_weights, domain_totals, mean_and_gradients, token_nll, totals
from jaxref.model import to_arrays
from jaxref.rounding import preset
from jaxref.storage.weights import from_arrays
from jaxref.tests.decoders import batch, tiny

pytestmark = pytest.mark.usefixtures("quickly_compiled")

EXACT = preset("exact")


def test_a_token_loses_the_negative_log_of_its_probability():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(scale=4, size=(2, 3, 7)), rng.integers(0, 7, (2, 3))
    labels[1, 1] = -100
    nll = np.asarray(token_nll(jnp.asarray(logits), labels))
    assert nll[1, 1] == 0
    for b, t in np.argwhere(labels != -100):
        with mpmath.workdps(50):
            exact = mpmath.log(sum(map(mpmath.exp, logits[b, t]))) - logits[b, t, labels[b, t]]
        # 7 exponentials, their sum (relative 14 roundings), a logarithm and two differences of numbers below twice the
        # largest.
        assert abs(nll[b, t] - float(exact)) <= 20 * 2.0**-53 * 2 * np.abs(logits[b, t]).max()


def test_huge_logits_neither_overflow_nor_cancel():
    logits = jnp.asarray([[1e300, 0.0, -1e300], [-1e300, -1e300, -1e300]])
    np.testing.assert_array_equal(token_nll(logits, np.array([0, 0])), [0.0, jnp.log(3.0)])
    gradient = jax.grad(lambda x: token_nll(x, np.array([0, -100])).sum())(logits)
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_chunks_are_the_loss_of_all_logits():
    decoder, rows = tiny("llama", tie_word_embeddings=True), batch("anchor")
    arguments = (rows["input_ids"], rows["position_ids"], rows["document_ids"], EXACT)
    whole = token_nll(decoder(*arguments), rows["shift_labels"])
    # A product of another height may sum its 12 terms in another order; a loss moves by at most twice what a logit
    # moves, and takes some 29 roundings of its own.
    size = (abs(decoder.hidden(*arguments)) @ abs(decoder.head[...].astype(jnp.float64)).T).max()
    for chunk in (1024, 5):
        chunked = batch_nll(decoder, rows, EXACT, chunk=chunk)
        np.testing.assert_array_equal(chunked == 0, rows["shift_labels"] == -100)
        assert (abs(chunked - whole) <= 2 * 2 * (12 + 29) * 2.0**-53 * size).all()


def test_the_mean_counts_tokens_and_its_gradient_is_the_slope():
    decoder, rows = tiny("qwen3", np.float64), batch("intra")
    nll_sum, count = totals(batch_nll(decoder, rows, EXACT), rows["shift_labels"])
    assert count == 4 + 3 + 2
    mean, gradients, _ = mean_and_gradients(decoder, rows, EXACT, chunk=5)
    assert float(mean) == pytest.approx(float(nll_sum) / count, rel=4 * 2.0**-53)

    arrays = to_arrays(decoder)
    assert gradients.keys() == arrays.keys()
    rng = np.random.default_rng(1)
    direction = {name: rng.normal(size=array.shape) for name, array in arrays.items()}

    def moved(step: float) -> float:
        there = {name: array + step * direction[name] for name, array in arrays.items()}
        return float(mean_and_gradients(from_arrays(decoder.config, there), rows, EXACT)[0])

    def slope(step: float) -> float:
        return (moved(step) - moved(-step)) / (2 * step)

    along = sum(float((gradients[name] * direction[name]).sum()) for name in arrays)
    # A central difference errs by c h^2: halving h leaves a third of what the two differ by.
    coarse, fine = slope(2e-4), slope(1e-4)
    assert abs(along - fine) <= abs(coarse - fine)
    assert abs(along) > 1e3 * abs(coarse - fine)


def test_shares_of_a_batch_add_up_to_the_whole():
    decoder, first, second = tiny("llama"), batch("intra"), batch("anchor")
    both = {name: np.concatenate([first[name], second[name]]) for name in first}
    mean, gradients, _ = mean_and_gradients(decoder, both, EXACT)
    count = totals(batch_nll(decoder, both, EXACT), both["shift_labels"])[1]
    shares = [mean_and_gradients(decoder, part, EXACT, count=count) for part in (first, second)]
    # Two sums of the same terms in another order: float64 roundings of 2 x 12 terms, gradients then stored in float32.
    assert float(shares[0][0] + shares[1][0]) == pytest.approx(float(mean), rel=24 * 2.0**-53)
    for name, gradient in gradients.items():
        parts = [share[1][name].astype(jnp.float64) for share in shares]
        bound = 2.0**-24 * (sum(abs(part) for part in parts) + abs(gradient)) + 1e-15 * abs(gradient).max()
        assert (abs(parts[0] + parts[1] - gradient) <= bound).all()


@pytest.mark.parametrize("weight", [0, 2])
def test_a_rows_weight_is_how_often_the_row_counts(weight):
    decoder, first, second = tiny("llama"), batch("intra"), batch("anchor")
    both = {name: np.concatenate([first[name], second[name]]) for name in first}
    often = {name: np.concatenate([first[name], *[second[name]] * weight]) for name in first}
    weights = np.ones_like(both["input_ids"]) * np.float32([[1], [weight]])
    mean, gradients, _ = mean_and_gradients(decoder, both | {"weights": weights}, EXACT)
    expected, of_often, _ = mean_and_gradients(decoder, often, EXACT)
    # Sums of the same terms in another order, as above.
    assert float(mean) == pytest.approx(float(expected), rel=36 * 2.0**-53)
    for name, gradient in gradients.items():
        bound = 2.0**-23 * abs(gradient) + 1e-15 * abs(gradient).max()
        assert (abs(gradient - of_often[name].astype(jnp.float64)) <= bound).all()


def test_weights_follow_the_tokens_that_are_seen():
    documents = np.array([[0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, -1]])
    labels = np.where(documents > 0, 5, -100)
    # Seen: 2 3 4 by the first document, 2 to 9 by the second: 2 are of 2 to 3 each, then 1 + 4, then 2.
    weights = context_weights(documents, labels, tail=2, extra=1.0, most=1.5)
    share = [11 / (3 * n) for n in (4, 5, 2)]
    expected = [1] + [1 + min(1.5, share[k]) for k in (0, 0, 1, 0, 0, 1, 1, 1, 1, 2, 2)] + [1]
    np.testing.assert_array_equal(weights, np.float32([expected]))


def test_domains_split_the_total():
    decoder, rows = tiny("llama"), batch("anchor")
    nll = np.asarray(batch_nll(decoder, rows, EXACT))
    sums, counts = domain_totals(nll, rows["shift_labels"], rows["domain_ids"], domains=3)
    np.testing.assert_array_equal(counts, [3, 3 + 2, 0])
    odd = (rows["document_ids"] % 2 == 1) & (rows["shift_labels"] != -100)
    assert float(sums[1]) == pytest.approx(math.fsum(nll[odd]), rel=5 * 2.0**-53)
    assert sums[2] == 0
    with pytest.raises(ValueError, match=r"domain_ids: 1 on a token with a label; known are 0..0"):
        domain_totals(nll, rows["shift_labels"], rows["domain_ids"], domains=1)


def test_bad_labels_are_one_clear_line():
    decoder, rows = tiny("llama"), batch("full")
    with pytest.raises(ValueError, match=r"shift_labels: 29 is neither -100 nor in the vocabulary 0\.\.28"):
        batch_nll(decoder, rows | {"shift_labels": np.full((1, 12), 29)}, EXACT)
    with pytest.raises(ValueError, match=r"shift_labels: shape \(1, 11\)"):
        batch_nll(decoder, rows | {"shift_labels": rows["shift_labels"][:, 1:]}, EXACT)
    with pytest.raises(ValueError, match=r"every label is -100"):
        mean_and_gradients(decoder, rows | {"shift_labels": np.full((1, 12), -100)}, EXACT)
