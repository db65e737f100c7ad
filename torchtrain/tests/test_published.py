"""docs/evaluation.md's table of the paper's numbers is that of configs/paper/results.yaml."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "configs" / "paper" / "results.yaml").read_text())["tables"]


def test_the_page_holds_our_copy_of_table_5():
    (ours,) = [t for t in TABLES if (t["table"], t.get("training")) == (5, "SlimPajama-64K")]
    lines = (ROOT / "docs" / "evaluation.md").read_text().splitlines()
    for name, row in ours["rows"].items():
        assert f"| {name} | {' | '.join(f'{score:.2f}' for score in row)} |" in lines
