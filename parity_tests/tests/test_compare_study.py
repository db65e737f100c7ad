"""What docs/same-computation.md says of `parity compare` is what benchmarks/compare_study.py measured."""

import json
import re
from pathlib import Path

from benchmarks.compare_study import CHANGES, DTYPES, RESULT, ROWS_OF_STUDY, WAYS, judge

PAGE = Path(__file__).parents[2] / "docs" / "same-computation.md"
WORDS = ("none", "one", "two", "three", "four", "five", "six")


def test_the_page_has_the_rates_of_the_kept_results():
    kept = json.loads(RESULT.read_text(encoding="utf-8"))
    assert kept["wrong"].keys() == ROWS_OF_STUDY.keys() == CHANGES.keys()
    found = {d: [(kept["wrong"][key][d][1], first) for key, (_, _, first) in ROWS_OF_STUDY.items()] for d in DTYPES}
    assert all(name is not None and name.startswith(first) for name, first in found["float32"])
    pairs = [name for each in kept["right"].values() for _, name, _ in each]
    missed = sum(name is None for name, _ in found["bfloat16"])
    alarms = sum(name is not None for name in pairs)
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    assert len(CHANGES) == 40
    assert "In float32 all forty are caught at the right array." in text
    assert f"In bfloat16 {WORDS[missed]} are within rounding and missed" in text
    assert f"Of {len(pairs)} pairs that are right {WORDS[alarms]} fails" in text


def test_a_change_is_caught_and_a_right_way_is_not():
    ratio, name, _ = judge(0, "float32", CHANGES["no_scale"])
    assert ratio > 1
    assert name is not None
    assert name.startswith(ROWS_OF_STUDY["no_scale"][2])
    assert judge(0, "float32", *WAYS["SDPA"])[1] is None
