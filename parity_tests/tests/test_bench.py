"""The trainer's benchmark judges by the one rule, which it cannot import; and what stands on the page is its JSON's."""

import json
import math
from pathlib import Path

import pytest
import torch

from anchorline.tolerance import judge
from benchmarks.bench_page import write
from torchtrain.bench.measure import error_ratio

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-cpu.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error", [0.0, 1e-3, 1e-2, 1.0, float("nan"), float("inf")])
def test_the_benchmark_judges_as_the_judge(dtype, error):
    torch.manual_seed(0)
    truth = torch.randn(50, dtype=torch.float64)
    reference, candidate = truth.to(dtype), (truth + error * torch.randn(50)).to(dtype)
    verdict = judge(candidate.double(), truth, reference.double(), str(dtype).removeprefix("torch."))
    found = error_ratio(candidate, truth, reference, dtype)
    assert (found <= 1) == verdict.passed
    assert math.isclose(found, verdict.ratio, rel_tol=1e-6) or math.isinf(found)


def test_a_section_is_written_where_it_stood(tmp_path):
    assert RESULTS, "results that the page shows"
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nBefore.\n")
    write(page, RESULTS)
    first = page.read_text()
    page.write_text(first + "\nAfter.\n")
    write(page, RESULTS)
    assert page.read_text() == first + "\nAfter.\n"
    assert first.startswith("# Page\n\nBefore.\n\n<!-- made by")


def test_the_page_shows_what_was_measured():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for path in RESULTS:
        told = json.loads(path.read_text())["environment"]
        assert f"made by benchmarks/bench_page of {path.name}" in page
        assert f"{told['date']}, {told['device']}" in page
        assert told["command"] in page
