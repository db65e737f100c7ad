"""`parity compare`: dumps made by hand, so that each fault is known."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.comparing.compare import compare
from parity_tests.comparing.dumps import Array, Dump, open_dump
from parity_tests.comparing.judging import Rule
from parity_tests.report.schema import read_report

B, T, H, D, M, LAYERS = 2, 48, 4, 16, 64, 3
Arrays = dict[str, np.ndarray]


def write(path: Path, arrays: Arrays, **metadata: str) -> Path:
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path, metadata or None)
    return path


def rounded(x: np.ndarray, seed: int, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    """What a correct engine of half precision gives: a few independent roundings, then one."""
    if x.dtype.kind in "ib" or x.max() <= 0:
        return x
    noise = np.random.default_rng(seed).standard_normal(x.shape) * 2.0**-9 * np.sqrt(np.mean(np.square(x)))
    return (x + noise).astype(np.float32).astype(dtype)


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    random = np.random.default_rng(0)
    truth: Arrays = {"inputs.input_ids": random.integers(0, 97, (B, T)), "embed": random.standard_normal((B, T, M))}
    before = truth["embed"]
    for i in range(LAYERS):
        heads = {name: random.standard_normal((B, T, H, D)) for name in ("q", "k", "v", "attn")}
        out, mlp = random.standard_normal((2, B, T, M))
        truth |= {f"layers.{i}.{name}": x for name, x in heads.items()}
        truth |= {f"layers.{i}.attn_out": out, f"layers.{i}.attn_residual": before + out, f"layers.{i}.mlp": mlp}
        before = before + out + mlp
        truth[f"layers.{i}.residual"] = before
    truth["mask"] = np.where(np.tri(T, dtype=bool), 0.0, np.finfo(np.float32).min)[None, None]
    truth["logits"] = random.standard_normal((B, T, 97))
    truth["loss"] = np.array([4.5])
    for i in range(LAYERS):
        truth[f"gradients.layers.{i}.norm.weight"] = random.standard_normal(M) * 1e-3
        truth[f"gradients.layers.{i}.mlp.weight"] = random.standard_normal((M, M)) * 1e-3
    folder = tmp_path_factory.mktemp("dumps")
    write(folder / "truth.safetensors", truth)
    write(folder / "reference.safetensors", {name: rounded(x, 1) for name, x in truth.items()})
    candidate = {name: rounded(x, 2) for name, x in truth.items()}
    candidate["mask"] = np.where(truth["mask"] < 0, -1e9, 0).astype(np.float32)
    candidate["inputs.input_ids"] = truth["inputs.input_ids"].astype(np.int32)
    return folder, truth, candidate


def run(folder: Path, candidate: Arrays, *options: str, reference: bool = True):
    write(folder / "candidate.safetensors", candidate)
    given = ["compare", str(folder / "candidate.safetensors"), "--truth", str(folder / "truth.safetensors")]
    given += ["--reference", str(folder / "reference.safetensors")] if reference else []
    return CliRunner().invoke(cli.app, [*given, *options])


def test_a_correct_dump_is_the_same_and_leaves_a_report(sides, tmp_path):
    folder, truth, candidate = sides
    done = run(folder, candidate, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert f"SAME: {len(truth)} arrays within their allowance" in done.stdout
    report = read_report(tmp_path / "report.json")
    assert report.passed
    assert [m.name for m in report.cases[0].measures][:3] == ["inputs.input_ids", "embed", "layers.0.q"]
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.html", "junit.xml", "badge.json"}


Change = Callable[[np.ndarray], np.ndarray]
FAULTS: list[tuple[str, Change, str]] = [
    ("layers.1.q", lambda x: x * 1.5, "layer 1, q before RoPE (layers.1.q): "),
    ("layers.1.q", lambda x: x * 1.5, "everything is 1.5 times what it should be"),
    ("layers.1.mlp", np.zeros_like, "it is all zeros"),
    ("layers.0.attn", lambda x: x[:, :, ::-1], "heads are in the opposite order"),
    ("layers.0.attn", lambda x: x.reshape(B, T, 2, 2, D).swapaxes(2, 3).reshape(x.shape), "in another order"),
    ("layers.2.k", lambda x: np.roll(x, D // 2, 3), "the two halves of the last axis are exchanged"),
    ("layers.2.k", lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], 3), "neighbours as pairs"),
    ("embed", lambda x: np.concatenate([x[:, :1], x[:, :-1]], 1), "the token before it"),
    ("layers.1.mlp", lambda x: x * np.linspace(0.5, 1.5, M), "each channel has a factor of its own"),
    ("layers.1.mlp", lambda x: x * np.linspace(0.5, 1.5, T)[:, None], "each token has a factor of its own"),
    ("layers.1.attn_out", lambda x: x + np.linspace(-0.5, 0.5, M), "each channel has a summand of its own"),
    ("gradients.layers.1.mlp.weight", lambda x: x.T, "rows and columns are exchanged"),
    ("inputs.input_ids", lambda x: np.roll(x, 1, 1), "they are one token too late"),
    ("mask", lambda x: np.where(np.tri(T, k=-1), 0, -1e9)[None, None].astype(np.float32), "48 of 2304 entries differ"),
    ("layers.1.q", lambda x: np.where(np.arange(D) == 3, np.nan, x), "layers.1.q is NaN at [0, 0, 0, 3]"),
    ("layers.1.k", lambda x: x[:, 1:], "layers.1.k has shape [2, 47, 4, 16] in the candidate, not [2, 48, 4, 16]"),
    ("layers.1.v", lambda x: x + (np.arange(T) == 7)[:, None, None], "at token 7"),
    ("loss", lambda x: x * 1.05, "mean loss (loss): "),
    ("gradients.layers.2.norm.weight", lambda x: x * 1.05, "gradient of norm.weight"),
]


@pytest.mark.parametrize(("name", "change", "says"), FAULTS, ids=[f"{n}-{s[:24]}" for n, _, s in FAULTS])
def test_a_fault_is_found_at_its_name_and_said(sides, name, change, says):
    folder, _, candidate = sides
    x = candidate[name]
    wrong = change(x if x.dtype.kind in "ib" else x.astype(np.float32)).astype(x.dtype)
    done = run(folder, candidate | {name: wrong})
    assert done.exit_code == 1, done.output
    assert says in done.stdout, done.stdout
    assert "after it 0 of" in done.stdout or "has shape" in says or "NaN" in says


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        ("layers.1.attn_residual", "layers.1.attn_out", "it is layers.1.attn_out and nothing else; the residual is"),
        ("layers.1.v", "layers.1.k", "it is layers.1.k and nothing else"),
        ("layers.0.residual", "layers.0.attn_residual", "layers.0.mlp is left out"),
    ],
)
def test_another_array_in_its_place_is_named(sides, name, other, says):
    folder, _, candidate = sides
    done = run(folder, candidate | {name: candidate[other]})
    assert done.exit_code == 1
    assert says in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["inputs.position_ids", "inputs.document_ids"])
@pytest.mark.parametrize(
    "array", [np.zeros((3, B, T), int), np.arange(T), np.array(3), np.ones((B, T)), np.ones((B, 5), int)]
)
def test_ids_of_another_shape_leave_the_verdict(sides, tmp_path, name, array):
    _, truth, candidate = sides
    wrong = {"layers.0.attn": candidate["layers.0.attn"][::-1], "layers.0.q_rope": -candidate["layers.0.q"]}
    reference = {n: rounded(x, 1) for n, x in truth.items()}
    more = {"layers.0.q_rope": truth["layers.0.q"], name: array}
    done = judged(tmp_path, candidate | more | wrong, truth | more, reference | more)
    assert (done.exit_code, "DIFFERENT: layer 0" in done.stdout) == (1, True), done.output


def test_what_is_handed_on_is_told_from_what_starts_there(sides):
    folder, _, candidate = sides
    worse = dict(candidate)
    for layer, factor in enumerate((1.0025, 1.003, 1.006)):
        x = candidate[f"layers.{layer}.residual"]
        worse[f"layers.{layer}.residual"] = (x.astype(np.float32) * factor).astype(x.dtype)
    done = run(folder, worse, "--only", "layers.*.residual")
    assert "it comes from before: layers.0.residual before it errs" in done.stdout, done.stdout
    assert "from layer to layer its relative error grows by a factor of" in done.stdout
    alone = run(folder, candidate | {"layers.1.q": (candidate["layers.1.q"].astype(float) * 2).astype("bfloat16")})
    assert "it starts here: " in alone.stdout
    assert "passed before it: 10 arrays, inputs.input_ids to layers.0.residual" in alone.stdout


def test_without_a_reference_the_verdict_says_so(sides):
    folder, _, candidate = sides
    right = run(folder, candidate, reference=False)
    assert (right.exit_code, "WITHIN THE NOISE FLOOR" in right.stdout) == (0, True), right.output
    assert "noise floor only, not a proof" in right.stdout
    wrong = run(folder, candidate | {"embed": np.zeros_like(candidate["embed"])}, reference=False)
    assert (wrong.exit_code, "BEYOND THE NOISE FLOOR" in wrong.stdout) == (1, True)
    finer = run(folder, candidate, "--operations", "1", "--dtype", "float16", reference=False)
    assert finer.exit_code == 1


def test_without_a_truth_a_difference_is_called_a_difference(sides):
    folder, _, candidate = sides
    one, other = (str(folder / f"{name}.safetensors") for name in ("one", "reference"))
    write(Path(one), candidate)
    done = CliRunner().invoke(cli.app, ["compare", one, "--against", other])
    assert done.exit_code == 1
    assert "A DIFFERENCE, not judged: " in done.stdout
    assert "DIFFERENT:" not in done.stdout
    same = CliRunner().invoke(cli.app, ["compare", one, "--against", one])
    assert (same.exit_code, "IDENTICAL: " in same.stdout) == (0, True)


def test_missing_and_extra_names_are_findings(sides):
    folder, _, candidate = sides
    changed = {name: x for name, x in candidate.items() if name != "logits"} | {"aux": candidate["logits"]}
    done = run(folder, changed)
    assert (done.exit_code, "the candidate lacks logits; the candidate alone has aux" in done.stdout) == (1, True)
    assert run(folder, changed, "--only", "layers.*").exit_code == 0


def test_ci_reads_the_verdict(sides, tmp_path):
    folder, _, candidate = sides
    wrong = candidate | {"layers.1.q": (candidate["layers.1.q"].astype(np.float32) * 2).astype("bfloat16")}
    done = run(folder, wrong, "--out", str(tmp_path), "--format", "github")
    assert "::error title=parity candidate::layer 1, q before RoPE" in done.stdout
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.get("failures") == "1"
    page = (tmp_path / "report.html").read_text()
    assert "it starts here" in page and "Error over the layers" in page  # noqa: PT018


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["no.safetensors", "--truth", "T"], "no such file"),
        (["T/..", "--truth", "T", "--only", "nothing"], "no name is in both dumps"),
        (["broken", "--truth", "T"], "not safetensors, or damaged (its header does not fit"),
        (["cut", "--truth", "T"], "an array reaches beyond its bytes"),
        (["T"], "give --truth, with --reference if you have one; or --against alone"),
        (["T", "--truth", "T", "--against", "T"], "give --truth"),
        (["T", "--truth", "T"], "--truth: its arrays are float64, no finer than the candidate's, which are float64"),
        (["T", "--truth", "T", "--dtype", "fp7"], "--dtype fp7: unknown; choose from float64"),
        (["T", "--truth", "T", "--axes", "BTHD"], "--axes BTHD: write a pattern of names and letters"),
        (["T", "--truth", "T", "--names", "mine"], "--names mine: no such file, and none of the maps "),
        (["T", "--truth", "T", "--order", "none"], "its order or config cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(sides, tmp_path, monkeypatch, options, says):
    folder, truth, _ = sides
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").write_bytes(b"\xff" * 64)
    (tmp_path / "cut").write_bytes((folder / "truth.safetensors").read_bytes()[:-8])
    write(tmp_path / "T", truth)
    done = CliRunner().invoke(cli.app, ["compare", *options])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert says in line or options[0] == "T/.."


def _at(x: np.ndarray, value: float) -> np.ndarray:
    return np.where(np.arange(x.size).reshape(x.shape) == 5, value, x).astype(x.dtype)


_OTHER = np.arange(B * T).reshape(B, T)


@pytest.mark.parametrize(
    ("role", "name", "change", "says"),
    [
        ("reference", "inputs.input_ids", lambda x: _OTHER, "reference: inputs.input_ids is not the truth's"),
        ("reference", "layers.0.q", lambda x: _at(x, np.nan), "reference: layers.0.q is NaN at [0, 0, 0, 5], 1 of"),
        ("reference", "layers.0.q", lambda x: _at(x, np.inf), "reference: layers.0.q is infinite at [0, 0, 0, 5]"),
        ("truth", "layers.1.mlp", lambda x: _at(x, np.nan), "truth: layers.1.mlp is NaN at [0, 0, 5], 1 of"),
        (
            "reference",
            None,
            lambda x: x.astype(ml_dtypes.float8_e5m2),
            "all its arrays are coarser than the candidate",
        ),
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


def judged(folder: Path, candidate: Arrays, truth: Arrays, reference: Arrays, *options: str):
    for role, arrays in (("truth", truth), ("reference", reference)):
        write(folder / f"{role}.safetensors", arrays)
    return run(folder, candidate, *options)


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
    assert (done.exit_code, "that is no rounding but another computation" in done.stderr) == (2, True), done.output


def test_what_the_reference_lacks_is_no_difference(tmp_path):
    candidate, truth, reference = _three(["h", "logits"], B, T, M)
    del reference["logits"]
    done = judged(tmp_path, candidate, truth, reference)
    assert (done.exit_code, "reference: lacks logits, which the other sides have" in done.stderr) == (2, True), (
        done.output
    )
    assert judged(tmp_path, candidate, truth, reference, "--only", "h").exit_code == 0


def test_inputs_are_compared_where_they_are_left_out(tmp_path):
    candidate, truth, reference = _three(["logits"], B, T, M)
    ids = {"inputs.input_ids": _OTHER}
    done = judged(
        tmp_path, candidate | ids, truth | ids, reference | {"inputs.input_ids": _OTHER[::-1]}, "--only", "logits"
    )
    assert (done.exit_code, "reference: inputs.input_ids is not the truth's" in done.stderr) == (2, True), done.output


def test_inputs_that_are_masks_may_have_other_numbers_for_what_is_not_seen(tmp_path):
    candidate, truth, reference = _three(["h"], B, T, M)
    masks = [np.where(np.tri(T, dtype=bool), 0, low) for low in (-np.inf, np.finfo(np.float64).min, -3.3e38)]
    dumps = [
        dump | {"inputs.attention_mask": mask} for dump, mask in zip((candidate, truth, reference), masks, strict=True)
    ]
    dumps = [{n: x.astype(np.float32) if n != "h" and i != 1 else x for n, x in d.items()} for i, d in enumerate(dumps)]
    assert judged(tmp_path, *dumps).exit_code == 0


def test_what_is_0_in_theory_frees_no_other_array(tmp_path):
    """The gradient of k's bias is rounding in all three."""
    names = [f"gradients.model.layers.{i}.self_attn.k_proj.bias" for i in range(2)] + ["gradients.model.norm.weight"]
    candidate, truth, reference = _three(names, M)
    dumps = [
        dump | {n: dump[n] * np.asarray(by, dump[n].dtype) for n in names[:2]}
        for dump, by in ((candidate, 1e-4), (truth, 1e-17), (reference, 1e-4))
    ]
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
    for role, seed in (("candidate", 2), ("truth", None), ("reference", 1)):
        (tmp_path / role).mkdir()
        for rank in range(2):
            x = np.random.default_rng(rank).standard_normal((400, M))
            x = x if axes == "TM" else x.T
            y = x if seed is None else rounded(x, seed)
            if role == "candidate":
                y = y.copy()
                at = (100, slice(None)) if axes == "TM" else (slice(None), 100)
                y[at] = (y[at].astype(np.float32) * 1.1).astype(y.dtype)
            write(tmp_path / role / f"rank{rank}.safetensors", {"h": y})
    given = [str(tmp_path / role) for role in ("candidate", "truth", "reference")]
    options = ["--truth", given[1], "--reference", given[2], "--axes", f"h={axes}"]
    done = CliRunner().invoke(cli.app, ["compare", given[0], *options])
    assert (done.exit_code, "token 100 of row 0 errs" in done.stdout) == (1, True), done.output
    assert "100" in done.stdout.partition("worst at ")[2].partition(":")[0]


def test_a_lucky_loss_of_replicated_ranks_is_no_fault(tmp_path):
    candidate, truth, reference = _three(["logits"], B, T, M)
    losses = (3.0006, 3.0, 3.0)
    for role, dump, loss in zip(
        ("candidate", "truth", "reference"), (candidate, truth, reference), losses, strict=True
    ):
        (tmp_path / role).mkdir()
        for rank in range(2):
            one = np.array([loss], np.float64 if role == "truth" else np.float32)
            write(tmp_path / role / f"rank{rank}.safetensors", dump | {"loss": one})
    given = [str(tmp_path / role) for role in ("candidate", "truth", "reference")]
    done = CliRunner().invoke(cli.app, ["compare", given[0], "--truth", given[1], "--reference", given[2]])
    assert done.exit_code == 0, done.output


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
        (np.where(np.tri(8), 0, -1e9), np.where(np.tri(8), 5.0, -1e9), "36 of 64 entries differ"),
        (
            np.where(np.tri(8), 0, -1e9),
            np.where(np.eye(8), np.nan, np.where(np.tri(8), 0, -1e9)),
            "8 of 64 entries differ",
        ),
        (np.where(np.tri(8), 0, -1e9), np.where(np.tri(8, k=-1), 0, -1e9), "8 of 64 entries differ"),
        (np.where(np.tri(8), 0, -1e9), np.where(np.tri(8), 0, -np.inf), None),
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
    for role, ranks in (("candidate", candidate), ("truth", truth), ("reference", reference)):
        (tmp_path / role).mkdir()
        for rank in range(ranks):
            array = x + rank if role == "truth" else rounded(x + rank, len(role))
            write(tmp_path / role / f"rank{rank}.safetensors", {"a": array})
    given = [str(tmp_path / role) for role in ("candidate", "truth", "reference")]
    done = CliRunner().invoke(cli.app, ["compare", given[0], "--truth", given[1], "--reference", given[2]])
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


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("widened", [False, True])
def test_half_precision_is_judged_as_what_its_values_are(tmp_path, dtype, widened):
    random = np.random.default_rng(0)
    truth = {"layers.0.mlp": random.standard_normal((B, T, M))}
    wide = np.float32 if widened and "float8" not in str(np.dtype(dtype)) else dtype
    sides = [{n: x.astype(np.float32).astype(dtype).astype(wide) for n, x in truth.items()} for _ in range(2)]
    write(tmp_path / "truth.safetensors", truth)
    write(tmp_path / "reference.safetensors", sides[1])
    done = run(tmp_path, sides[0])
    assert done.exit_code == 0, done.output
    alone = {n: x.astype(np.float32) for n, x in truth.items()}
    write(tmp_path / "reference.safetensors", alone)
    # A reference in float32 allows no half precision.
    assert run(tmp_path, sides[0]).exit_code == int(wide == np.float32)
    write(tmp_path / "reference.safetensors", sides[1])
    far = {n: (x.astype(np.float32) * 1.5).astype(wide) for n, x in sides[0].items()}
    assert run(tmp_path, far).exit_code == 1


def test_the_order_is_that_of_the_computation(tmp_path):
    by_name = ["model.embed_tokens", "layers.9.q", "layers.9.mlp", "layers.10.q", "logits"]
    by_name += [f"gradients.{n}.weight" for n in ("lm_head", "layers.10.mlp", "layers.9.mlp", "model.embed_tokens")]
    names = sorted(by_name)
    arrays = {name: np.zeros(2) for name in names}
    path = write(tmp_path / "a.safetensors", arrays)
    assert list(open_dump(path).arrays) == by_name
    assert list(open_dump(write(path, arrays, order=json.dumps(names))).arrays) == names
    (tmp_path / "order.txt").write_text("\n".join(names[::-1]))
    assert list(open_dump(path, tmp_path / "order.txt").arrays) == names[::-1]


@pytest.mark.sweep
def test_memory_is_that_of_a_block_and_not_of_the_array(tmp_path):
    """Files with a hole, read by a process of its own: twice 64 MiB and once 128."""
    count = 2**25
    for side, (code, size) in {"a": ("BF16", 2), "b": ("F32", 4), "c": ("BF16", 2)}.items():
        array = {"dtype": code, "shape": [1, count // 64, 64], "data_offsets": [0, count * size]}
        text = json.dumps({"layers.0.mlp": array}).encode()
        with (tmp_path / side).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + count * size)
    code = """if True:
        import atexit, sys, tracemalloc
        from parity_tests.cli import app
        tracemalloc.start()
        atexit.register(lambda: print(tracemalloc.get_traced_memory()[1] >> 20))
        app(sys.argv[1:])"""
    arguments = ["compare", str(tmp_path / "a"), "--truth", str(tmp_path / "b"), "--reference", str(tmp_path / "c")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert "SAME" in done.stdout, done.stderr
    assert int(done.stdout.split()[-1]) < 600  # in float64 the three arrays alone are 768


def test_an_array_too_large_to_be_explained_is_found_and_located():
    """So is one behind it, and one behind a small array."""

    def dump(dtype: str, *wrong: int) -> Dump:
        rows = {f"layers.{n}.mlp": np.full((1, 1, 4096), 1.5 if n in wrong else 1.0, dtype) for n in range(4)}
        of = {n: (1, 8 if n == "layers.2.mlp" else 4097, 4096) for n in rows}
        arrays = {n: (lambda n=n, x=x: np.broadcast_to(x, of[n])) for n, x in rows.items()}
        return Dump("", {n: [Array(dtype, load)] for n, load in arrays.items()}, {})

    for wrong in ((0, 1), (1, 3), (2, 3), (3,)):
        case = compare(
            dump("float32", *wrong), dump("float64"), dump("float32"), None, Rule({}, None, 16, "reference")
        ).cases[0]
        assert case.first_divergence is not None
        assert case.first_divergence.name == f"layers.{wrong[0]}.mlp"


def test_it_needs_neither_torch_nor_jax(sides, tmp_path):
    folder, _, candidate = sides
    write(folder / "candidate.safetensors", candidate)
    absent = ("torch", "jax", "jaxlib", "flax", "transformers", "matplotlib", "scipy", "optax", "datasets", "pandas")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from parity_tests.cli import main; main()"
    paths = [str(folder / f"{name}.safetensors") for name in ("candidate", "truth", "reference")]
    given = [paths[0], "--truth", paths[1], "--reference", paths[2], "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, "compare", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    write(folder / "candidate.safetensors", candidate | {"layers.0.attn": np.zeros((B, T, H, D), np.float32)})
    wrong = subprocess.run([sys.executable, "-c", code, "compare", *given], capture_output=True, text=True)
    assert "the output is all zeros" in wrong.stdout, wrong.stderr


def test_logprobs_of_a_sampler_are_judged_and_described(tmp_path):
    random = np.random.default_rng(0)
    true = [-random.exponential(2.0, n) for n in (40, 25)]

    def lines(name: str, error: float, shift: float = 0.0, ids: int = 0) -> str:
        values = [[*(x + shift + error * random.standard_normal(len(x)))] for x in true]
        rows = [{"token_ids": [*range(ids, ids + len(x))], "logprobs": x} for x in values]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    truth, trainer = lines("truth", 0), lines("trainer", 0.01)

    def run_on(candidate: str, *given: str):
        return CliRunner().invoke(cli.app, ["compare", "--logprobs", candidate, *given])

    judged = ("--truth", truth, "--reference", trainer)
    right = run_on(lines("sampler", 0.012), *judged)
    assert right.exit_code == 0, right.output
    for words in ("difference of 65 tokens: mean", "KL divergence, estimated", "from position 0: ", "differs most is "):
        assert words in right.stdout
    wrong = run_on(lines("sampler", 0.012, 0.1), *judged)
    assert (wrong.exit_code, "DIFFERENT: logprobs" in wrong.stdout) == (1, True), wrong.output
    assert "mean 0.09" in wrong.stdout
    assert "the tokens are not the same" in run_on(lines("sampler", 0, ids=1), *judged).stdout
    (tmp_path / "bad").write_text('{"token_ids": [1, 2], "logprobs": [0.5]}')
    bad = run_on(str(tmp_path / "bad"), *judged)
    assert (bad.exit_code, "line 1 has 2 token_ids and 1 logprobs" in bad.stderr) == (2, True)
    arrays = {"token_ids": np.arange(12).reshape(2, 6), "logprobs": -np.ones((2, 6), np.float32)}
    write(tmp_path / "a.safetensors", arrays)
    same = run_on(str(tmp_path / "a.safetensors"), "--against", str(tmp_path / "a.safetensors"))
    assert (same.exit_code, "IDENTICAL" in same.stdout) == (0, True)
