"""docs/training-experiment.md's table of real text is what `torchtrain compare` makes of the results."""

from pathlib import Path

from torchtrain.evaluation.compare import compare

ROOT = Path(__file__).parents[2]
SHOWN = {
    "niah_multikey_1": "needle among four",
    "2,048 to 4,095": "code, 2,048 to 4,095",
    "key tokens": "code, key tokens",
}


def test_the_page_has_the_results_of_real_text():
    results = ROOT / "benchmarks" / "results" / "weights"
    arms = [
        f"{arm}=" + ",".join(str(results / f"{arm}-{seed}") for seed in range(3))
        for arm in ("weighted", "plain", "shuffled")
    ]
    tables = compare(arms)[0]
    rows = {name: cells for table in tables for name, cells in table.rows}
    page = (ROOT / "docs" / "training-experiment.md").read_text(encoding="utf-8")
    for name, called in SHOWN.items():
        assert f"| {called} | {' | '.join(rows[name][-2:])} |" in page
