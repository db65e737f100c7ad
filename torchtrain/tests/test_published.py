"""docs/evaluation.md's numbers of the paper are those of configs/paper/results.yaml."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "configs" / "paper" / "results.yaml").read_text())["tables"]


def test_the_page_has_the_longest_rows_of_table_5():
    (ours,) = [t for t in TABLES if (t["table"], t.get("training")) == (5, "SlimPajama-64K")]
    text = " ".join((ROOT / "docs" / "evaluation.md").read_text().split())
    for name, row in ours["rows"].items():
        assert f" {name} {row[0]:.2f}" in text
