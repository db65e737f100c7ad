"""`parity compare`: dumps made by hand, so that each fault is known."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.comparing.compare import compare
from parity_tests.comparing.dumps import Array, Dump, open_dump
from parity_tests.comparing.judging import Rule
from parity_tests.report.schema import read_report
from parity_tests.tests.dumps import B, D, H, M, T, run, write


def test_a_correct_dump_is_the_same_and_leaves_a_report(sides, tmp_path):
    folder, truth, candidate = sides
    done = run(folder, candidate, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"SAME: {len(truth)} arrays within their allowance")
    report = read_report(tmp_path / "report.json")
    assert report.passed
    assert [m.name for m in report.cases[0].measures][:3] == ["inputs.input_ids", "embed", "layers.0.q"]
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.html", "junit.xml", "badge.json"}


Change = Callable[[np.ndarray], np.ndarray]
FAULTS: list[tuple[str, Change, str]] = [
    ("layers.1.q", lambda x: x * 1.5, "layer 1, q before RoPE (layers.1.q): "),
    ("layers.1.q", lambda x: x * 12, "everything is 12 times what it should be"),  # its roundings, too
    ("layers.1.mlp", np.zeros_like, "it is all zeros"),
    ("layers.0.attn", lambda x: x[:, :, ::-1], "heads are in the opposite order"),
    ("layers.0.attn", lambda x: x.reshape(B, T, 2, 2, D).swapaxes(2, 3).reshape(x.shape), "in another order"),
    ("layers.2.k", lambda x: np.roll(x, D // 2, 3), "the two halves of the last axis are exchanged"),
    ("layers.2.k", lambda x: np.concatenate([x[..., ::2], x[..., 1::2]], 3), "halves as pairs"),
    ("embed", lambda x: np.concatenate([x[:, :1], x[:, :-1]], 1), "the token before it"),
    ("layers.1.mlp", lambda x: x * np.linspace(0.5, 1.5, M), "each channel has a factor of its own"),
    ("layers.1.mlp", lambda x: x * np.linspace(0.5, 1.5, T)[:, None], "each token has a factor of its own"),
    ("layers.1.mlp", lambda x: x * np.where(np.arange(M) == 3, 5, 1), "channel 3 alone has a factor of its own, 4.999"),
    ("layers.1.mlp", lambda x: x * np.where(np.arange(T) == 7, 5, 1)[:, None], "token 7 alone has a factor of its own"),
    ("layers.1.mlp", lambda x: np.where(np.arange(T)[:, None] == 7, -x, 1.5 * x), "of its own, from -1 to 1.5"),
    ("layers.0.attn", lambda x: x * np.where(np.arange(H) == 2, -12, 1)[:, None], "head 2 alone has a factor"),
    ("layers.1.q", lambda x: x + np.linspace(-0.4, 0.4, H * D).reshape(H, D), "each channel of a head has a summand"),
    ("gradients.layers.1.mlp.weight", lambda x: x * np.linspace(0.5, 1.5, M)[:, None], "each row has a factor"),
    ("layers.1.attn_out", lambda x: x + np.linspace(-0.5, 0.5, M), "each channel has a summand of its own"),
    ("gradients.layers.1.mlp.weight", lambda x: x.T, "rows and columns are exchanged"),
    ("inputs.input_ids", lambda x: np.roll(x, 1, 1), "they are one token too late"),
    ("mask", lambda x: np.where(np.tri(T, k=-1), 0, -1e9)[None, None].astype(np.float32), "48 of 2304 entries differ"),
    ("layers.1.q", lambda x: np.where(np.arange(D) == 3, np.nan, x), "(layers.1.q): NaN at [0, 0, 0, 3]"),
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
    assert "after it 0 of" in done.stdout or "has shape" in says
    assert done.stdout.count("NaN at") == ("NaN" in says)


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


def test_what_is_handed_on_is_told_from_what_starts_there(sides):
    folder, _, candidate = sides
    worse = dict(candidate)
    for layer, factor in enumerate((1.0025, 1.003, 1.006)):
        x = candidate[f"layers.{layer}.residual"]
        worse[f"layers.{layer}.residual"] = (x.astype(np.float32) * factor).astype(x.dtype)
    done = run(folder, worse, "--only", "layers.*.residual")
    assert "it comes from before: just before it arrays err by at most 0.79 of" in done.stdout, done.stdout
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
    assert "the most: layers.2.attn_residual differs by 0.0036 of" in done.stdout
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
    words = ("it starts here", "<dt>reference</dt><dd>twice", "What differs first", "Error along the sequence")
    assert [said in page for said in (*words, "Error over the layers")] == [True, False, False, True, True]
    write(tmp_path / "reference.safetensors", {"h": np.ones((B, 1, M), np.float32)})
    write(tmp_path / "truth.safetensors", {"h": np.ones((B, 1, M))})
    assert run(tmp_path, {"h": np.zeros((B, 1, M), np.float32)}, "--out", str(tmp_path)).exit_code == 1
    assert "Error along the sequence" not in (tmp_path / "report.html").read_text()  # of one token


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
        (["T", "--truth", "T", "--order", "none"], "'--order': file 'none' does not exist"),
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
    by_name = ["tokens", "model.embed_tokens", "layers.9.q", "layers.9.mlp", "layers.10.q", "logits"]
    by_name += [f"gradients.{n}.weight" for n in ("lm_head", "layers.10.mlp", "layers.9.mlp", "model.embed_tokens")]
    names = sorted(by_name)
    arrays = {name: np.zeros(2) for name in names}
    path = write(tmp_path / "a.safetensors", arrays)
    assert list(open_dump(path).arrays) == by_name
    assert list(open_dump(write(path, arrays, order=json.dumps(names))).arrays) == names
    assert list(open_dump(path, names[::-1]).arrays) == names[::-1]


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
    """So is a small one behind it."""

    def dump(dtype: str, wrong: int | None = None) -> Dump:
        rows = [np.full((1, 1, 4096), 1.5 if n == wrong else 1.0, dtype) for n in range(2)]
        loads = [lambda x=x, T=T: np.broadcast_to(x, (1, T, 4096)) for x, T in zip(rows, (4097, 8), strict=True)]
        return Dump("", {f"layers.{n}.mlp": [Array(dtype, load)] for n, load in enumerate(loads)}, {})

    for wrong in range(2):
        sides = dump("float32", wrong), dump("float64"), dump("float32")
        case = compare(*sides, None, Rule({}, None, 16, "reference")).cases[0]
        assert case.first_divergence is not None
        assert case.first_divergence.name == f"layers.{wrong}.mlp"


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
    assert "it is all zeros" in wrong.stdout, wrong.stderr


def test_logprobs_of_a_sampler_are_judged_and_described(tmp_path):
    random = np.random.default_rng(0)
    true = [-random.exponential(2.0, n) for n in (40, 25)]

    def lines(name: str, error: float, shift: float = 0.0, ids: int = 0, masked: int | None = None) -> str:
        values = [[*(x + shift + error * random.standard_normal(len(x)))] for x in true]
        values = [[-np.inf if i == masked else x for i, x in enumerate(row)] for row in values]
        rows = [{"token_ids": [*range(ids, ids + len(x))], "logprobs": x} for x in values]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    truth, trainer = lines("truth", 0), lines("trainer", 0.01)

    def run_on(candidate: str, *given: str):
        return CliRunner().invoke(cli.app, ["compare", "--logprobs", candidate, *given])

    judged = ("--truth", truth, "--reference", trainer)
    right = run_on(lines("sampler", 0.012), *judged)
    assert right.exit_code == 0, right.output
    for words in ("65 tokens, sampler less truth: mean", "KL divergence, ", "from position 0: ", "differs most is "):
        assert words in right.stdout
    wrong = run_on(lines("sampler", 0.012, 0.1), *judged)
    assert (wrong.exit_code, "DIFFERENT: logprobs" in wrong.stdout) == (1, True), wrong.output
    assert "mean 0.09" in wrong.stdout
    for only in ([], ["--only", "logprobs"]):  # other tokens are another question
        other = run_on(lines("sampler", 0, ids=1), *judged, *only)
        assert (other.exit_code, "the tokens are not the same" in other.stdout) == (1, True), other.output
    masked = [lines(name, 0.01, masked=3) for name in ("masked", "too")]
    for pair, says in ((masked[:1] + [truth], "infinite at [3], 2 of"), ([truth, masked[0]], "truth is infinite at")):
        found = run_on(pair[0], "--truth", pair[1], "--dtype", "bfloat16")
        words = [says in found.stdout, "no finite log-probability: " in found.stdout, "nan" in found.stdout]
        assert (found.exit_code, words) == (1, [True, True, False]), found.output
    both = run_on(masked[0], "--truth", masked[1], "--dtype", "bfloat16", "--operations", "999")
    assert (both.exit_code, "2 of both; the first: document 0, token 3, -inf and -inf" in both.stdout) == (0, True)
    (tmp_path / "bad").write_text('{"token_ids": [1, 2], "logprobs": [0.5]}')
    bad = run_on(str(tmp_path / "bad"), *judged)
    assert (bad.exit_code, "line 1: 2 token_ids and 1 logprobs; give" in bad.stderr) == (2, True)
    arrays = {"token_ids": np.arange(12).reshape(2, 6), "logprobs": -np.ones((2, 6), np.float32)}
    write(tmp_path / "a.safetensors", arrays)
    same = run_on(str(tmp_path / "a.safetensors"), "--against", str(tmp_path / "a.safetensors"))
    assert (same.exit_code, "IDENTICAL" in same.stdout) == (0, True)
