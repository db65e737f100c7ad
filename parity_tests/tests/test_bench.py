"""`benchmarks.speed` runs, and the numbers of the page are those of the results."""

from pathlib import Path

from benchmarks.bench_page import write

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_page_shows_what_was_measured(tmp_path):
    """Written again from the kept results, the page is the same."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    shown = [path for path in RESULTS if f"bench_page of {path.name}" in text]
    assert 0 < len(shown) == text.count("<!-- made by benchmarks/bench_page of ")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    write(tmp_path / "page.md", shown)
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text
