"""What the sides of `parity compare` must be, for a verdict to say something."""

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.tests.dumps import Arrays, B, M, T, judged, judged_ranks, rounded, run, write


def _at(x: np.ndarray, value: float) -> np.ndarray:
    return np.where(np.arange(x.size).reshape(x.shape) == 5, value, x).astype(x.dtype)


_OTHER, _MASK = np.arange(B * T).reshape(B, T), np.where(np.tri(8), 0, -1e9)


@pytest.mark.parametrize(
    ("role", "name", "change", "says"),
    [
        ("reference", "inputs.input_ids", lambda x: _OTHER, "reference: inputs.input_ids is not the truth's"),
        ("reference", "layers.0.q", lambda x: _at(x, np.nan), "reference: layers.0.q is NaN at [0, 0, 0, 5], 1 of"),
        ("reference", "layers.0.q", lambda x: _at(x, np.inf), "reference: layers.0.q is infinite at [0, 0, 0, 5]"),
        ("truth", "layers.1.mlp", lambda x: _at(x, np.nan), "truth: layers.1.mlp is NaN at [0, 0, 5], 1 of"),
        ("reference", None, lambda x: x.astype(ml_dtypes.float8_e5m2), "all its arrays are coarser than the"),
        ("all", None, lambda x: x[:0], "no array holds a number"),
    ],
)
def test_a_side_that_can_judge_nothing_is_refused(sides, tmp_path, role, name, change, says):
    _, truth, candidate = sides
    dumps = {"truth": truth, "reference": {n: rounded(x, 1) for n, x in truth.items()}, "candidate": candidate}
    for which, arrays in dumps.items():
        floats = [n for n, x in arrays.items() if x.dtype.kind not in "ib" and n != "mask"]
        names = () if role not in (which, "all") else [name] if name else floats
        changed = arrays | {n: change(arrays[n]) for n in names}
        dumps[which] = {n: changed[n] for n in floats} if role == "all" else changed
        write(tmp_path / f"{which}.safetensors", dumps[which])
    done = run(tmp_path, dumps["candidate"])
    assert (done.exit_code, says in done.stderr) == (2, True), done.output


def _three(names: Iterable[str], *shape: int) -> tuple[Arrays, Arrays, Arrays]:
    """Candidate, truth and reference of a right engine."""
    random = np.random.default_rng(0)
    truth = {name: random.standard_normal(shape) for name in names}
    noisy = [{n: rounded(x, seed) for n, x in truth.items()} for seed in (2, 1)]
    return noisy[0], truth, noisy[1]


def test_a_reference_that_is_another_computation_is_refused(tmp_path):
    candidate, truth, reference = _three(["h"], B, T, M)
    other = np.random.default_rng(1).standard_normal((B, T, M)).astype(ml_dtypes.bfloat16)
    done = judged(tmp_path, {"h": -candidate["h"]}, truth, reference | {"h": other})
    assert (done.exit_code, "another computation (from 50% on, a limit that we set)" in done.stderr) == (2, True), (
        done.output
    )


def test_what_the_reference_lacks_is_no_difference(tmp_path):
    candidate, truth, reference = _three(["h", "logits"], B, T, M)
    del reference["logits"]
    done = judged(tmp_path, candidate, truth, reference)
    assert (done.exit_code, "reference: lacks logits, which the other" in done.stderr) == (2, True), done.output
    assert judged(tmp_path, candidate, truth, reference, "--only", "h").exit_code == 0


def test_inputs_are_compared_where_they_are_left_out(tmp_path):
    candidate, truth, reference = _three(["logits"], B, T, M)
    ids = {"inputs.input_ids": _OTHER}
    other = {"inputs.input_ids": _OTHER[::-1]}
    done = judged(tmp_path, candidate | ids, truth | ids, reference | other, "--only", "logits")
    assert (done.exit_code, "reference: inputs.input_ids is not the truth's" in done.stderr) == (2, True), done.output


def test_inputs_that_are_masks_may_have_other_numbers_for_what_is_not_seen(tmp_path):
    candidate, truth, reference = _three(["h"], B, T, M)
    masks = [np.where(np.tri(T, dtype=bool), 0, low) for low in (-np.inf, np.finfo(np.float64).min, -3.3e38)]
    own = zip((candidate, truth, reference), masks, strict=True)
    dumps = [dump | {"inputs.attention_mask": mask} for dump, mask in own]
    dumps = [{n: x.astype(np.float32) if n != "h" and i != 1 else x for n, x in d.items()} for i, d in enumerate(dumps)]
    assert judged(tmp_path, *dumps).exit_code == 0


def test_what_is_0_in_theory_frees_no_other_array(tmp_path):
    """The gradient of k's bias is rounding in all three."""
    names = [f"gradients.model.layers.{i}.self_attn.k_proj.bias" for i in range(2)] + ["gradients.model.norm.weight"]
    candidate, truth, reference = _three(names, M)
    scaled = ((candidate, 1e-4), (truth, 1e-17), (reference, 1e-4))
    dumps = [dump | {n: dump[n] * np.asarray(by, dump[n].dtype) for n in names[:2]} for dump, by in scaled]
    more, wrong = _three(["gradients.model.layers.0.self_attn.q_proj.weight"], M, M), -5 * dumps[0][names[2]]
    dumps = [dump | one for dump, one in zip(dumps, more, strict=True)]
    assert judged(tmp_path, *dumps).exit_code == 0
    assert judged(tmp_path, dumps[0] | {names[2]: wrong.astype(ml_dtypes.bfloat16)}, *dumps[1:]).exit_code == 1


def test_a_number_in_float32_does_not_hide_a_coarse_reference(tmp_path):
    _, truth, reference = _three(["h"], B, T, M)
    loss = {"loss": np.array([2.0], np.float32)}
    fine = {"h": rounded(truth["h"], 2).astype(np.float32) * np.float32(1 + 2**-20)}
    done = judged(tmp_path, fine | loss, truth | {"loss": np.array([2.0])}, reference | loss)
    assert (done.exit_code, "coarser than the candidate's" in done.stderr) == (2, True), done.output


@pytest.mark.parametrize("axes", ["TM", "MT"])
def test_axes_reach_ranks_and_the_worst_place_is_that_of_the_array(tmp_path, axes):
    tall = [np.random.default_rng(rank).standard_normal((400, M)) for rank in range(2)]
    wrong = np.where(np.arange(400) == 100, 1.1, 1.0)[:, None]
    truth, candidate = ([x * by if axes == "TM" else (x * by).T for x in tall] for by in (1.0, wrong))
    ranks = ([rounded(x, 2) for x in candidate], truth, [rounded(x, 1) for x in truth])
    done = judged_ranks(tmp_path, *([{"h": x} for x in side] for side in ranks), "--axes", f"h={axes}")
    assert (done.exit_code, "token 100 of row 0 errs" in done.stdout) == (1, True), done.output
    assert "100" in done.stdout.partition("worst at ")[2].partition(":")[0]


def test_a_lucky_loss_of_replicated_ranks_is_no_fault(tmp_path):
    losses = (np.array([3.0006], np.float32), np.array([3.0]), np.array([3.0], np.float32))
    sides = zip(_three(["logits"], B, T, M), losses, strict=True)
    done = judged_ranks(tmp_path, *([dump | {"loss": loss}] * 2 for dump, loss in sides))
    assert done.exit_code == 0, done.output
    assert "loss [rank 0] is a mean over tokens: the loss of one token may err by their number times" in done.stdout


def test_a_map_that_leaves_nothing_computed_is_refused(tmp_path):
    candidate, truth, reference = _three(["model.layers.0.mlp"], B, T, M)
    (tmp_path / "map.yaml").write_text("names: {inputs.input_ids: tokens}\n")
    mine = {"tokens": _OTHER, "blocks.0.mlp": -candidate["model.layers.0.mlp"]}
    rest = {"inputs.input_ids": _OTHER}
    done = judged(tmp_path, mine, truth | rest, reference | rest, "--names", str(tmp_path / "map.yaml"))
    assert (done.exit_code, "nothing that was computed is compared" in done.stderr) == (2, True), done.output


def test_right_code_is_not_failed_by_a_finer_reference(tmp_path):
    x = np.random.default_rng(0).standard_normal((B, T, M))
    write(tmp_path / "truth.safetensors", {"a": x})
    write(tmp_path / "reference.safetensors", {"a": x.astype(np.float32)})
    done = run(tmp_path, {"a": rounded(x * (1 + 2.0**-7), 2)})
    assert (done.exit_code, "its arrays are finer than the candidate's" in done.stderr) == (2, True), done.output


def test_a_file_is_not_its_own_reference(sides, tmp_path):
    _, truth, candidate = sides
    for name, arrays in (("reference", candidate), ("truth", truth)):
        write(tmp_path / f"{name}.safetensors", arrays)
    path = write(tmp_path / "candidate.safetensors", candidate)
    for reference in (path, tmp_path / "truth.safetensors"):
        given = [str(path), "--truth", str(tmp_path / "truth.safetensors"), "--reference", str(reference)]
        done = CliRunner().invoke(cli.app, ["compare", *given])
        assert (done.exit_code, "give another run" in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    ("of_truth", "of_candidate", "says"),
    [
        (np.array([-23456.7]), np.array([-99999.0]), "times the allowance"),
        (np.full((1, 8, 8), -2e4), np.full((1, 8, 8), -6e4), "times the allowance"),
        (_MASK, np.where(np.tri(8), 5.0, -1e9), "36 of 64 entries differ"),
        (_MASK, np.where(np.eye(8), np.nan, _MASK), "8 of 64 entries differ"),
        (_MASK, np.where(np.tri(8, k=-1), 0, -1e9), "8 of 64 entries differ"),
        (_MASK, np.where(np.tri(8), 0, -np.inf), None),
    ],
)
def test_a_mask_is_two_numbers_and_large_ones_are_judged(tmp_path, of_truth, of_candidate, says):
    x = np.random.default_rng(0).standard_normal((1, 8, 64))
    for role, own in (("truth", of_truth), ("reference", of_truth.astype(np.float32))):
        write(tmp_path / f"{role}.safetensors", {"a": rounded(x, 1, np.float32) if role != "truth" else x, "mask": own})
    done = run(tmp_path, {"a": rounded(x, 2, np.float32), "mask": of_candidate.astype(np.float32)})
    assert (done.exit_code, says is None or says in done.stdout) == (int(says is not None), True), done.output


@pytest.mark.parametrize(("candidate", "truth", "reference"), [(1, 2, 2), (2, 2, 1), (2, 1, 3), (3, 2, 2)])
def test_ranks_that_one_side_lacks_are_missed(tmp_path, candidate, truth, reference):
    x = np.random.default_rng(0).standard_normal((1, 8, 64))
    whole = [{"a": x + rank} for rank in range(3)]
    noisy = [[{"a": rounded(rank["a"], seed)} for rank in whole] for seed in (2, 1)]
    done = judged_ranks(tmp_path, noisy[0][:candidate], whole[:truth], noisy[1][:reference])
    assert (done.exit_code, " ranks" in done.stderr) == (2, True), done.output


@pytest.mark.parametrize("error", [1e-11, 1e-5])
def test_what_is_0_in_truth_may_err_as_its_kind_does(sides, tmp_path, error):
    """The gradient of k where every token sees itself alone: 0 by cancelling, or nearly."""
    _, truth, candidate = sides
    name = "gradients.layers.0.k.weight"
    reference = {n: rounded(x, 1) for n, x in truth.items()}
    for role, arrays in (("truth", truth), ("reference", reference)):
        write(tmp_path / f"{role}.safetensors", arrays | {name: np.zeros((M, M), arrays["loss"].dtype)})
    done = run(tmp_path, candidate | {name: np.full((M, M), error, ml_dtypes.bfloat16)})
    assert done.exit_code == int(error > 1e-6), done.output
