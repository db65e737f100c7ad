"""Outputs of rows together against rows alone, fp8 by head, copied keys."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxref.model import head_logits
from jaxref.rounding import preset
from jaxref.tests.decoders import tiny
from ropestudy.cells import Bench
from ropestudy.compute.conditions import DOSES, EXACT, condition, dose
from ropestudy.compute.engine import Row, Stream, compare, divergences_of_rows, final_hidden
from ropestudy.compute.methods import round_per_head
from ropestudy.compute.pieces import restrict
from ropestudy.experiments.outcomes import OutcomeCell, RowsOfText, doses
from ropestudy.models import Pretrained
from ropestudy.spec import DoseConfig, MasksConfig, Placement, StudyConfig
from ropestudy.text import NO_TARGET, Pool, copy_row, packed_row, row

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOKENS, ROWS, BOS = 8, 3, 1
RANDOM = np.random.default_rng(5)
POOL = Pool(["a", "b", "c"], [RANDOM.permutation(np.arange(2, 29))[:TOKENS] for _ in range(ROWS)])


@pytest.fixture(scope="module")
def bench() -> Bench:
    decoder = tiny("llama", num_hidden_layers=2)
    config = StudyConfig(title="by hand", masks=MasksConfig(tokens=TOKENS, documents=2), block=TOKENS)
    return Bench(config, Pretrained({}, decoder.config, decoder, Tokenizer(models.WordLevel({})), BOS, "0"), POOL)


def test_rows_together_are_rows_alone(bench):
    """A row's loss and divergence do not depend on the other rows, and are those of `compare`."""
    setting = Placement(start=40)
    cell = OutcomeCell(
        "setups", "pretrained", TOKENS, ROWS, setting, (condition("hf_eager_bf16"), condition("fa3_fp8"))
    )
    samples = bench.run(cell).divergences
    for number in range(ROWS):
        one = row(POOL, number, TOKENS, BOS)
        positions = one.positions[None] + 40
        given = Row(one.ids, one.documents, targets_T=one.targets)
        streams = [Stream(EXACT, positions), Stream(condition("hf_eager_bf16"), positions)]
        _, (alone,) = compare(bench.decoder("pretrained"), given, streams, [], [((0, 0), (1, 0))])
        together = samples[number]
        assert together.nll_p == pytest.approx(alone.nll_p, rel=2.0**-40)
        assert together.nll_q == pytest.approx(alone.nll_q, rel=2.0**-8)  # sums of another order before a bf16 rounding
        assert together.right_p == alone.right_p
    assert samples[ROWS].kl > samples[0].kl > 0  # in fp8


def test_the_loss_is_that_of_the_next_token(bench):
    decoder, rows = bench.decoder("pretrained"), RowsOfText.make(bench, TOKENS, ROWS, Placement())
    hidden = final_hidden(decoder, rows.ids, rows.positions, rows.documents_T, EXACT, TOKENS)
    (samples,) = divergences_of_rows(decoder, [(hidden, EXACT)] * 2, rows.documents_T, rows.targets)
    logits = np.asarray(decoder(rows.ids, rows.positions, np.ones_like(rows.ids), preset("exact")))
    for one, logits_TV, ids_T in zip(samples, logits, rows.ids, strict=True):
        logs = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        assert one.nll_p == pytest.approx(-np.mean([logs[t, ids_T[t + 1]] for t in range(TOKENS - 1)]), rel=1e-12)
        right = np.mean([logs[t].argmax() == ids_T[t + 1] for t in range(TOKENS - 1)])
        assert one.right_q == pytest.approx(right)
        assert one.kl == 0


@pytest.mark.parametrize("task", ["text", "copy"])
def test_of_a_row_cut_in_two_the_queries_that_see_far_keys_count(bench, task):
    """The first half's outputs are those of a row without a gap. No number of a row with a gap counts them."""
    decoder, bf16 = bench.decoder("pretrained"), condition("hf_eager_bf16")
    by_gap = {}
    for gap in (0, 50):
        rows = RowsOfText.make(bench, TOKENS, ROWS, Placement(gap=gap, task=task))
        given = (rows.ids, rows.positions, rows.documents_T)
        hidden = [(final_hidden(decoder, *given, one, TOKENS), one) for one in (EXACT, bf16)]
        ends = [
            np.stack([np.asarray(head_logits(decoder.head, row, restrict(one, ("logits",))), np.float64) for row in x])
            for x, one in hidden
        ]
        p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in ends)
        by_gap[gap] = (np.exp(p) * (p - q)).sum(-1), p, rows
    kl_ST, p_STV, rows = by_gap[50]
    half = TOKENS // 2
    np.testing.assert_allclose(kl_ST[:, :half], by_gap[0][0][:, :half], rtol=1e-12)
    assert (rows.targets[:, :half] < 0).all()
    assert (by_gap[0][2].targets[:, :half] >= 0).any() == (task == "text")
    cell = OutcomeCell("setups", "pretrained", TOKENS, ROWS, Placement(gap=50, task=task), (bf16,))
    samples = bench.run(cell).divergences
    for number in range(ROWS):
        one = samples[number]
        assert one.kl == pytest.approx(kl_ST[number, half:].mean(), rel=1e-6)
        counted = [(t, target) for t, target in enumerate(rows.targets[number]) if target >= 0]
        assert one.nll_p == pytest.approx(-np.mean([p_STV[number, t, target] for t, target in counted]), rel=1e-9)


def test_fp8_with_a_scale_a_head():
    x = RANDOM.normal(size=(2, 6, 4, 8)) * np.array([1e-4, 1.0, 1e4, 0.0])[:, None]
    rounded = np.asarray(round_per_head(jnp.asarray(x), "e4m3_sat", 2))
    for run in range(2):
        for head in range(2):
            part = x[run, :, 2 * head : 2 * head + 2]
            scale = np.abs(part).max() / 448
            expected = (part / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
            np.testing.assert_allclose(rounded[run, :, 2 * head : 2 * head + 2], expected, rtol=1e-12)
    assert not np.asarray(round_per_head(jnp.zeros((1, 2, 2, 4)), "e4m3_sat", 2)).any()


def test_a_key_is_copied():
    copied, targets = copy_row(POOL, 0, TOKENS, BOS, seed=0)
    half = TOKENS // 2
    key = copied.ids[1:half]
    assert copied.ids.tolist() == [BOS, *key, BOS, *key]
    assert len(set(key)) == len(key)
    assert targets[targets != NO_TARGET].tolist() == key[1:].tolist()
    where = np.flatnonzero(targets != NO_TARGET)
    assert (targets[where] == copied.ids[where + 1]).all()
    assert where.min() == half + 1
    assert not np.array_equal(copy_row(POOL, 1, TOKENS, BOS, seed=0)[0].ids, copied.ids)
    with pytest.raises(ValueError, match="different tokens, and a key to copy needs 99"):
        copy_row(POOL, 0, 200, BOS, seed=0)


def test_targets_end_with_their_document():
    assert row(POOL, 0, 4, BOS).targets.tolist() == [*POOL.ids[0][:3], NO_TARGET]
    packed = packed_row(POOL, 0, 7, BOS, 2, "anchor")
    ids = packed.ids
    assert packed.targets.tolist() == [NO_TARGET, ids[2], NO_TARGET, ids[4], ids[5], ids[6], NO_TARGET]


def test_doses(bench):
    section = DoseConfig(tokens=TOKENS, sequences=ROWS, mantissa_bits=[2, 23], settings=[Placement(task="copy")])
    questions = doses(section, 0)
    records = [one for asked in questions for one in asked.make_records([bench.run(cell) for cell in asked.cells])]
    assert [(one.site, one.mantissa_bits) for one in records] == [(site, bits) for site in DOSES for bits in (2, 23)]
    for coarse, fine in zip(records[::2], records[1::2], strict=True):
        assert coarse.outputs.kl.mean > 1e4 * fine.outputs.kl.mean
    assert dose("table", 7).rounding.table == "e8m7"
