"""The judge judged: what must pass passes, what must not does not."""

import ml_dtypes
import numpy as np
import pytest

from anchorline.tolerance import UNIT_ROUNDOFF, judge, likely_error_of_mean, likely_error_of_norms
from jaxref.mask import visible_BQJ
from parity_tests.checking.cases import LAYOUTS, CheckCase, judge_array, oracle


def test_twice_the_reference_plus_one_rounding_is_the_border():
    truth, reference = np.array([4.0, 4.0]), np.array([4.5, 3.5])
    border = 2 * 0.5 + UNIT_ROUNDOFF["bfloat16"] * 4
    at = judge(truth + [border, -border], truth, reference, "bfloat16")
    assert at.passed
    assert at.ratio == 1
    beyond = judge(truth + [border, -border - 1e-12], truth, reference, "bfloat16")
    assert not beyond.passed
    assert beyond.worst == (1,)


def test_an_error_in_few_elements_counts_by_its_square():
    truth, reference = np.ones(100), np.ones(100)
    one_off = truth.copy()
    one_off[7] += 10 * UNIT_ROUNDOFF["bfloat16"]
    assert judge(one_off, truth, reference, "bfloat16").ratio == 1
    one_off[7] += 1e-12
    assert not judge(one_off, truth, reference, "bfloat16").passed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_stray_infinities_never_pass(bad):
    truth = np.array([1.0, 2.0])
    assert not judge([1.0, bad], truth, truth, "bfloat16").passed
    assert not judge([1.0, 2.0], [1.0, bad], [1.0, 2.0], "bfloat16").passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reference_that_broke_is_no_licence(bad):
    assert not judge([1.0, 2.0], [1.0, 2.0], [1.0, bad], "bfloat16").passed


def test_equal_infinities_are_equal():
    truth = np.array([-np.inf, 1.0])
    assert judge(truth, truth, truth, "float32").error == 0


@pytest.mark.parametrize(
    ("arrays", "dtype", "says"),
    [
        (([1.0], [1.0, 2.0], [1.0]), "float32", "shapes differ"),
        (([], [], []), "float32", "empty"),
        (([1.0], [1.0], [1.0]), "int8", "no unit roundoff"),
    ],
)
def test_what_cannot_be_judged_is_refused(arrays, dtype, says):
    with pytest.raises(ValueError, match=says):
        judge(*arrays, dtype)


# -- what is small and systematic, in bfloat16: the whole array cannot show it, its parts do ---------------------------

CASE = CheckCase(LAYOUTS["off_blocks_anchor"], 4, 2, 64, "bfloat16")
LAST = int(np.flatnonzero(CASE.document_ids_BT[0] > 0)[-1])


def _round(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def _attend(scale=1.0, mask=None, block=64, backwards=False):
    """Attention in float32 by blocks of keys, P rounded to bfloat16, as FlashAttention computes it."""
    q, k, v, _ = (np.asarray(x, np.float32).swapaxes(1, 2) for x in CASE.draw())
    k, v = (x.repeat(2, axis=1) for x in (k, v))
    visible = visible_BQJ(CASE.document_ids_BT) if mask is None else mask
    logits = np.where(visible[:, None], q @ k.swapaxes(2, 3) * np.float32(CASE.scale * scale), -np.inf)
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - np.where(np.isfinite(top), top, 0))
    out, total = np.zeros_like(q), np.zeros_like(top)
    starts = range(0, p.shape[-1], block)
    for at in reversed(starts) if backwards else starts:
        out += _round(p[..., at : at + block]) @ v[:, :, at : at + block]
        total += p[..., at : at + block].sum(-1, keepdims=True)
    return _round(out / np.where(total > 0, total, 1)).swapaxes(1, 2)


def _judge_out(out):
    return judge_array("out", out, oracle(CASE, "exact")["out"], oracle(CASE, "flash_bf16")["out"], "flash", "bfloat16")


def _last_token_larger():
    out = _attend()
    out[0, LAST] = _round(1.1 * out[0, LAST])
    return out


def _without_one_key():
    mask = visible_BQJ(CASE.document_ids_BT).copy()
    mask[0, LAST, LAST - 1] = False
    return _attend(mask=mask)


SMALL = {
    "softmax scale": (lambda: _attend(scale=1 + 2**-8), "scale|head|token"),
    "outputs too large": (lambda: _round(_attend() * (1 + 2**-8)), "scale"),
    "last token": (_last_token_larger, f"token {LAST} of row 0"),
    "last query without a key": (_without_one_key, f"token {LAST} of row 0"),
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_small_error_shows_in_a_part_of_the_array(kind):
    make, part = SMALL[kind]
    verdict = _judge_out(make())
    assert verdict.whole < 1
    assert not verdict.passed
    assert any(word in verdict.part.name for word in part.split("|"))


@pytest.mark.parametrize("order", [{}, {"block": 32}, {"block": 128}, {"block": 523}, {"backwards": True}])
def test_an_order_of_summation_is_no_error(order):
    assert _judge_out(_attend(**order)).ratio < 0.6


def _turn(x, positions, theta, rounded):
    angle = positions[:, None] * theta ** -(np.arange(32) / 32)
    rounding = _round if rounded else (lambda x: x)
    cos, sin = (rounding(table(angle))[:, None] for table in (np.cos, np.sin))
    a, b = x[..., :32], x[..., 32:]
    parts = ((a * cos, -b * sin), (b * cos, a * sin))
    return np.concatenate([rounding(rounding(x) + rounding(y)) for x, y in parts], axis=-1)


@pytest.mark.parametrize(
    ("tokens", "theta", "off_by_one", "part"), [(53, 1e4 * 1.01, None, "pair"), (1000, 1e4, 500, "token 500")]
)
def test_a_wrong_angle_shows(tokens, theta, off_by_one, part):
    x = _round(np.random.default_rng(0).standard_normal((2, tokens, 4, 64))).astype(np.float64)
    positions = np.arange(tokens)
    wrong = positions + (positions == off_by_one)
    truth, reference = (_turn(x, positions, 1e4, rounded) for rounded in (False, True))
    verdict = judge(_turn(x, wrong, theta, True), truth, reference, "bfloat16", "BTHD", rotated=x.shape[3])
    assert verdict.whole < 1
    assert not verdict.passed
    assert part in verdict.part.name


@pytest.mark.parametrize(
    ("dtype", "error", "part"), [("float32", 2e-5, "token 1234 of row 0"), ("float64", 2e-14, None)]
)
def test_one_token_of_many_shows_in_float32(dtype, error, part):
    """float64 is truth, and has no parts."""
    random, unit = np.random.default_rng(0), UNIT_ROUNDOFF[dtype]
    truth = random.standard_normal((1, 2048, 4, 16))
    candidate, reference = (truth * (1 + 4 * unit * random.standard_normal(truth.shape)) for _ in range(2))
    assert judge(candidate, truth, reference, dtype, "BTHD", inherits=True).passed
    candidate[0, 1234] *= 1 + error
    verdict = judge(candidate, truth, reference, dtype, "BTHD", inherits=True)
    assert verdict.whole < 1
    assert (verdict.passed, verdict.part and verdict.part.name) == (part is None, part)


def _with_row_of_another(x):
    x[5] = x[6]


def _without_row(x):
    x[5] = 0


def _without_small_head(x):
    x[:, :, 3] = 0


@pytest.mark.parametrize(
    ("shape", "axes", "change", "part"),
    [
        ((20_000, 64), "OI", _with_row_of_another, "row 5"),
        ((20_000, 64), "OI", _without_row, "row 5"),
        ((2, 500, 8, 16), "BTHD", _without_small_head, "head 3"),
    ],
    ids=["a row of the vocabulary is another's", "a row is left out", "a small head is left out"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_wrong_in_a_small_part_shows(shape, axes, change, part, dtype):
    random, unit = np.random.default_rng(0), UNIT_ROUNDOFF[dtype]
    truth = random.standard_normal(shape)
    if axes == "BTHD":
        truth[:, :, 3] *= 12 * unit
    candidate, reference = (truth + 2 * unit * random.standard_normal(shape) for _ in range(2))
    assert judge(candidate, truth, reference, dtype, axes, inherits=True).passed
    change(candidate)
    verdict = judge(candidate, truth, reference, dtype, axes, inherits=True)
    assert (verdict.passed, verdict.part and verdict.part.name) == (False, part)


def test_errors_that_earlier_layers_made_move_a_token_as_a_whole():
    """Candidate and reference err alike: a normal factor for each token, along one direction."""
    random = np.random.default_rng(0)
    truth_BTM, direction_M = random.standard_normal((1, 2000, 64)), random.standard_normal(64)
    factors_CBT1 = 0.02 * random.standard_normal((2, 1, 2000, 1))
    candidate_BTM, reference_BTM = truth_BTM + factors_CBT1 * direction_M
    alone = judge(candidate_BTM, truth_BTM, reference_BTM, "bfloat16", "BTM")
    assert not alone.passed
    assert alone.part is not None
    assert alone.part.name.startswith("token")
    assert judge(candidate_BTM, truth_BTM, reference_BTM, "bfloat16", "BTM", inherits=True).passed
    candidate_BTM[0, -1] *= 2
    assert not judge(candidate_BTM, truth_BTM, reference_BTM, "bfloat16", "BTM", inherits=True).passed


def test_the_mean_of_many_values_is_allowed_what_their_errors_say():
    """Each draw is another order of summation. The reference's own mean is often lucky, and then allows nothing."""
    random = np.random.default_rng(0)
    truth_n = random.exponential(3.0, 214)
    size = 8e-6
    alone, red, biased = 0, 0, 0
    for _ in range(500):
        candidate_n, reference_n = (truth_n + size * random.standard_normal(214) for _ in range(2))
        likely = likely_error_of_mean(truth_n, reference_n, 214)
        candidate, truth, reference = ([x.mean()] for x in (candidate_n, truth_n, reference_n))
        alone += not judge(candidate, truth, reference, "float32").passed
        red += not judge(candidate, truth, reference, "float32", likely_error=likely).passed
        biased += judge([candidate[0] + size], truth, reference, "float32", likely_error=likely).passed
    assert alone > 50
    assert red == 0
    assert biased == 0


def test_norms_of_few_steps_are_allowed_what_the_errors_of_weights_say():
    """Five steps of thirty weights. The reference's own norms are often lucky, and then allow too little."""
    random = np.random.default_rng(0)
    truth_SP = random.exponential(1.0, (5, 30))
    size = 1e-6
    alone, red, biased = 0, 0, 0
    for _ in range(500):
        candidate_SP, reference_SP = (truth_SP + size * random.standard_normal((5, 30)) for _ in range(2))
        likely = likely_error_of_norms(truth_SP, reference_SP)
        candidate, truth, reference = (np.linalg.norm(x, axis=1) for x in (candidate_SP, truth_SP, reference_SP))
        alone += not judge(candidate, truth, reference, "float32").passed
        red += not judge(candidate, truth, reference, "float32", likely_error=likely).passed
        biased += judge(candidate + 8 * size, truth, reference, "float32", likely_error=likely).passed
    assert alone > 0
    assert red == 0
    assert biased == 0
