"""`parity compare`: padding, axes in other orders, names of other engines, and what little a dump may say."""

import numpy as np
import pytest

from parity_tests.report.names import layer_and_tap
from parity_tests.tests.dumps import Arrays, B, H, M, T, judged, rounded, run, write
from parity_tests.tests.test_compare_hints import layer

IDS = {"inputs.input_ids": np.arange(B * T).reshape(B, T)}


def three(truth: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """Candidate, truth and reference of a right engine."""
    noisy = [{n: rounded(x, seed) for n, x in truth.items()} for seed in (2, 1)]
    return noisy[0] | IDS, truth | IDS, noisy[1] | IDS


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize("mark", ["attention_mask", "document_ids"])
@pytest.mark.parametrize("order", ["BTHD", "BHTD", "TBHD"])
@pytest.mark.parametrize("held", [0.0, np.nan, 7.0])
def test_padding_is_not_judged(tmp_path, mark, order, held):
    padding_BT = np.arange(T) < np.array([[0], [3]])
    inputs = {f"inputs.{mark}": np.where(padding_BT, 0 if mark == "attention_mask" else -1, 1)}
    by = tuple("BTHD".index(letter) for letter in order)
    sides = three({"h": normal(B, T, M), "layers.0.q": normal(B, T, H, 8), "loss.tokens": normal(B, T)})
    for side, value in zip(sides, (1.0, held, held), strict=True):
        for name in side.keys() - IDS.keys():
            side[name][padding_BT] = value
        side |= inputs | {"layers.0.q": side["layers.0.q"].transpose(by)}
    done = judged(tmp_path, *sides)
    assert (
        done.exit_code,
        f"3 of {B * T} tokens, which the inputs mark as padding, are not judged" in done.stdout,
    ) == (0, True), done
    candidate, right, reference = sides
    wrong = candidate["layers.0.q"].copy()
    wrong[(slice(None), 1, 4) if order == "BHTD" else (4, 1) if order == "TBHD" else (1, 4)] = 0
    done = judged(tmp_path, candidate | {"layers.0.q": wrong}, right, reference)
    assert (done.exit_code, "token 4" in done.stdout) == (1, True), done.stdout


def test_a_mask_of_all_tokens_marks_no_padding(tmp_path):
    hidden = {"inputs.attention_mask": np.zeros((B, T), int)}
    candidate, truth, reference = (a | hidden for a in three({"h": normal(B, T, M)}))
    assert judged(tmp_path, candidate | {"h": -candidate["h"]}, truth, reference).exit_code == 1


@pytest.mark.parametrize("order", ["BTHD", "BHTD", "TBHD"])
def test_a_scale_is_named_whatever_the_order_of_the_axes(tmp_path, order):
    by = tuple("BTHD".index(letter) for letter in order)
    right, wrong = ({n: x.transpose(by) for n, x in layer(scale).items()} for scale in (0.25, 0.3))
    _, truth, reference = three(right)
    done = judged(tmp_path, three(wrong)[0], truth, reference)
    assert (done.exit_code, "1.2 times what is right" in done.stdout) == (1, True), done.stdout
    # Without inputs nothing tells which axes they are.
    bare = [
        {n: x for n, x in side.items() if n not in IDS and not n.endswith("_rope")}
        for side in (three(wrong)[0], truth, reference)
    ]
    for side in bare:
        side["layers.0.k"] = side["layers.0.k"].take([0, 1], order.index("H"))
    assert judged(tmp_path, *bare).exit_code == 1


def test_packed_rows_have_tokens(tmp_path):
    candidate, truth, reference = three({"layers.0.q": normal(B * T, H, 8)})
    candidate["layers.0.q"][5] = 0
    assert "token 5" in judged(tmp_path, candidate, truth, reference).stdout


@pytest.mark.parametrize("name", ["block3/q", "blk.3.q", "blk3/q", "decoder/layers_3/q", "transformer.h.3.q", "h3.q"])
def test_layers_of_other_engines_are_read(name):
    assert layer_and_tap(name) == (3, "q")


@pytest.mark.parametrize("names", [("L0_x", "L1_x"), ("block0/attn_out", "block0/heads"), ("h.0.q", "summary")])
def test_a_guessed_order_is_said(tmp_path, names):
    candidate, truth, reference = three({name: normal(B, T, M) for name in (*names, "block1/heads")})
    done = judged(tmp_path, candidate | {name: -candidate[name] for name in names}, truth, reference)
    assert f"the order is guessed: it may start elsewhere ({names[1]}); give --order, or `order` in" in done.stdout
    done = judged(tmp_path, candidate | {names[1]: -candidate[names[1]]}, truth, reference)
    assert "is guessed" not in done.stdout  # what passes is not where it starts


def test_a_reference_of_another_precision_is_refused_though_an_array_is_exact(tmp_path):
    truth = {"embed": rounded(normal(B, T, M), 0).astype(np.float64), "layers.0.q": normal(B, T, H, 8)}
    fine = {n: x.astype(np.float32) for n, x in truth.items()} | IDS
    coarse = {n: (rounded(x, 1) if n != "embed" else x).astype(np.float32) for n, x in truth.items()} | IDS
    done = judged(tmp_path, fine, truth | IDS, coarse)
    assert (done.exit_code, "all its arrays are coarser" in done.stderr) == (2, True), done.output


def test_half_precision_stored_wide_has_its_own_floor(tmp_path):
    candidate, truth, _ = three({"h": normal(B, T, M)})
    wide = candidate | {"h": candidate["h"].astype(np.float32)}
    write(tmp_path / "truth.safetensors", truth)
    for one in (candidate, wide):
        assert run(tmp_path, one, reference=False).exit_code == 0


def test_few_numbers_and_none_are_said(tmp_path):
    candidate, truth, reference = three({"loss.tokens": normal(1, 3)})
    done = judged(tmp_path, candidate | {"loss.tokens": -candidate["loss.tokens"]}, truth, reference)
    assert "it has 3 numbers: too few to tell rounding from a mistake" in done.stdout
    done = judged(tmp_path, IDS, IDS, IDS)
    assert (done.exit_code, "nothing that was computed is compared" in done.stdout) == (0, True)


@pytest.mark.parametrize("now", ["neighbours", "halves"])
def test_the_pairs_of_the_last_axis_are_named(tmp_path, now):
    candidate, truth, reference = three({"layers.0.q": normal(B, T, H, 8)})
    halves = np.stack(np.split(candidate["layers.0.q"], 2, axis=-1), axis=-1).reshape(B, T, H, 8)
    pairs = np.concatenate([candidate["layers.0.q"][..., n::2] for n in (0, 1)], axis=-1)
    wrong = {"layers.0.q": halves if now == "neighbours" else pairs}
    assert f"the last axis has {now} as pairs" in judged(tmp_path, candidate | wrong, truth, reference).stdout
