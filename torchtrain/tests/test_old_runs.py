"""Run folders of earlier versions: one that was interrupted goes on, and computes what it would have.

`old_run.tar.gz` was made by the version before `anchorline/` (November 2026): a tiny Llama in bfloat16, killed in its
fourth step with a checkpoint of step 2; `expected.jsonl` is the `metrics.jsonl` of the same run uninterrupted.
"""

import json
import tarfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from torchtrain import cli

ARCHIVE = Path(__file__).parent / "old_run.tar.gz"
COUNTED = ("event", "step", "tokens_seen", "labelled_tokens", "learning_rate", "live_pairs", "flops")


@pytest.fixture
def old_run(tmp_path, monkeypatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return Path("run")


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_of_an_earlier_version_goes_on_to_its_end(old_run):
    before = (old_run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    result = CliRunner().invoke(cli.app, ["resume", str(old_run)])
    assert result.exit_code == 0, result.output
    assert "eval" in yaml.safe_load((old_run / "config.yaml").read_text(encoding="utf-8"))  # the name of then
    lines = (old_run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[:3] == before  # held out before training, steps 1 and 2: they belong to the checkpoint
    found, expected = events(old_run / "metrics.jsonl"), events(Path("expected.jsonl"))
    assert [{k: e.get(k) for k in COUNTED} for e in found] == [{k: e.get(k) for k in COUNTED} for e in expected]
    assert (old_run / "model" / "model.safetensors").is_file()
    again = CliRunner().invoke(cli.app, ["resume", str(old_run)])
    assert again.exit_code == 0
    assert "finished" in again.output
    assert CliRunner().invoke(cli.app, ["status", str(old_run)]).exit_code == 0
