"""The command `parity`: its verdicts are its exit codes, its mistakes are one line."""

import pytest
from typer.testing import CliRunner

from parity_tests import cli, layers
from parity_tests.taps import capture_taps

runner = CliRunner()


def test_the_same_computation_exits_with_0():
    result = runner.invoke(cli.app, ["run", "--model", "qwen3", "--tokens", "48"])
    assert result.exit_code == 0, result.output
    assert "SAME: 45 taps" in result.stdout


def test_another_computation_exits_with_1_and_says_where(monkeypatch):
    def shifted(model, **inputs):
        return capture_taps(model, **inputs | {"position_ids": inputs["position_ids"] + (inputs["position_ids"] > 20)})

    monkeypatch.setattr(layers, "capture_taps", shifted)
    result = runner.invoke(cli.app, ["run", "--tokens", "48", "--dtype", "float32"])
    assert result.exit_code == 1
    assert "DIFFERENT: layers.0.q_rope is the first to break the rule" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "no such/"], "no folder with a config.json"),
        (["--variant", "anchr"], "variant 'anchr'"),
        (["--engine", "flahs"], "unknown engine"),
        (["--engine", "flash"], "needs a CUDA device"),
        (["--dtype", "fp8"], "dtype 'fp8'"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(options, says):
    result = runner.invoke(cli.app, ["run", *options])
    assert result.exit_code == 2
    line, *more = [line for line in result.stderr.splitlines() if not line.startswith("parity: llama")]
    assert not more
    assert line.startswith("parity: ")
    assert says in line
