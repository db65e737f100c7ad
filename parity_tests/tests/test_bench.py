"""The trainer's benchmark judges by the error rule, and the numbers of the page are those of the results."""

import math
from pathlib import Path

import pytest
import torch

from anchorline.tolerance import judge
from benchmarks.bench_page import write
from torchtrain.bench.measure import error_ratio

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error", [0.0, 1e-3, 1e-2, 1.0, float("nan"), float("inf")])
def test_the_benchmark_judges_as_the_judge(dtype, error):
    torch.manual_seed(0)
    truth = torch.randn(50, dtype=torch.float64)
    reference, candidate = truth.to(dtype), (truth + error * torch.randn(50)).to(dtype)
    verdict = judge(candidate.double(), truth, reference.double(), str(dtype).removeprefix("torch."))
    ratio = error_ratio(candidate, truth, reference, dtype)
    assert (ratio <= 1) == verdict.passed
    assert math.isclose(ratio, verdict.ratio, rel_tol=1e-6) or math.isinf(ratio)


def test_the_page_shows_what_was_measured(tmp_path):
    """Written again from the kept results, the page is the same."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    shown = [path for path in RESULTS if f"bench_page of {path.name}" in text]
    assert 0 < len(shown) == text.count("<!-- made by benchmarks/bench_page of ")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    write(tmp_path / "page.md", shown)
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text
