"""The choice of an engine by measuring, with stand-ins of engines that take their time, and of some that are wrong."""

from unittest.mock import patch

import pytest
import torch

from anchorline.errors import UserError
from torchtrain.attention import make_plan
from torchtrain.attention.engines.choice import ENGINES
from torchtrain.attention.engines.dense import attend_dense
from torchtrain.attention.engines.measure import Heads, check_engine, describe, list_candidates, measure_engines
from torchtrain.training.determinism import deterministic

HEADS = Heads(4, 2, 8, torch.bfloat16, torch.device("cpu"))
ROWS = [make_plan(torch.tensor([[0] + [1] * n + [2] * (39 - n)])) for n in (10, 20)]


CLOCK = [0.0]  # what time.perf_counter says


def takes(first, later):
    """Return an engine that is right, and takes so many seconds for a row of lengths that it has not seen, or has."""
    seen = set()

    def engine(q, k, v, plan, layer):
        CLOCK[0] += later if plan.seqlens_q in seen else first
        seen.add(plan.seqlens_q)
        return attend_dense(q, k, v, plan, layer)

    return engine


def top_left(q, k, v, plan, layer):
    """Causal by the distance from the first key of a segment: with an anchor in front a query misses its last keys."""
    rolled = [torch.cat([x[:, 2:], x[:, :2]], 1) for x in (k, v)]
    return attend_dense(q, *rolled, plan, layer)


def wrong_backward(q, k, v, plan, layer):
    out, lse = attend_dense(q, k, v, plan, layer)
    return out.detach() + 1.02 * (out - out.detach()), lse


def sees_padding(q, k, v, plan, layer):
    out, lse = attend_dense(q, k, v, plan, layer)
    return out + (plan.document_ids_BT < 0)[..., None, None] * v.repeat_interleave(2, 2), lse


def without_anchor(q, k, v, plan, layer):
    return attend_dense(q, k, v, make_plan(plan.document_ids_BT.where(plan.document_ids_BT != 0, 9)), layer)


def noisy(q, k, v, plan, layer):
    """Right, in another order of sums each time."""
    CLOCK[0] += 1
    return attend_dense(q, k * (1 + 2.0**-9 * (CLOCK[0] % 2)), v, plan, layer)


def no_kernel(*_):
    raise UserError("attention: no kernel here")


def test_the_fastest_on_a_row_that_it_has_not_seen_counts():
    engines = {"builds": takes(0.3, 0), "steady": takes(0.05, 0.05), "missing": no_kernel, "wrong": top_left}
    with patch.dict(ENGINES, engines), patch("time.perf_counter", lambda: CLOCK[0]):
        found = measure_engines(list(engines), ROWS, HEADS)
    assert (found["builds"], found["steady"]) == pytest.approx((0.3, 0.05))
    assert found["missing"] == "attention: no kernel here"
    assert "it may align its mask otherwise" in found["wrong"]
    line = describe({"a": 0.0123, "b": 0.5, "c": "attention c: no kernel"}, "a")
    assert line == (
        "auto: a 12.3 ms, b 500 ms for a row of new lengths, forward and backward, so a; attention c: no kernel"
    )


def test_determinism_narrows_the_choice():
    with patch.dict(ENGINES, {"noisy": noisy}), deterministic(True):
        found = measure_engines(["noisy", "sdpa"], ROWS, HEADS)
    assert found["noisy"] == "attention noisy: its bits differ from one time to the next (train.deterministic)"
    assert isinstance(found["sdpa"], float)
    with patch.dict(ENGINES, {"noisy": noisy}):
        assert isinstance(measure_engines(["noisy"], ROWS, HEADS)["noisy"], float)


def test_auto_measures_what_is_installed(monkeypatch):
    monkeypatch.setattr("torchtrain.attention.engines.measure.version", lambda package: None)
    assert list_candidates() == ["flash", "sdpa"]
    monkeypatch.setattr("torchtrain.attention.engines.measure.version", lambda package: "4" if "4" in package else None)
    assert list_candidates() == ["flash", "sdpa", "flash4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [top_left, wrong_backward, sees_padding, without_anchor])
def test_an_engine_that_computes_something_else_is_refused_in_a_line(wrong, dtype):
    heads = Heads(4, 2, 8, dtype, HEADS.device)
    with patch.dict(ENGINES, {"other": wrong}), pytest.raises(UserError, match=r"attention other: its .* wrong here"):
        check_engine("other", heads)
    for right in ("dense", "sdpa"):
        check_engine(right, heads)
