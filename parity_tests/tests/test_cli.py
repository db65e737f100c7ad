"""The command `parity`: its verdicts are its exit codes, its mistakes are one line."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.gate import run as gate_run
from parity_tests.gate.spec import Single
from parity_tests.report.schema import read_report
from parity_tests.zoo.patch import positions
from torchtrain.tests.data_fixtures import word_tokenizer

runner = CliRunner()
EXAMPLES = Path(__file__).parents[2] / "examples" / "ci"
QUICK = ["run", "tokens=48", "engine=sdpa"]


def test_the_same_computation_exits_with_0():
    result = runner.invoke(cli.app, [*QUICK, "model=qwen3"])
    assert result.exit_code == 0, result.output
    assert "SAME: 50 arrays within their allowance" in result.stdout
    assert "forward, layer 2" in result.stdout


def test_another_computation_exits_with_1_and_says_where():
    with positions(lambda position_ids, _: position_ids + (position_ids > 20)):
        result = runner.invoke(cli.app, [*QUICK, "dtype=float32"])
    assert result.exit_code == 1
    assert "DIFFERENT: layer 0, q after RoPE: " in result.stdout
    assert "positions are off by +1 from token 21 on" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["model=no such/"], "no folder with a config.json"),
        (["variant=anchr"], "variant 'anchr'"),
        (["rope=yarrn"], "rope: 'yarrn'"),
        (["engine=flahs"], "engine: 'flahs'"),
        (["dtype=fp8"], "dtype: 'fp8'"),
        (["tokens=3"], "tokens: 3: give "),
        (["stages=forwards"], "stages.0: 'forwards'"),
        (["modle=llama"], "modle: unknown key (did you mean model?"),
        (["against_dtype=bfloat16"], "needs `against`"),
        (["--case", "x"], "--case: needs a configuration"),
        (["none.yaml"], "config none.yaml: no such file"),
        (["configs/parity/ci.yaml", "dtype=bfloat16"], "dtype: unknown key"),
        (["against=llama"], "'llama' is a tiny random model"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(options, says):
    result = runner.invoke(cli.app, ["run", *options])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("parity: ")
    assert says in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device runs it")
def test_the_keys_of_a_case_can_be_listed():
    listed = runner.invoke(cli.app, ["run", "--keys"])
    assert listed.exit_code == 0
    assert {line for line in listed.stdout.splitlines() if line[:1].strip()} == set(Single.model_fields)


def test_an_engine_that_cannot_run_here_is_a_mistake():
    result = runner.invoke(cli.app, ["run", "engine=flash"])
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.stderr


def test_a_configuration_leaves_a_report(tmp_path):
    path, out = tmp_path / "gate.yaml", tmp_path / "out"
    path.write_text("title: Small\nmatrix: [{tokens: [48, 49]}, {engine: flash}]\n")
    result = runner.invoke(cli.app, ["run", str(path), "matrix.0.dtype=bfloat16", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "of 2 cases within their allowance, 1 cases cannot run here" in result.stdout
    assert {file.name for file in out.iterdir()} == {"report.json", "report.html", "junit.xml", "badge.json", "cases"}
    report = json.loads((out / "report.json").read_text())
    assert [case["settings"]["dtype"] for case in report["cases"]] == ["bfloat16", "bfloat16", "float32"]
    case = report["cases"][0]["id"]
    alone = runner.invoke(cli.app, ["run", str(path), "matrix.0.dtype=bfloat16", "--case", case])
    assert alone.exit_code == 0
    assert "forward, layer 2" in alone.stdout


# -- two checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A tiny model in float32, in bfloat16, with one weight changed, and with another theta."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from parity_tests.gate.case import SIZES

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    config = LlamaConfig(**(SIZES | {"vocab_size": 60, "max_position_embeddings": 256}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "original")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    model.save_pretrained(folder / "other_theta")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    with torch.no_grad():
        model.model.norm.weight[3] = 2.0
    model.save_pretrained(folder / "changed")
    half = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.bfloat16)
    half.save_pretrained(folder / "half")
    for name in ("original", "other_theta", "changed", "half"):
        word_tokenizer().save_pretrained(folder / name)
    return folder


def held_against(checkpoints, model: str, against: str):
    folders = [f"model={checkpoints / model}", f"against={checkpoints / against}"]
    return runner.invoke(cli.app, [*QUICK, *folders])


def test_two_dtypes_of_the_same_weights_are_both_judged(checkpoints):
    result = held_against(checkpoints, "half", "original")
    assert result.exit_code == 0, result.output
    assert "of 2 cases within their allowance" in result.stdout


def test_an_export_that_lost_its_theta_is_another_computation(checkpoints):
    result = held_against(checkpoints, "other_theta", "original")
    assert result.exit_code == 1
    assert "DIFFERENT: layer 0, q after RoPE: " in result.stdout
    assert "theta is off by a factor of 50" in result.stdout


def test_a_checkpoint_that_was_written_anew_is_judged_anew(checkpoints, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints / "original", folder)
    arguments = ["run", f"model={folder}", "dtype=float32", "tokens=48", "--out", str(tmp_path / "out")]
    report = tmp_path / "out" / "report.json"
    assert runner.invoke(cli.app, arguments).exit_code == 0
    before = read_report(report).cases
    assert runner.invoke(cli.app, arguments).exit_code == 0
    assert read_report(report).cases == before, "the kept case was not taken"
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert runner.invoke(cli.app, arguments).exit_code == 0
    after = read_report(report).cases
    assert [m.error for m in after[0].measures] != [m.error for m in before[0].measures]
    (folder / "model.safetensors").write_bytes(b"no weights")
    damaged = runner.invoke(cli.app, arguments)
    assert damaged.exit_code == 2
    assert f"{folder / 'model.safetensors'}: not safetensors, or damaged" in damaged.stderr


def test_other_weights_are_refused_by_name(checkpoints):
    result = held_against(checkpoints, "changed", "original")
    assert result.exit_code == 2
    assert "1 of 30 tensors hold other weights than" in result.stderr
    assert "model.norm.weight" in result.stderr


# -- the other verbs ---------------------------------------------------------------------------------------------------


def test_zoo_prints_the_kill_table(tmp_path):
    path = tmp_path / "gate.yaml"
    path.write_text("title: Small\nmatrix: [{tokens: 48}, {engine: flash}]\n")
    caught = runner.invoke(cli.app, ["zoo", str(path), "rope_sign"])
    assert caught.exit_code == 0, caught.output
    assert "1 of 1 bugs caught, 0 false alarms in 1 cases" in " ".join(caught.stdout.split())
    survives = runner.invoke(cli.app, ["zoo", str(path), "longrope_short_factors"])
    assert survives.exit_code == 1
    assert "SURVIVES" in survives.stdout
    unknown = runner.invoke(cli.app, ["zoo", str(path), "no_such_bug"])
    assert unknown.exit_code == 2
    assert "parity: bug 'no_such_bug'" in unknown.stderr


def test_a_platform_that_jax_does_not_have_is_one_line():
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-c", "from jaxref.cli import main; main()", "rope"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("jaxref: JAX_PLATFORMS: 'cuda'")
    assert len(done.stderr.splitlines()) == 1


# -- templates for CI --------------------------------------------------------------------------------------------------


def commands_and_artifacts(where: str) -> tuple[str, list[str]]:
    """The command of a template and the files that it keeps."""
    if where == "gitlab":
        job = yaml.safe_load((EXAMPLES / "gitlab.yml").read_text())["parity"]
        return job["script"][0], [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]
    action = yaml.safe_load((EXAMPLES / "parity-gate" / "action.yml").read_text())
    run, keep = action["runs"]["steps"]
    texts = [run["run"], keep["with"]["path"]]
    for name, value in action["inputs"].items():
        texts = [text.replace(f"${{{{ inputs.{name} }}}}", value["default"]) for text in texts]
    return texts[0], texts[1].split()


@pytest.mark.parametrize("where", ["github", "gitlab"])
def test_a_template_runs_a_gate_and_keeps_its_report(where, tmp_path, monkeypatch):
    command, kept = commands_and_artifacts(where)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "parity").mkdir(parents=True)
    (tmp_path / "configs" / "parity" / "ci.yaml").write_text("title: Small\nmatrix: [{tokens: 48}, {engine: flash3}]\n")
    words = shlex.split(command)
    assert words[0] == "parity"
    monkeypatch.setattr(gate_run, "_run_in_processes", lambda groups, out, *_: gate_run._run_in_turn(groups, out))
    done = runner.invoke(cli.app, words[1:])
    assert done.exit_code == 0, done.output
    assert all(list(tmp_path.glob(path)) for path in kept), kept
    assert ("::notice title=parity llama-anchor-keep-flash3" in done.stdout) == (where == "github")
    badge = json.loads((tmp_path / "runs" / "parity" / "badge.json").read_text())
    assert badge == {"schemaVersion": 1, "label": "parity", "message": "1 case the same", "color": "brightgreen"}


def test_what_differs_is_annotated():
    with positions(lambda position_ids, _: position_ids + 1):
        done = runner.invoke(cli.app, [*QUICK, "dtype=float32", "--format", "github"])
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert line.startswith("::error title=parity llama-anchor-keep-sdpa-float32-t48-s0::layer 0, q after RoPE: ")
