"""What docs/same-computation.md says of `parity compare` is what benchmarks/compare_study.py measured."""

import json

import pytest

from benchmarks import compare_study as study


def test_the_page_has_the_kept_results_and_only_right_pairs_and_float32_are_promised():
    kept = json.loads(study.RESULT.read_text(encoding="utf-8"))
    assert kept["wrong"].keys() == study.ROWS_OF_STUDY.keys() == study.CHANGES.keys()
    assert kept["flax"].keys() == study.IN_FLAX
    assert set(kept["right"]) == {study.FLAX, *study.WAYS}
    assert study.format_results(kept) in study.PAGE.read_text(encoding="utf-8")


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


def test_a_loss_that_sums_its_tokens_in_another_order_is_right():
    ratio, name, _ = study.judge(study.dump.__wrapped__(10, "float32", apart=True), 10, "float32")
    assert name is None, ratio
