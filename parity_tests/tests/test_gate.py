"""The gate: what a configuration multiplies out to, what a case says of a fault, and that a run can go on."""

import os
import signal
from dataclasses import replace
from itertools import product
from unittest.mock import patch
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import torchtrain
from anchorline import files
from anchorline.command import Leave
from parity_tests import cli
from parity_tests.gate import candidate, run
from parity_tests.gate.candidate import candidate_side, why_not_here
from parity_tests.gate.case import SIZES, resolve, tiny_weights
from parity_tests.gate.judge import judge_case, run_case
from parity_tests.gate.ranks import run_ranks
from parity_tests.gate.run import run_gate
from parity_tests.gate.spec import STAGES, CaseSpec, Gate, expand, load_gate
from parity_tests.gate.truth import Oracle, OracleArrays
from parity_tests.oracle import rates_of
from parity_tests.report.junit import to_junit
from parity_tests.report.schema import CaseReport, read_report
from parity_tests.zoo import discover
from parity_tests.zoo.patch import frequencies, positions
from torchtrain.data import rows as packer
from torchtrain.training import step
from torchtrain.training.optimizer import Optimizer

ROOT = run.ROOT
CONFIGS = sorted((ROOT / "configs" / "parity").glob("*.yaml"))
ORACLE = Oracle()
SPEC = CaseSpec(model="llama")  # as long as the rows of configs/parity: each length is compiled anew
BUGS = discover()


@pytest.fixture(scope="module", autouse=True)
def _plug_in():
    torchtrain.register()


# -- the configuration -------------------------------------------------------------------------------------------------


def test_an_entry_is_the_product_of_its_lists():
    entry = {"model": ["llama", "qwen3"], "dtype": "bfloat16", "tokens": [40, 64]}
    specs = expand(Gate.model_validate({"title": "t", "seeds": [3, 4], "matrix": [entry]}))
    found = [(spec.model, spec.dtype, spec.tokens, spec.seed) for spec in specs]
    assert sorted(found) == list(product(("llama", "qwen3"), ("bfloat16",), (40, 64), (3, 4)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_in_the_repository(path):
    specs = expand(load_gate(path))
    assert specs
    assert all("/" not in spec.id for spec in specs)


@pytest.mark.parametrize(
    ("text", "overrides", "says"),
    [
        ("title: t\nmatrix: [{modl: llama}]", [], "matrix.0.modl: unknown key (did you mean matrix.0.model?"),
        ("title: t\nmatrix: [{dtype: fp8}]", [], "matrix.0.dtype.0: 'fp8': give 'float32'"),
        ("title: t\nmatrix: [{variant: anchr}]", [], "variant 'anchr'"),
        ("title: t\nmatrix: [{}, {}]", [], "llama-anchor-keep-sdpa-float32-t53-s0 is asked for twice"),
        ("title: t", [], "no case"),
        ("matrix: [{}]", [], "title: missing"),
        ("title: [", [], "config"),
        ("- a", [], "holds a list; give sections such as `title:`"),
        ("title: t\ntitle: u", [], "appears twice"),
        ("title: t\nmatrix: [{}]", ["matrix.1.tokens=40"], "'1' is not an index"),
        ("title: t\nmatrix: [{}]", ["matrix.0.tokens=4"], "matrix.0.tokens.0: 4: give 32 or more"),
    ],
)
def test_a_mistake_in_a_configuration_is_named(tmp_path, text, overrides, says):
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as error:
        load_gate(path, overrides)
    assert says in str(error.value)


# -- a case ------------------------------------------------------------------------------------------------------------


def test_cases_share_the_oracle_where_it_is_the_same():
    """Of RoPE before it sees what `dynamic` takes over, and nothing of what the candidate alone does."""
    assert CaseSpec(rope="dynamic", rope_before="dynamic").shared != CaseSpec(rope="dynamic").shared
    of_candidate = {"engine": "dense", "ranks": 2, "repeats": 2, "schedule": "wsd", "warmup_steps": 1}
    assert CaseSpec(**of_candidate, against="llama").shared == CaseSpec().shared


def test_a_whole_case_passes():
    spec = CaseSpec(dtype="bfloat16", stages=("forward", "loss", "gradients", "step"))
    case = run_case(spec, ORACLE)
    assert case.problem is None
    assert case.first_divergence is None, case.first_divergence
    names = [measure.name for measure in case.measures]
    assert len(names) == len(set(names))
    parameters = len(tiny_weights("llama", 0))
    assert [measure.group for measure in case.measures].count("gradients") == parameters
    assert [measure.group for measure in case.measures].count("step") == parameters + 1
    for name in ("inputs.position_ids", "embed", "layers.2.k_rope", "logits", "loss", "loss.tokens", "step.stored"):
        assert name in names
    profile = next(measure.profile for measure in case.measures if measure.name == "logits")
    assert profile is not None
    assert len(profile.starts) == len(profile.error) == len(profile.allowance) > 1


def test_a_frequency_that_the_oracle_rounds_luckily_is_no_allowance():
    """At this theta one frequency of transformers' longrope errs seven times as much as the oracle's."""
    case = run_case(CaseSpec(rope="longrope", rope_parameters="all", position_offset=8139), ORACLE)
    assert case.passed, case.first_divergence


def test_biases_are_judged_with_their_weights():
    qwen = resolve(CaseSpec(model="qwen2", stages=("gradients",)))
    arrays = candidate_side(qwen)
    names = list(arrays)
    case = judge_case(qwen, arrays, ORACLE.side(qwen))
    assert list(arrays) == names, "judging changes what it judges"
    (measure,) = [m for m in case.measures if m.name.endswith("layers.0.self_attn.k_proj.weight+bias")]
    assert measure.shape == [2 * SIZES["head_dim"], SIZES["hidden_size"] + 1]
    assert case.passed


def test_what_cannot_run_here_is_skipped_with_a_reason():
    assert why_not_here(CaseSpec(engine="sdpa", stages=STAGES)) is None
    if torch.cuda.is_available():
        return
    assert "needs a CUDA device" in str(why_not_here(CaseSpec(engine="flash3", dtype="bfloat16")))
    case = run_case(CaseSpec(engine="flash"), ORACLE)
    assert "needs a CUDA device" in str(case.skipped)
    assert not case.passed
    assert "no backward pass on cpu" in str(why_not_here(CaseSpec(engine="flex", dtype="bfloat16", stages=("loss",))))
    assert "20-bit exponential" in str(why_not_here(CaseSpec(engine="flex")))


def judge(spec: CaseSpec) -> CaseReport:
    case = resolve(spec)
    return judge_case(case, candidate_side(case), ORACLE.side(case))


def words_of(patched, spec=SPEC) -> str:
    with patched:
        case = judge(spec)
    assert case.first_divergence is not None
    return case.first_divergence.words


def test_the_words_for_positions_say_from_which_token_on():
    text = words_of(positions(lambda position_ids, _: position_ids + (torch.arange(position_ids.shape[1]) >= 17)))
    assert text.startswith("layer 0, q after RoPE: ")
    assert text.endswith("times the allowance; positions are off by +1 from token 17 on")


def test_the_words_for_frequencies_name_the_pairs():
    def bent(rotary, inv_freq_C):
        return torch.where(torch.arange(len(inv_freq_C)) == 3, 1.01 * inv_freq_C, inv_freq_C)

    assert words_of(frequencies(bent)).endswith("of 32 rotated pairs only 3 are wrong: other frequencies")


def test_a_packer_that_is_wrong_is_caught_by_its_arrays():
    spec = CaseSpec(variant="intra_reset")
    with patch.object(packer, "_restart_positions", lambda document_ids: np.arange(len(document_ids)) + 1):
        case = judge(spec)
    assert case.measures[1].name == "inputs.position_ids"
    assert (case.measures[1].error > 0, case.measures[1].allowance) == (True, 0)
    assert case.first_divergence is not None
    assert "position_ids: " in case.first_divergence.words
    assert "entries differ, and none may; positions are off" in case.first_divergence.words


def raises(*_):
    raise RuntimeError("no\nsuch kernel")


def test_a_candidate_that_raises_is_a_problem_in_words():
    with patch.object(candidate, "make_plan", raises):
        case = run_case(SPEC, ORACLE)
    assert case.problem == "the candidate raises RuntimeError: no such kernel"
    assert not case.passed


def test_nan_shapes_and_missing_arrays_are_problems_in_words():
    case = resolve(SPEC)
    oracle, arrays = ORACLE.side(case), candidate_side(case)
    broken = dict(arrays) | {"layers.1.q": arrays["layers.1.q"].copy(), "embed": arrays["embed"][:, 1:]}
    broken["layers.1.q"][0, 3, 1, 2] = np.nan
    del broken["logits"]
    broken["layers.7.q"] = arrays["embed"]
    case = judge_case(case, broken, oracle)
    assert "embed has shape [2, 52, 256]; the oracle's is [2, 53, 256]" in str(case.problem)
    assert "layers.1.q is NaN at [0, 3, 1, 2], 1 of 27136 elements" in str(case.problem)
    assert "logits is missing" in str(case.problem)
    assert "1 more such" in str(case.problem)
    assert not case.passed
    broken = dict(arrays) | {"layers.1.q": broken["layers.1.q"]}
    words = judge_case(resolve(SPEC), broken, oracle).first_divergence
    assert words is not None
    assert "NaN at [0, 3, 1, 2], 1 of 27136 elements" in words.words


def test_stored_weights_are_the_masters_rounded():
    take = Optimizer.step

    def forgetful(self, *args):
        before = [parameter.detach().clone() for parameter in self.parameters]
        norm = take(self, *args)
        with torch.no_grad():
            for parameter, old in zip(self.parameters, before, strict=True):
                parameter.copy_(old)
        return norm

    spec = CaseSpec(dtype="bfloat16", stages=("step",))
    with patch.object(Optimizer, "step", forgetful):
        case = judge(spec)
    assert [measure.name for measure in case.measures if not measure.passed] == ["step.stored"]


def test_ranks_that_share_a_step_compute_what_one_does():
    """Every rank takes its rows twice, of twice the tokens: the same sums, bit for bit."""
    stages = ("loss", "gradients", "step", "trajectory")
    for dtype in ("float32", "bfloat16"):
        cases = [resolve(CaseSpec(dtype=dtype, stages=stages, ranks=n)) for n in (1, 2)]
        short = [case.trajectory.model_copy(update={"steps": 2}) for case in cases]
        one, two = (candidate_side(replace(case, trajectory=own)) for case, own in zip(cases, short, strict=True))
        assert one.keys() == two.keys()
        two["step.stored"], other = np.split(two["step.stored"], 2)
        assert np.array_equal(other, two["step.stored"])
        one["loss.counts"] = 2 * one["loss.counts"]
        assert [name for name in one if not np.array_equal(one[name], two[name])] == []


def test_a_rank_that_fails_stops_the_others():
    def run_rank(world):
        if world.rank == 1:
            raise RuntimeError("no such row")
        return world.sum([1.0])

    with pytest.raises(RuntimeError, match="no such row"):
        run_ranks(2, torch.device("cpu"), run_rank)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("schedule_one_step_ahead", "each step has the rate of the step after it"),
        ("warmup_from_zero", "of 20 steps 5 have a wrong rate, the first is step 1"),
        ("schedule_without_floor", "of 20 steps 14 have a wrong rate, the first is step 7"),
    ],
)
def test_the_words_for_a_schedule(bug, words):
    spec = CaseSpec(schedule="cosine", warmup_steps=5, stages=("trajectory",))
    case = resolve(spec)
    train = case.trajectory
    right = rates_of(train)
    oracle = OracleArrays({"trajectory.rates": right}, {"trajectory.rates": right.astype(np.float32)}, {})
    with BUGS[bug].apply():
        wrong = np.array([step.learning_rate(number, train) for number in range(train.steps)])
    divergence = judge_case(case, {"trajectory.rates": wrong}, oracle).first_divergence
    assert divergence is not None
    assert divergence.words.startswith("learning rates of the steps: ")
    assert divergence.words.endswith(words)


@pytest.mark.parametrize(
    ("bug", "model", "words"),
    [
        ("clip_missing", "llama", "gradients are not clipped"),
        ("clip_norm_default", "llama", "gradients are clipped to 1, not to 0.5"),
        ("clip_per_parameter", "llama", "gradients are clipped one by one"),
        ("clip_by_matrices", "llama", "the norm that clips is that of the matrices alone"),
        # Its biases are judged with their weights.
        ("clip_by_matrices", "qwen2", "the norm that clips is that of the matrices alone"),
    ],
)
def test_the_words_for_clipping(bug, model, words):
    assert words_of(BUGS[bug].apply(), CaseSpec(model=model, stages=("step",))).endswith(words)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("trajectory.norms", lambda x: x.clip(max=0.5), "they are the norms after clipping"),
        ("trajectory.norms", lambda x: x / 2, "everything is 0.5 times what it should be"),
        ("trajectory.norms", lambda x: x - np.arange(1, 4) / 9, "they leave out parameters"),
        ("trajectory.2", lambda x: x + 1, "look at what a step leaves to the next (betas, moments, gradients)"),
        ("trajectory.1", lambda x: x + 1, " times the allowance"),
    ],
)
def test_the_words_for_what_steps_leave(name, change, words):
    right = np.array([[3.0, 2.0, 0.5]]) if name != "trajectory.norms" else np.array([3.0, 2.0, 0.5])
    oracle = OracleArrays({name: right}, {name: right * (1 + 2**-25)}, {})
    case = judge_case(resolve(CaseSpec(stages=("trajectory",))), {name: change(right)}, oracle)
    assert case.first_divergence is not None
    assert case.first_divergence.words.endswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"betas": (0.9, 0.999)}, "AdamW's betas are 0.9 and 0.999"),
        ({"clip_norm": None}, "gradients are not clipped"),
        ({"clip_norm": 1.0}, "gradients are clipped to 1, not to 0.5"),
        ({"epsilon": 1e-8}, "epsilon is 1e-8"),
    ],
)
def test_betas_and_clipping_are_told_apart(changes, words):
    def retrain(train, steps):
        assert steps == 3
        return right + 1 if all(getattr(train, name) == value for name, value in changes.items()) else right + 2

    right = np.array([[3.0, 2.0, 0.5]])
    oracle = OracleArrays({"trajectory.2": right}, {"trajectory.2": right * (1 + 2**-25)}, {}, retrain=retrain)
    case = judge_case(resolve(CaseSpec(stages=("trajectory",))), {"trajectory.2": right + 1}, oracle)
    assert case.first_divergence is not None
    assert case.first_divergence.words.endswith(words)


# -- a run -------------------------------------------------------------------------------------------------------------


def gate(*specs: CaseSpec) -> Gate:
    return Gate(title="Test", cases=list(specs))


def test_a_run_goes_on_where_it_was_interrupted(tmp_path):
    config = gate(SPEC, CaseSpec(tokens=41), CaseSpec(engine="flash"))
    real, calls = run.run_case, []

    def interrupted(spec, oracle):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(spec)
        return real(spec, oracle)

    with patch.object(run, "run_case", interrupted), pytest.raises(KeyboardInterrupt):
        run_gate(config, tmp_path)
    assert not (tmp_path / "report.json").exists()
    again = []
    with patch.object(run, "run_case", lambda spec, oracle: again.append(spec) or real(spec, oracle)):
        report = run_gate(config, tmp_path)
    assert sorted(calls + again, key=expand(config).index) == expand(config), "each is run once"
    assert report.passed
    assert read_report(tmp_path / "report.json") == report
    assert "<html" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.rglob("*.partial"))
    left = {name: (tmp_path / name).read_bytes() for name in ("report.json", "report.html", "junit.xml")}
    for number, name in enumerate(left):  # each is flushed, and its folder
        ends = patch.object(files.os, "fsync", side_effect=[None] * (2 * number) + [KeyboardInterrupt])
        with ends, pytest.raises(KeyboardInterrupt):
            run.write(report.model_copy(update={"title": "Another"}), tmp_path)
        assert (tmp_path / name).read_bytes() == left[name]


def test_a_kept_case_depends_on_the_sources_and_on_the_machine(tmp_path, monkeypatch):
    case, taken = run_case(SPEC, ORACLE), []
    monkeypatch.setattr(run, "run_case", lambda spec, _: taken.append(spec) or case)
    for package in run.PACKAGES:
        (tmp_path / package / "tests").mkdir(parents=True)
    source, test = tmp_path / "jaxref" / "rope.py", tmp_path / "jaxref" / "tests" / "test_rope.py"
    monkeypatch.setattr(run, "ROOT", tmp_path)

    def is_taken() -> bool:
        taken.clear()
        run._digest_of_code.cache_clear()
        run_gate(gate(SPEC), tmp_path / "out")
        return bool(taken)

    assert is_taken()
    test.write_text("changed")
    assert not is_taken()
    source.write_text("changed")
    assert is_taken()
    monkeypatch.setattr(run, "distributions", list)
    assert is_taken()
    monkeypatch.setattr(run, "_hardware", lambda: "another")
    assert is_taken()
    run._digest_of_code.cache_clear()


def test_what_could_not_be_judged_is_tried_again(tmp_path):
    failed = run_case(SPEC, ORACLE).model_copy(update={"problem": "the candidate raises MemoryError"})
    with patch.object(run, "run_case", lambda *_: failed):
        assert not run_gate(gate(SPEC), tmp_path).passed
    assert run_gate(gate(SPEC), tmp_path).passed


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sweep  # two processes that import everything
def test_a_killed_worker_ends_the_run(monkeypatch):
    monkeypatch.setattr(run, "_run_group", kill_this_process)
    with pytest.raises(Leave, match="--workers 2: a worker was killed") as left:
        run_gate(gate(SPEC), workers=2)
    assert left.value.code == 1, "a fault of the machine"


def test_one_case_of_a_gate():
    config = gate(SPEC, CaseSpec(tokens=41))
    report = run_gate(config, only=SPEC.id)
    assert [case.id for case in report.cases] == [SPEC.id]
    with pytest.raises(ValueError, match=rf"'nope': none of the 2 .* the nearest is {SPEC.id[:5]}"):
        run_gate(config, only="nope")


def test_the_command_of_a_case_runs_that_case():
    result = CliRunner().invoke(cli.app, SPEC.command.split()[1:])
    assert result.exit_code == 0, result.output
    assert SPEC.id in result.stdout


def test_junit_counts_and_says_why():
    ok = run_case(SPEC, ORACLE)
    skipped = ok.model_copy(update={"id": "b", "skipped": "needs \x00 a <GPU>"})
    problem = ok.model_copy(update={"id": "c", "problem": "it raises"})
    with patch.object(candidate, "rope_settings", lambda *_: {"factor": 9.0}):
        wrong = CaseSpec(rope="linear")
        broken = judge(wrong)
    report = run_gate(gate(SPEC)).model_copy(update={"cases": [ok, skipped, problem, broken]})
    suite = ElementTree.fromstring(to_junit(report))
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    assert suite.find(".//skipped").get("message") == "needs \ufffd a <GPU>"
    assert suite.find(".//error").get("message") == "it raises"
    assert "layers.0.q_rope: error" in suite.find(".//failure").text
    assert "parity run model=llama" in suite.find(".//failure").text
