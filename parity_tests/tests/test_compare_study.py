"""What docs/same-computation.md says of `parity compare` is what benchmarks/compare_study.py measured."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import compare_study as study

PAGE = Path(__file__).parents[2] / "docs" / "same-computation.md"
WORDS = ("none", "one", "two", "three", "four", "five", "six")


def test_the_page_has_the_rates_of_the_kept_results():
    kept, firsts = json.loads(study.RESULT.read_text(encoding="utf-8")), study.ROWS_OF_STUDY
    assert kept["wrong"].keys() == firsts.keys() == study.CHANGES.keys()
    assert kept["flax"].keys() == study.IN_FLAX <= firsts.keys()
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    missed = {}
    for writer, first in (("wrong", lambda key: firsts[key][2]), ("flax", study.first_in_flax)):
        found = {d: [(each[d][1], first(key)) for key, each in kept[writer].items()] for d in study.DTYPES}
        assert all(name is not None and name.startswith(at) for name, at in found["float32"])
        missed[writer] = WORDS[sum(name is None for name, _ in found["bfloat16"])]
    assert set(kept["right"]) == {study.FLAX, *study.WAYS}
    pairs = [name for each in kept["right"].values() for _, name, _ in each]
    alarms = WORDS[sum(name is not None for name in pairs)]
    assert f"In float32 all {len(firsts)} are caught at the right array" in text
    assert f"in bfloat16 {missed['wrong']} are within rounding and missed" in text
    assert f"{len(kept['flax'])} of them were also written by `jaxref`" in text
    assert f"in bfloat16 {missed['flax']} are missed" in text
    assert f"Of {len(pairs)} pairs that are right {alarms} fail:" in text


@pytest.mark.parametrize("key", ["no_scale", "gelu", "rows"])  # a setting, a module, a weight
def test_a_change_is_caught_and_a_right_way_is_not(key):
    wrong = {
        study.ROWS_OF_STUDY[key][2]: study.dump.__wrapped__(0, "float32", study.CHANGES[key]),
        study.first_in_flax(key): study.dump_of_flax(0, "float32", key),
    }
    for first, dump in wrong.items():
        ratio, name, _ = study.judge(dump, 0, "float32")
        assert ratio > 1
        assert name is not None
        assert name.startswith(first)
    # The loss is one number, whose reference may err little by luck: the page counts these alarms.
    assert study.judge(study.dump_of_flax(0, "float32"), 0, "float32")[1] in (None, "loss")
