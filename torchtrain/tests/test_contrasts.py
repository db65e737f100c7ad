"""What the differences between an experiment's runs say: contrasts, their intervals, their verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from torchtrain.experiment.effects import contrasts, estimate, loss_from, loss_in, second_time
from torchtrain.experiment.spec import PairedRun
from torchtrain.tests.measurements import measurement


def measured_cells(seeds):
    shifts = {"bfloat16": 0.5, "float32": 0.0}
    return {
        (PairedRun(arithmetic, variant, seed), 4): measurement(shifts[arithmetic])
        for arithmetic in shifts
        for variant in ("intra", "anchor")
        for seed in seeds
    }


def test_a_contrast_is_the_difference_of_differences_with_students_interval_over_seeds():
    measured = measured_cells((0, 1, 7))
    (wanted,) = (c for c in contrasts(["bfloat16", "float32"], ["intra", "anchor"]) if c.name.startswith("(anchor"))
    found = estimate(wanted, measured, loss_from(8), 4)
    assert found is not None

    def mean(arithmetic, variant, seed):
        losses = np.array(measured[PairedRun(arithmetic, variant, seed), 4].losses)
        return (losses[:, 1] * 8 + losses[:, 2] * 24).mean() / 32

    each = [
        mean("bfloat16", "anchor", seed) - mean("bfloat16", "intra", seed)
        - (mean("float32", "anchor", seed) - mean("float32", "intra", seed))
        for seed in (0, 1, 7)
    ]  # fmt: skip
    interval = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    np.testing.assert_allclose(found.each, each)
    np.testing.assert_allclose([found.mean, found.low, found.high], [np.mean(each), *interval])
    assert (found.seeds, found.over) == ((0, 1, 7), "3 seeds")
    assert estimate(wanted, measured, loss_from(8), 5) is None


def test_an_arithmetics_cost_is_taken_over_all_variants_too():
    measured = measured_cells((0, 1, 7))
    found = {
        one.contrast.name: one
        for contrast in contrasts(["bfloat16", "float32"], ["intra", "anchor"])
        if (one := estimate(contrast, measured, second_time(), 4)) is not None
    }
    each = [found[f"bfloat16 - float32, {variant}"].each for variant in ("intra", "anchor")]
    over_all = found["bfloat16 - float32, mean of 2 masks"]
    np.testing.assert_allclose(over_all.each, np.mean(each, axis=0))
    interval = stats.ttest_1samp(over_all.each, 0).confidence_interval(0.95)
    np.testing.assert_allclose([over_all.low, over_all.high], interval)
    assert not any("masks" in one.name for one in contrasts(["bfloat16", "float32"], ["intra"]))


def test_one_seed_has_the_interval_of_its_documents():
    measured = measured_cells((3,))
    found = estimate(contrasts(["bfloat16", "float32"], ["intra"])[0], measured, second_time(), 4)
    assert found is not None
    runs = [measured[PairedRun(a, "intra", 3), 4] for a in ("bfloat16", "float32")]
    pairs = [np.array(run.copies).mean(axis=1) - run.passages for run in runs]
    interval = stats.ttest_rel(*pairs).confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], interval)
    assert found.over == "5 documents, one seed"


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.02, 0.03, "more"),
        (-0.03, -0.02, "less"),
        (-0.01, 0.01, "less than the margin either way"),
        (0.005, 0.03, "not settled"),
        (-math.inf, math.inf, "not settled"),
    ],
)
def test_a_verdict_is_where_the_interval_lies(low, high, says):
    measured = measured_cells((0, 1))
    alone = estimate(contrasts(["float32"], ["intra", "anchor"])[0], measured_cells((4,)), second_time(), 4)
    assert alone is not None
    assert type(alone)(**(vars(alone) | {"low": low, "high": high})).verdict(0.01) == "one seed"
    found = estimate(contrasts(["float32"], ["intra", "anchor"])[0], measured, second_time(), 4)
    assert found is not None
    assert type(found)(**(vars(found) | {"low": low, "high": high})).verdict(0.01) == says


def test_every_contrast_of_paired_runs_sums_to_nothing():
    """So whatever all runs share is gone."""
    for contrast in contrasts(["bfloat16", "rotation_float32", "float32"], ["full", "intra", "intra_reset", "anchor"]):
        assert sum(contrast.weights.values()) == 0, contrast
        assert sum(abs(weight) for weight in contrast.weights.values()) in (2, 4), contrast
    names = {contrast.name for contrast in contrasts(["bfloat16"], ["intra", "anchor"])}
    assert names == {"anchor - intra, bfloat16"}


def test_parts_of_an_outcome_have_it_for_their_mean():
    run = measured_cells((3,))[PairedRun("float32", "intra", 3), 4]
    bands = [number for number, (first, _) in enumerate(run.bands) if first >= 8]
    widths = [run.bands[number][1] - run.bands[number][0] for number in bands]
    np.testing.assert_allclose(
        np.average([loss_in(number)(run) for number in bands], axis=0, weights=widths), loss_from(8)(run)
    )
    each = [second_time(number)(run) for number in range(len(run.distances))]
    np.testing.assert_allclose(np.mean(each, axis=0), second_time()(run))
    np.testing.assert_allclose(each[0], np.array(run.copies)[:, 0] - run.passages)
