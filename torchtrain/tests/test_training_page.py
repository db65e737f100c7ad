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
SLOWER = ["run.train.learning_rate=2.0e-5", "variants=[intra,anchor]"]  # as its page says


@pytest.fixture
def copies(tmp_path):
    """Return a function that copies a page and returns where its copy is."""

    def copy(page):
        (tmp_path / "docs").mkdir(exist_ok=True)
        return Path(shutil.copy(page, tmp_path / "docs" / page.name))

    return copy


@pytest.mark.parametrize(("name", "overrides"), [("training-experiment", []), ("training-experiment-2e-5", SLOWER)])
def test_its_report_is_made_of_its_measurements(tmp_path, copies, name, overrides):
    page = ROOT / "docs" / f"{name}.md"
    copy = copies(page)
    options = ["--only-report", "--measured", str(training_again.RESULTS / f"{name}.json"), "--document", str(copy)]
    result = CliRunner().invoke(
        app, ["experiment", str(training_again.EXPERIMENT), *overrides, "--out", str(tmp_path / "runs"), *options]
    )
    assert result.exit_code == 0, result.output
    assert copy.read_text() == page.read_text()
    figure = Path("figures") / f"{page.stem}.svg"
    assert (copy.parent / figure).read_bytes() == (page.parent / figure).read_bytes()


def test_the_page_says_how_its_experiment_was_asked_for():
    assert (
        " ".join(f"'{given}'" if "[" in given else given for given in SLOWER)
        in (ROOT / "docs" / "training-experiment-2e-5.md").read_text()
    )


def test_its_runs_made_twice_are_of_both_results(copies, monkeypatch):
    copy = copies(PAGE)
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
    bf16 = {run._replace(arithmetic="bfloat16", seed=seed): loss for run, loss in earlier.items() for seed in (0, 1)}
    both = bf16 | {run._replace(seed=seed): loss for run, loss in earlier.items() for seed in (0, 1)}
    here = both | {anchor._replace(arithmetic="bfloat16"): 5.75}
    lines = training_again.tables({"then": both}, here)
    assert lines[-3:] == [
        "| then | bfloat16 - float32 | 0 | +0.0000 | +0.2500 |",
        "| then | bfloat16 - float32 | 1 | +0.0000 | +0.0000 |",
        "| then | bfloat16 - float32 | mean | +0.0000 | +0.1250 |",
    ]


def test_earlier_losses_are_weighted_by_the_width_of_their_bands(tmp_path):
    file = tmp_path / "earlier.csv"
    file.write_text("arithmetic,variant,seed,tokens,1-63,256-511,512-1023,copy 64\nfloat32,full,3,8,9,1,4,9\n")
    assert training_again.read_earlier(file) == {("float32", "full", 3): pytest.approx(3.0)}
