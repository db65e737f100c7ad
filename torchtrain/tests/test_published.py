"""The paper's numbers in configs/paper/results.yaml, and docs/evaluation.md's table of them."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "configs" / "paper" / "results.yaml").read_text())["tables"]


def test_what_the_paper_prints_beside_its_tables_follows_from_our_copy():
    """Table 3's means, table 4's falls beyond the trained length, and the three places where two tables disagree."""
    rows = {n: {name: row for t in TABLES if t["table"] == n for name, row in t["rows"].items()} for n in (2, 3, 4)}
    means = {"500": 20.80, "10K": 42.66, "200K": 79.81, "600K": 82.70, "900K": 82.64, "5M": 81.48, "1B": 78.47}
    assert {name: sum(row) / 4 for name, row in rows[3].items()} == {
        f"RoPE {base}": pytest.approx(mean, abs=0.006) for base, mean in means.items()
    }
    falls = [30.95, 14.83, 22.84, 7.15, 11.18, 8.06, 23.01, 26.94, 19.58]
    assert [row[1] - row[0] for row in rows[4].values()] == pytest.approx(falls)
    differ = [name for name, (_, at_64k) in rows[4].items() if name in rows[2] and rows[2][name][0] != at_64k]
    assert differ == ["RoPE 1M", "YaRN 5M"]
    icl = {t["training"]: t["rows"]["anchor+tag"][1] for t in TABLES if t["table"] == 12}
    assert icl["UpSampledMix-128K"] == 49.70  # 50.70 in table 7


def test_the_page_holds_our_copy_of_table_5():
    (ours,) = [t for t in TABLES if (t["table"], t.get("training")) == (5, "SlimPajama-64K")]
    lines = (ROOT / "docs" / "evaluation.md").read_text().splitlines()
    for name, row in ours["rows"].items():
        assert f"| {name} | {' | '.join(f'{score:.2f}' for score in row)} |" in lines
