"""The zoo: every bug is found, undone without a trace and caught; the correct code is not."""

from contextlib import contextmanager
from typing import get_args

import pytest

import torchtrain
from parity_tests.gate.judge import run_case
from parity_tests.gate.spec import CaseSpec
from parity_tests.report.schema import Group
from parity_tests.zoo import Bug, discover, plain
from parity_tests.zoo.patch import documents, every_engine
from parity_tests.zoo.run import Tries, order

BUGS = discover()
FORWARD = CaseSpec(model="llama", variant="anchor", dtype="float32", stages=("forward",))
TRAINING = FORWARD.model_copy(update={"stages": ("loss", "gradients", "step")})
# Under a schedule, by two ranks: what a single rank at a constant rate cannot show.
SHARED = TRAINING.model_copy(update={"schedule": "cosine", "warmup_steps": 5, "ranks": 2})
WEIGHED = SHARED.model_copy(update={"weights": True, "stages": ("loss", "gradients")})
INSIDE = FORWARD.model_copy(update={"padding": "inside"})
RUN = FORWARD.model_copy(update={"stages": ("run",), "infinite_step": 2})
SINKS = FORWARD.model_copy(update={"model": "sinks"})
CAPPED = FORWARD.model_copy(update={"model": "capped", "engine": "dense", "beyond_window": "anchor"})
# One of each kind that needs no case of its own; `parity zoo` runs all of them.
QUICK = (
    *("rope_angles_in_bf16", "rope_interleaved", "rope_sign", "positions_reset", "causal_top_left", "documents_leak"),
    *("anchor_for_first_document", "gqa_heads_tiled", "softmax_scale_missing", "lse_without_anchor", "padding_visible"),
    *("rmsnorm_epsilon_outside", "gelu_for_silu", "weight_transposed", "labels_shifted_twice", "loss_per_micro_batch"),
    *("anchor_key_gradient_dropped", "clip_per_parameter", "weight_decay_on_norms", "adam_epsilon_inside"),
    *("warmup_from_zero", "weight_decay_at_the_peak", "loss_per_rank", "reduced_every_micro_batch"),
    *("window_off_by_one", "anchor_behind_window", "cap_after_mask", "sink_of_group"),
    *("padding_splits_a_document", "orders_of_one_epoch", "cut_repeats_a_token", "moments_lost_on_resuming"),
    *("infinite_gradient_zeroed", "infinite_gradient_kept", "labels_of_first_row"),
    *("weight_of_the_neighbour", "weights_divided_by_tokens", "weights_lost_in_accumulation", "weights_summed_by_rank"),
)


@pytest.fixture(scope="module", autouse=True)
def _plug_in():
    torchtrain.register()


@pytest.fixture(scope="module")
def tries() -> Tries:
    return Tries()


def test_every_bug_says_what_it_is_and_where_it_happened():
    assert len(BUGS) >= 44
    for bug in BUGS.values():
        assert bug.stage in get_args(Group)
        assert set(bug.likely) <= set(CaseSpec.model_fields)
        for line in (bug.what, bug.where):
            assert line == line.strip() != ""
            assert "\n" not in line


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", QUICK)
def test_a_bug_is_caught(name, tries):
    bug = BUGS[name]
    kill = tries.try_bug(bug, order(bug, [FORWARD, TRAINING, SHARED, WEIGHED, INSIDE, RUN, SINKS, CAPPED]))
    assert kill.caught
    assert kill.reversible


def test_the_ground_that_bugs_are_made_on_is_sound(monkeypatch, tries):
    """What is caught of a bug in plain attention or plain AdamW is the bug."""
    monkeypatch.setattr("torch.optim.AdamW", plain.AdamW)
    with every_engine(plain.attend):
        for spec in (FORWARD, TRAINING, SINKS, CAPPED):
            case = run_case(spec, tries.oracle)
            assert case.passed, case.first_divergence or case.problem


def test_a_patch_that_no_longer_fits_catches_nothing(tries):
    kill = tries.try_bug(Bug(lambda: every_engine(lambda q: q)), [FORWARD])
    assert not kill.caught
    assert kill.broken is not None
    assert kill.broken.startswith("TypeError: ")


def test_a_bug_that_is_not_undone_is_told(tries):
    leak = documents(lambda ids: ids.clamp(max=1))

    @contextmanager
    def enter_and_stay():
        leak.__enter__()
        yield

    try:
        kill = tries.try_bug(Bug(enter_and_stay), [FORWARD])
    finally:
        leak.__exit__(None, None, None)
    assert kill.caught
    assert not kill.reversible
