"""docs/training-experiment.md is what programs make of the measurements that come with the repository."""

import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import training_again
from torchtrain.cli import app
from torchtrain.experiment.spec import PairedRun

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "training-experiment.md"


@pytest.fixture
def copy(tmp_path):
    (tmp_path / "docs").mkdir()
    return Path(shutil.copy(PAGE, tmp_path / "docs" / PAGE.name))


def test_its_report_is_made_of_its_measurements(tmp_path, copy):
    options = ["--only-report", "--measured", str(training_again.LATER), "--document", str(copy)]
    result = CliRunner().invoke(
        app, ["experiment", str(training_again.EXPERIMENT), "--out", str(tmp_path / "runs"), *options]
    )
    assert result.exit_code == 0, result.output
    assert copy.read_text() == PAGE.read_text()
    figure = Path("figures") / f"{PAGE.stem}.svg"
    assert (copy.parent / figure).read_bytes() == (PAGE.parent / figure).read_bytes()


def test_its_runs_made_twice_are_of_both_results(copy, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["training_again", "--document", str(copy)])
    training_again.main()
    assert copy.read_text() == PAGE.read_text()


def test_runs_made_twice_are_paired_by_what_they_are():
    intra, anchor = PairedRun("float32", "intra", 0), PairedRun("float32", "anchor", 0)
    earlier = {intra: 5.0, anchor: 5.5, PairedRun("float32", "full", 0): 9.0}
    later = {anchor: 5.6, intra: 4.7, PairedRun("bfloat16", "intra", 0): 9.0}
    lines = training_again.tables({"then": earlier, "otherwise": {anchor: 5.6}}, later)
    assert lines[2:4] == [
        "| then | float32 | 2 | 0.20000 | 0.22361 | 0.30000 |",
        "| otherwise | float32 | 1 | 0.00000 | 0.00000 | 0.00000 |",
    ]
    assert lines[-1] == "| then | float32 | 0 | +0.5000 | +0.9000 |"


def test_earlier_losses_are_weighted_by_the_width_of_their_bands(tmp_path):
    file = tmp_path / "earlier.csv"
    file.write_text("arithmetic,variant,seed,tokens,1-63,256-511,512-1023,copy 64\nfloat32,full,3,8,9,1,4,9\n")
    assert training_again.read_earlier(file) == {("float32", "full", 3): pytest.approx(3.0)}
