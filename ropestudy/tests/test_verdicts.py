"""Verdicts of the study follow from the numbers."""

import pytest

from ropestudy.report.claims import Claim, Comparison, above
from ropestudy.report.effects import known
from ropestudy.report.select import number, one_rounding
from ropestudy.schema import ByLength, LengthPoint, PairDifference, Score, ShiftPairs
from ropestudy.tests.by_hand import (
    BF16,
    FLASH,
    about,
    claims,
    diff,
    emulation,
    frequency,
    kl,
    lengths,
    mask_pair,
    own_error,
    packed,
    pairs,
    score,
    stat,
    study,
    tokens,
)

AT, BASE = one_rounding(BF16), score("baseline", 0.01, base=BF16)
BOS_FIRST = score("first_token", 0.01, base=BF16)
PAIRED = pairs(0.01)
AFTER = score("control", 0.01, condition="q, k rounded after RoPE", base="exact")


def off(shift: float, sites: str = "table") -> Score:
    return score("off_alone", shift, condition=f"{BF16} - {sites}", base=BF16, site=sites)


def without_bos(shift: float, mass: float = 0.1) -> Score:
    """Its first column receives a part of the attention: 0.6 is what `diff` has it receive with the BOS first."""
    fields = {mode: diff(shift, first_mass_unweighted=mass) for mode in ("local", "propagated")}
    return score("first_token", shift, base=BF16, text="none").model_copy(update={"shift": fields})


def remedy(shift: float, error: float) -> Score:
    return score("remedy", shift, error, condition=f"{BF16}: split q and k", base=BF16)


def before(shift: float) -> Score:
    return score("control", shift, condition="q, k rounded before RoPE", base="exact")


def per_mass(first: float, rest: float) -> Score:
    found = diff(0.01, first_per_mass=first, rest_per_mass=rest)
    return score("first_token", 0.01).model_copy(update={"shift": {"local": found}})


def phases(shift: float) -> Score:
    return score("control", shift, condition=f"{BF16}: random phases 0", base=BF16, d2=0)


def at_one_distance(far: float) -> ShiftPairs:
    ends = {(0, 1): 0.01, (1, 2): 0.01 * far}
    made = [PairDifference(d1=a, d2=b, difference=diff(row)) for (a, b), row in ends.items()]
    return ShiftPairs(**about(), mode="local", pairs=made)


TRIED = {
    # claim: records under which it holds, records under which it does not
    "not-relative": ([pairs(2 * AT)], [pairs(AT / 2)]),
    "fp32-relative": ([pairs(AT / 2, "fp32")], [pairs(2 * AT, "fp32")]),
    "samples": ([pairs(0.01), pairs(1e-7, "fp32")], [pairs(1e-7), pairs(0.01, "fp32")]),
    "amplified": ([PAIRED, pairs(0.005, model="kaiming")], [PAIRED, pairs(0.02, model="kaiming")]),
    "first-most": ([tokens(1.5, 0.6)], [tokens(1.5, 0.2)]),
    "grows": ([lengths(0.5, 0.1)], [lengths(-0.2, 0.1)]),
    "only-first": ([lengths(0.5, 0.1)], [lengths(0.5, 0.9)]),
    "reset-matters": (
        [mask_pair(0.01, BF16), mask_pair(1e-15, "exact")],
        [mask_pair(1e-9, BF16), mask_pair(1e-3, "exact")],
    ),
    "reset-helps": (
        [packed("intra", 0.02), packed("intra_reset", 0.01)],
        [packed("intra", 0.01), packed("intra_reset", 0.02)],
    ),
    "anchor-helps": ([packed("full", 0.02), packed("anchor", 0.01)], [packed("full", 0.01), packed("anchor", 0.02)]),
    "anchor-over-intra": (
        [packed("intra", 0.02), packed("anchor", 0.01)],
        [packed("intra", 0.01), packed("anchor", 0.02)],
    ),
    "after": ([AFTER, before(0.0)], [AFTER, before(0.02)]),
    "one-cast": ([BASE, off(0.003)], [BASE, off(0.009)]),
    "all-of-rope": ([BASE, off(0.003, "table, rope_sum")], [BASE, off(0.009, "table, rope_sum")]),
    "phases": ([BASE, phases(0.01)], [BASE, phases(0.001)]),
    "distance": ([at_one_distance(1.0)], [at_one_distance(2.0)]),
    "zero": ([own_error(1.5, 2.0)], [own_error(0.5, 0.9)]),
    "position": ([own_error(1.0, 9.0)], [own_error(1.0, 1.1)]),
    "mass": (
        [per_mass(0.2, 0.1)],
        [per_mass(0.1, 0.2)],
    ),
    "sink": (
        [BOS_FIRST, without_bos(0.005)],
        [BOS_FIRST, without_bos(0.02)],
    ),
    "frequency": ([frequency(0.03, 0.01)], [frequency(0.01, 0.01)]),
    "cost": ([BASE], [score("baseline", 0.01, base=BF16, kl_shift=kl(9.0), kl_error=kl(1.0))]),
    "remedies-shift": ([BASE, remedy(0.001, 0.01)], [BASE, remedy(0.009, 0.001)]),
    "remedies-error": ([BASE, remedy(0.009, 0.001)], [BASE, remedy(0.001, 0.009)]),
    "emulation": ([emulation(1.0)], []),
    "same-numbers": ([emulation(1.0)], [emulation(1.01)]),
}  # fmt: skip
TRIED["by-length"] = (
    [ByLength(**about(), mode="local", d1=0, d2=16, points=[
        LengthPoint(tokens=T, sequences=2, shift=diff(row), error=diff(row), columns={}, columns_d={})
        for T, row in ((8, 0.001), (32, 0.01))])],
    [ByLength(**about(), mode="local", d1=0, d2=16, points=[
        LengthPoint(tokens=T, sequences=2, shift=diff(row), error=diff(row), columns={}, columns_d={})
        for T, row in ((8, 0.01), (32, 0.009))])],
)  # fmt: skip


for _key in ("reset-helps", "anchor-helps", "anchor-over-intra"):
    TRIED[f"{_key}-outputs"] = TRIED[_key]


def test_a_mask_may_bring_attention_closer_and_not_the_outputs():
    full, anchor = packed("full", 0.02), packed("anchor", 0.01)
    found = claims(study(full, anchor.model_copy(update={"kl_error": kl(0.03)})))
    assert (found["anchor-helps"].verdict, found["anchor-helps-outputs"].verdict) == ("holds", "does not hold")


def test_what_grows_beyond_every_row_does_not_grow_in_them():
    record = own_error(1.0, 1.1)
    far = record.points[-1].model_copy(update={"shift": 2**23, "error": diff(0.05)})
    claim = claims(study(record.model_copy(update={"points": [*record.points, far]})))["position"]
    assert [case.yes for case in claim.cases] == [False, True]
    assert "up to 1,048,576 1.1" in claim.numbers
    assert "beyond 5" in claim.numbers


def test_a_verdict_of_many_cases_tells_how_many_say_what():
    small, large = pairs(AT / 2), pairs(2 * AT, tokens=64)
    claim = claims(study(large, small))["not-relative"]
    assert claim.tally.startswith("yes in ")
    assert claims(study(large))["not-relative"].tally == ""


def test_what_is_no_remedy_is_counted_among_none():
    remedy, harm = (
        score("remedy", x, x, condition=f"{BF16}: {name}", base=BF16)
        for name, x in (("fp32 q and k", 0.004), ("bf16 inverse frequencies", 0.2))
    )
    claim = claims(study(BASE, remedy, harm))["remedies-error"]
    assert {case.where["remedy"] for case in claim.cases} == {"fp32 q and k"}


def test_every_claim_is_tried():
    assert set(TRIED) == set(claims(study()))


@pytest.mark.parametrize("key", TRIED)
def test_a_verdict_flips_with_the_numbers(key):
    holds, fails = TRIED[key]
    assert claims(study(*holds))[key].verdict == "holds"
    if fails:
        assert claims(study(*fails))[key].verdict == "does not hold"


def test_what_is_not_there_is_not_measured():
    assert {claim.verdict for claim in claims(study()).values()} == {"not measured"}


def test_sites_left_out_together_are_no_single_cast():
    found = claims(study(BASE, off(0.009), off(0.003, "table, rope_sum")))
    assert (found["one-cast"].verdict, found["all-of-rope"].verdict) == ("does not hold", "holds")


def test_rounding_before_that_errs_less_is_not_the_same_rounding():
    small = before(0.0).model_copy(update={"error": {mode: diff(1e-4) for mode in ("local", "propagated")}})
    assert claims(study(AFTER, small))["after"].verdict == "does not hold"


@pytest.mark.parametrize("moves", [0.004, 0.021])
def test_phases_that_move_far_less_or_more_are_not_as_neutral(moves):
    assert claims(study(BASE, phases(moves)))["phases"].verdict == "does not hold"


def test_phases_of_other_sequences_are_not_compared():
    assert claims(study(BASE, phases(0.01).model_copy(update={"sequences": 3})))["phases"].verdict == "not measured"


def test_a_text_whose_first_token_is_the_sink_again_is_not_judged():
    claim = claims(study(BOS_FIRST, without_bos(0.005, mass=0.6)))["sink"]
    assert claim.verdict == "not measured"
    assert "no BOS: 60% (BOS first: 60%)" in claim.note


def test_a_torch_study_beside_does_not_take_the_oracles_place():
    torchs = pairs(0.001, attention_from="torch eager")
    assert claims(study(PAIRED, pairs(0.005, model="kaiming"), torchs))["amplified"].verdict == "holds"


def test_an_emulation_over_its_allowance_is_named_by_its_layer():
    claim = claims(study(emulation(1.01)))["emulation"]
    assert (claim.verdict, claim.depends) == ("depends", "the layer: yes for 0; no for 1")


def case(yes: bool, **where: str) -> Comparison:
    return above(where, known(2.0 if yes else 0.5), 1)


def test_the_verdict_is_that_of_the_case_a_training_run_is_in():
    results = study(pairs(2 * AT, mode="propagated"), pairs(AT / 2), pairs(2 * AT, FLASH, mode="propagated"))
    claim = claims(results)["not-relative"]
    assert (claim.verdict, claim.depends) == ("holds", "")
    assert claim.exceptions == "the mode: yes for propagated; no for local"


def test_positions_from_0_decide_nothing_where_others_were_measured():
    cases = [case(True, positions="from 0"), case(False, positions="from 4,080"), case(False, positions="a gap of 9")]
    claim = Claim("k", "says", "s", "c", "n", "f", cases)
    assert claim.verdict == "does not hold"
    assert Claim("k", "says", "s", "c", "n", "f", cases[:1]).verdict == "holds"


def test_what_it_depends_on_is_the_factor_that_tells_yes_from_no():
    cases = [case(preset != "flash_bf16", preset=preset, mode="propagated") for preset in (BF16, FLASH)]
    claim = Claim("k", "says", "s", "c", "n", "f", cases)
    assert (claim.verdict, claim.depends) == ("depends", f"the preset: yes for {BF16}; no for {FLASH}")


def test_two_factors_together_may_tell_them_apart():
    remedies = [str(i) for i in range(9)]
    cases = [
        case((m, r) == ("a", "3"), mask=m, remedy=r, length=n)
        for m in ("a", "b") for r in remedies for n in ("8", "16")
    ]  # fmt: skip
    claim = Claim("k", "says", "s", "c", "n", "f", cases)
    assert claim.depends == "the mask and the remedy: yes for a, 3; no for all others"


def test_where_no_factor_does_the_cases_are_counted():
    cases = [case((m, s) == ("a", "1"), mask=m, shift=s) for m in ("a", "b") for s in "12"]
    claim = Claim("k", "says", "s", "c", "n", "f", cases)
    assert claim.depends == "the case: yes in 1, no in 3 of 4"


def test_an_interval_over_the_margin_settles_nothing():
    spread = diff(AT).model_copy(update={"row": stat(AT, 0.5)})
    one = ShiftPairs(**about(), mode="local", pairs=[PairDifference(d1=0, d2=16, difference=spread)])
    claim = claims(study(one))["not-relative"]
    assert (claim.verdict, claim.depends, claim.exceptions) == ("not settled", "", "")
    assert f"{number(AT)} ({number(AT / 2)} to {number(1.5 * AT)})" in claim.numbers


def test_one_rounding_is_what_rounding_moves():
    import jax.numpy as jnp
    import numpy as np

    mantissas = np.exp2(np.linspace(0, 1, 2**16, endpoint=False))
    rounded = np.asarray(jnp.asarray(mantissas, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32), np.float64)
    measured = (np.abs(rounded - mantissas) / mantissas).mean()
    assert f"{one_rounding(BF16):.2g}" == f"{measured:.2g}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.5e-7, "1.50e-7"),
        (1234.5, "1,234"),
        (2e8, "2.00e8"),
        (1.0, "1"),
        (999.9, "1,000"),
    ],
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown


def test_a_claim_tried_at_the_beginning_of_a_row_says_so():
    tried = claims(study(tokens(9.0), lengths(0.5, 0.1), pairs(0.01), pairs(1e-7, "fp32")))
    assert tried["first-most"].numbers.endswith("(at position 0, 32 tokens)")
    for key in ("grows", "only-first", "by-length"):
        assert tried[key].numbers.endswith("(at position 0, 8 to 32 tokens)"), key
    assert tried["not-relative"].numbers.endswith("(in part at position 0, 32 tokens)")
    assert "intervals" not in tried["samples"].numbers
    later = lengths(0.5, 0.1).model_copy(update={"d1": 16, "d2": 32})
    assert "at position 0" not in claims(study(later))["grows"].numbers
