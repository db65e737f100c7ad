"""The study's page: verdicts follow from the numbers, nothing in the results can break it, and what a browser makes of
it.
"""

import csv
import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anchorline.page.colours import DARK, LIGHT
from ropestudy import report
from ropestudy.report import __main__ as again
from ropestudy.report.answers import actions, findings, small_table
from ropestudy.report.claims import Claim, Comparison, above
from ropestudy.report.claims_cause import cause_claims
from ropestudy.report.claims_context import context_claims
from ropestudy.report.claims_paper import paper_claims
from ropestudy.report.docs import BEGIN, COMMANDS_BEGIN, COMMANDS_END, END, FIGURES, numbers, refresh
from ropestudy.report.effects import known
from ropestudy.report.html import SHARES, figures_of, render
from ropestudy.report.select import number, one_rounding
from ropestudy.schema import (
    ByFrequency,
    ByLength,
    Columns,
    Difference,
    EmulationCheck,
    LengthPoint,
    MaskPair,
    ModelDescription,
    Outcome,
    OutputDivergence,
    OwnError,
    OwnErrorPoint,
    PairDifference,
    PairGroup,
    PerToken,
    Results,
    Score,
    ShiftPairs,
    SignedBias,
    Stat,
    StudyEnvironment,
    TextDescription,
    read_results,
    write_results,
)

EVIL = "$x_{1 </script><img src=x onerror=alert(1)> & \"q\" 'a' \x01"
BF16, FLASH = "hf_eager_bf16", "flash_bf16"
TOKENS = 32


# -- results made by hand ----------------------------------------------------------------------------------------------


def stat(value: float, spread: float = 0.05) -> Stat:
    """Two sequences around a value."""
    return Stat(mean=value, std=spread * value * 2**0.5, values=[value * (1 - spread), value * (1 + spread)])


def diff(row: float, **fields: float) -> Difference:
    """A difference that moves `row` per query; every other measure in proportion, unless given."""
    values = {
        "d": 100 * row,
        "d_unweighted": 1000 * row,
        "first_share": 0.2,
        "first_share_unweighted": 0.3,
        "first_mass": 0.4,
    }
    values |= {"first_mass_unweighted": 0.6, "first_per_mass": row / 2, "rest_per_mass": row, "d_logit_first": row}
    values |= {"d_logit_rest": 2 * row, "logit_rms": row, "row": row} | fields
    layers = [values["d"] / 2] * 2
    return Difference(
        **{name: stat(value) for name, value in values.items()}, by_layer=layers, by_head=[[x] for x in layers]
    )


def about(condition: str = BF16, **fields: Any) -> dict[str, Any]:
    return {"model": "pretrained", "condition": condition, "tokens": TOKENS, "sequences": 2} | fields


def pairs(row: float, condition: str = BF16, mode: str = "local", **fields: Any) -> ShiftPairs:
    shifts = [(0, 1), (0, 2), (0, 16), (1, 2), (2, 16), (8, 16), (16, 17), (16, 100)]
    return ShiftPairs(
        **about(condition, **fields),
        mode=mode,
        pairs=[PairDifference(d1=a, d2=b, difference=diff(row)) for a, b in shifts],
    )


def tokens(first: float, share: float = 0.2) -> PerToken:
    """The first column against all others at 1, and its share of D."""
    columns = Columns(
        d=[first, *[1.0] * (TOKENS - 1)], d_std=[0.1] * TOKENS, unweighted=[first, *[1.0] * (TOKENS - 1)],
        mass=[1.0] * TOKENS, d_logit=[1.0] * TOKENS, row=[1.0] * TOKENS,
    )  # fmt: skip
    return PerToken(**about(), mode="local", d1=0, d2=16, difference=diff(0.01, first_share=share), columns=columns)


def lengths(first: float, rest: float, condition: str = BF16) -> ByLength:
    """D_logit at three lengths with a power of the length each."""
    points = [
        LengthPoint(
            tokens=T, sequences=2, shift=diff(0.01 * T**0.1, d_logit_first=T**first, d_logit_rest=T**rest),
            error=diff(0.01), columns={j: T**rest for j in (0, 1, T // 2, T - 1)}, columns_d={0: 1.0},
        )
        for T in (8, 16, 32)
    ]  # fmt: skip
    return ByLength(**about(condition), mode="local", d1=0, d2=16, points=points)


def kl(value: float) -> OutputDivergence:
    return OutputDivergence(kl=stat(value), argmax_differs=stat(0.01))


def score(group: str, shift: float, error: float = 0.01, condition: str = BF16, **fields: Any) -> Score:
    standard = {
        "base": None, "site": None, "text": "first", "mask": "full", "about": "in words", "d1": 0, "d2": 16,
        "shift": {"local": diff(shift), "propagated": diff(2 * shift)},
        "error": {"local": diff(error), "propagated": diff(2 * error)}, "kl_shift": kl(1e-3), "kl_error": kl(1e-3),
    }  # fmt: skip
    known = {name: fields.pop(name) for name in ("model", "tokens", "sequences") if name in fields}
    return Score(**about(condition, **known), group=group, **standard | fields)


def mask_pair(row: float, condition: str) -> MaskPair:
    return MaskPair(
        **about(condition),
        mode="local",
        a="intra",
        b="intra_reset",
        documents=[16, 16],
        difference=diff(row),
        kl=kl(1e-3),
    )


def own_error(others: float, last: float, condition: str = BF16) -> OwnError:
    """Distances from float64: 1e-2 at shift 0, times `others` at small ones, times `last` at the largest."""
    rows = {0: 1e-2, 16: others * 1e-2, 131000: last * 1e-2}
    points = [OwnErrorPoint(shift=d, error=diff(row), from_zero=diff(row) if d else None) for d, row in rows.items()]
    return OwnError(**about(condition), mode="local", points=points)


def frequency(slow: float, fast: float) -> ByFrequency:
    groups = [
        PairGroup(first=i, last=i, wavelengths=wavelengths, shift=diff(row), error=diff(row))
        for i, (wavelengths, row) in enumerate([((6.0, 9.0), fast), ((100.0, 900.0), slow)])
    ]
    return ByFrequency(**about(), mode="local", d1=0, d2=16, groups=groups)


def emulation(ratio: float) -> EmulationCheck:
    return EmulationCheck(
        **about(attention_from="torch eager"), dtype="bfloat16", layers=[0, 1], error=[1e-4, 1e-4],
        reference=[1e-4, 1e-4], ratio=[0.5, ratio], between=[1e-5, 0.0], identical=[0.9, 1.0],
        shift_ratio=ratio, shift_ratio_first=ratio, d_ratio=ratio, d_oracle=stat(1.0), d_torch=stat(1.0), d1=0, d2=16,
    )  # fmt: skip


def packed(mask: str, row: float) -> Score:
    return score("mask", row, row, mask=mask, base=BF16)


def study(*records: Any, **fields: Any) -> Results:
    standard = {
        "title": "By hand",
        "created": "2026-11-21T12:00:00+00:00",
        "seconds": 12.5,
        "command": "jaxref study configs/study/tiny.yaml",
        "environment": StudyEnvironment(
            versions={"jax": "0"}, hardware="a machine", device="cpu", git_commit="abc", git_dirty=True
        ),
        "config": {"shift_pairs": {"d2": 16, "grid": [0, 1, 2]}},
        "model": ModelDescription(
            source="smollm2", config={"num_hidden_layers": 2}, weights="bfloat16", parameters=1000, sha256="0" * 64,
            pair_wavelengths=[6.0, 900.0], initialisations={"kaiming": "a = 0"},
        ),
        "text": TextDescription(source="demo", bos=1, documents=["a speech"]),
        "records": list(records),
    }  # fmt: skip
    return Results(**standard | fields)


def whole() -> Results:
    """A record of every kind."""
    return study(
        *(pairs(0.01, mode=mode) for mode in ("local", "propagated")),
        pairs(1e-7, "fp32"),
        pairs(0.003, model="kaiming"),
        tokens(9.0),
        lengths(0.5, 0.1),
        score("baseline", 0.0, 0.0, "exact"),
        score("baseline", 0.01, base=BF16),
        score("baseline", 0.01, condition=FLASH, base=FLASH),
        score("on_alone", 0.008, condition="on k_rotated", base="exact", site="k_rotated"),
        score("on_alone", 0.0, condition="on probs", base="exact", site="probs"),
        score("off_alone", 0.004, condition=f"{BF16} - table", base=BF16, site="table"),
        score("off_alone", 1e-9, condition=f"{BF16} - table, rope_sum", base=BF16, site="table, rope_sum"),
        score("remedy", 0.001, condition=f"{BF16}: split q and k", base=BF16),
        score("remedy", 0.03, condition=f"{BF16}: fp32 tables", base=BF16),
        score("control", 0.01, condition="q, k rounded after RoPE", base="exact"),
        score("control", 0.0, condition="q, k rounded before RoPE", base="exact"),
        score("control", 0.02, condition=f"{BF16}: random phases 0", base=BF16, d2=0),
        score("control", 0.03, model="kaiming"),
        score("first_token", 0.01, base=BF16),
        score("first_token", 0.005, base=BF16, text="none"),
        score("first_token", 0.02, base=BF16, text="none", condition=f"{BF16} + sink"),
        packed("full", 0.01),
        packed("intra", 0.01),
        packed("intra_reset", 0.005),
        packed("anchor", 0.005),
        mask_pair(0.005, BF16),
        mask_pair(1e-15, "exact"),
        own_error(1.2, 5.0),
        frequency(0.01, 0.002),
        emulation(0.9),
    )


def outcome(condition: str, kl_: float, group: str = "setup", **fields: Any) -> Outcome:
    """Three texts that end at position 8,192 unless other ones are given."""

    def three(value: float) -> Stat:
        return Stat(mean=value, std=0.0, values=[value * x for x in (0.5, 1.0, 1.5)])

    right, lost = fields.pop("right", 0.8), fields.pop("lost", 0.0)
    copied = Stat(mean=right, std=0.0, values=[right - 0.1, right, right + 0.1])
    outputs = OutputDivergence(
        kl=three(kl_), argmax_differs=three(0.01), nll_p=three(3.0), nll_q=three(3.0 + kl_),
        right_p=copied, right_q=Stat(mean=0.0, std=0.0, values=[x - lost for x in copied.values]),
    )  # fmt: skip
    standard = {"task": "text", "about": "in words", "start": 8192 - TOKENS, "gap": 0, "outputs": outputs}
    return Outcome(**about(condition), group=group, **standard | fields)


def bias(common: float, **fields: Any) -> SignedBias:
    """Signed errors of which so much is common."""
    gram = [[1.0, common, common], [common, 1.0, common], [common, common, 1.0]]
    standard = {
        "mask": "full",
        "start": 0,
        "gap": 8000,
        "first": gram,
        "others": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    }
    return SignedBias(**about(BF16), columns=[3], first_abs=stat(0.01), first_mass=stat(0.4), **standard | fields)


def outputs_alone() -> Results:
    """Setups, doses and signed errors."""
    return study(
        outcome(BF16, 1e-3), outcome(FLASH, 1e-3), outcome("paper_bf16", 5e-4), outcome("fa3_fp8", 2e-2),
        outcome("fa3_fp8_before", 1e-2), outcome(f"{BF16}_tf32", 1.0), outcome(f"{BF16}_inv_freq", 1.3e-3),
        outcome("flash_bf16_fp32_qk", 9e-4), outcome(BF16, 7.0, start=0), outcome("fa3_fp8", 9.0, start=0),
        *(
            outcome(f"q and k, {bits} bits", 2.0**-bits, "dose", site="q and k", mantissa_bits=bits, task="copy",
                    gap=8000, start=0, lost=lost)
            for bits, lost in ((3, 0.25), (7, 0.01))
        ),
        outcome("q and k, 7 bits", 2.0, "dose", site="q and k", mantissa_bits=7, task="copy", gap=99_999, right=0.1),
        outcome("on table", 1e-4, "site", site="table"),
        bias(0.9),
    )  # fmt: skip


def test_what_to_do_follows_from_the_numbers():
    heads, rows = actions(outputs_alone())
    assert heads == ["setup", "change", "32 tokens ending at 8,192", "cost"]
    said = {change: cell for _, change, cell, _ in rows}
    assert said["let TF32 multiply positions"] == "**never** 1,000"
    assert said["let inv_freq become bf16"] == "**do not** 1.3"
    assert said["rotate in float32, round once"] == "**do** 0.5"
    assert said["keep q and k in float32"] == "**no matter** 0.9"
    assert said["stay in bf16"] == "**do** 0.05"


def test_findings_have_a_number_each_and_none_is_of_position_0():
    found = findings(outputs_alone())
    assert len(found) == 5
    # Of two rows of 14 tokens 0.8 are right in float64; 0.01 and 0.25 of the 28 are lost.
    assert "7 mantissa bits of q and k (bf16's) lost a net 0 of 22" in found[0]
    assert "3 mantissa bits of q and k (e4m3's, range not limited) lost a net 7 of 22 copies" in found[0]
    assert "net of what it gains: 3 bits 0.312 (0.278 to 0.357); 7 bits 0.0125" in found[0]
    assert "At 99,999 float64 itself copies less than half" in found[0]
    assert "with TF32 the KL is 1,000 times as large" in found[2]
    assert "in the same direction in every text (90 % of the squared error; other tokens 0 %)" in found[3]
    assert "fp8 has up to 20 times the KL of bf16. Rounding before RoPE leaves 0.5 of that" in found[4]
    assert not any("9" in line.partition("**")[0] for line in found)
    only_zero = study(*(outcome(name, 1.0, start=0) for name in (BF16, FLASH, "fa3_fp8", "fa3_fp8_before")))
    assert findings(only_zero) == []
    assert actions(only_zero)[1] == []


def test_where_float32_s_angles_reach_bf16_is_extrapolated_and_checked():
    """A KL that grows as the square of the position, from a millionth of bf16's at 2^13: it meets bf16's at 2^23."""
    ends = {2**13: 2.0**-20, 2**17: 2.0**-12, 2**20: 2.0**-6, 2**24: 4.0}
    records = [
        outcome(name, kl_, start=end - TOKENS)
        for end, fp32 in ends.items()
        for name, kl_ in (("fp32", fp32), ("paper_bf16_angles64", 1.0), (BF16, 1.0), (f"{BF16}_tf32", 2.0))
    ]
    (found,) = findings(study(*records))
    assert "with about the square of the position (exponent 2, 8,192 to 1,048,576) and equals that of bf16" in found
    assert "with exact angles near 8.39e6 positions" in found
    assert "measured at 16,777,216 it is 4 times that" in found


def test_the_page_and_the_document_show_them():
    page, text = render(outputs_alone()), numbers(outputs_alone(), figures_of(outputs_alone()), outputs_alone())
    for shown in (unescape(page), text):
        assert "From setup to action" in shown
        assert "fp8 has up to 20 times" in shown
    assert text.count("### From setup to action") == 2
    assert "figures/precision-dose.png" in text
    assert "## A second model" in text


def test_results_of_version_1_are_read(tmp_path):
    old = json.loads(study(score("baseline", 0.01), mask_pair(0.01, BF16)).model_dump_json())
    old["schema_version"] = 1
    del old["cells"], old["records"][0]["gap"]
    for record in old["records"]:
        for name in ("kl", "kl_shift", "kl_error"):
            for new in ("nll_p", "nll_q", "right_p", "right_q"):
                record.get(name, {}).pop(new, None)
    (tmp_path / "results.json").write_text(json.dumps(old), encoding="utf-8")
    found = read_results(tmp_path / "results.json")
    assert (found.schema_version, found.records[0].gap) == (1, 0)
    assert "### Whole presets" in numbers(found)


def test_what_is_not_finished_is_named():
    text = numbers(study(outcome(BF16, 1e-3), cells={"setups": (7, 7), "remedies": (3, 40)}))
    assert "Not finished, and not shown: remedies 3 of 40 cells." in text


def test_only_what_does_harm_is_told_never_to_be_rounded():
    """What multiplies the KL by less than `do not` asks for stands in no headline."""
    setups = [outcome(BF16, 1e-3), outcome(f"{BF16}_inv_freq", 1.14e-3)]
    (found,) = findings(study(*setups))
    assert "**Rounding what makes angles is not seen to do harm.**" in found
    (found,) = findings(study(*setups, outcome(f"{BF16}_tf32", 2e-3)))
    assert "with TF32 the KL is 2 times" in found.partition(".**")[0]
    assert "inverse" not in found.partition(".**")[0]


def test_copies_that_float64_does_not_make_are_no_part_that_is_lost():
    fields = {"group": "dose", "site": "q and k", "mantissa_bits": 7, "task": "copy", "gap": 8000}
    none = Stat(mean=0.0, std=0.0, values=[0.0, 0.0, 0.0])
    one = outcome("q and k, 7 bits", 1e-3, **fields)
    silent = one.model_copy(update={"outputs": one.outputs.model_copy(update={"right_p": none, "right_q": none})})
    assert small_table(study(silent), "dose", "copy")[0][-2:] == ["0", "NaN"]


def test_a_claim_tried_at_the_beginning_of_a_row_says_so():
    tried = claims(study(tokens(9.0), lengths(0.5, 0.1), pairs(0.01), pairs(1e-7, "fp32")))
    assert tried["first-most"].numbers.endswith("(at position 0, 32 tokens)")
    for key in ("grows", "only-first", "by-length"):
        assert tried[key].numbers.endswith("(at position 0, 8 to 32 tokens)"), key
    assert tried["not-relative"].numbers.endswith("(in part at position 0, 32 tokens)")
    assert "intervals" not in tried["samples"].numbers
    later = lengths(0.5, 0.1).model_copy(update={"d1": 16, "d2": 32})
    assert "at position 0" not in claims(study(later))["grows"].numbers


def claims(results: Results) -> dict[str, Claim]:
    return {claim.key: claim for claim in (*paper_claims(results), *cause_claims(results), *context_claims(results))}


# -- verdicts ----------------------------------------------------------------------------------------------------------

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


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> str:
    return render(whole())


def test_captions_say_what_of_and_what_shares_can_be(page):
    for figure in figures_of(whole()):
        assert re.search(r"\d+ sequences? (of \d+ tokens?|at each length)", figure.caption), figure.name
    assert unescape(page).count(SHARES) >= sum(figure.in_shares for figure in figures_of(whole()))


def hostile() -> Results:
    """Results whose every text is markup."""
    return study(
        score("control", 0.01, condition="q, k rounded after RoPE", about=EVIL),
        pairs(0.01, condition=f"bf16 {EVIL}"),
        title=EVIL,
        command=EVIL,
    )


def test_text_is_never_markup():
    evil = render(hostile())
    assert "<img" not in evil
    assert "\x01" not in evil
    assert evil.count("</script>") == 1
    assert unescape(evil).count(EVIL.replace("\x01", "\ufffd")) > 10


@pytest.mark.parametrize("left_out", range(len(whole().records)))
def test_missing_records_do_not_break_it(left_out):
    records = whole().records
    results = study(records[left_out])
    claims(results)
    claims(study(*(record for record in records if record is not records[left_out])))
    figures_of(results)


def test_nothing_at_all_is_said_to_be_nothing():
    empty = render(study())
    assert empty.count("not measured (in this configuration)") == len(TRIED)
    assert "The study holds no record." in empty


def test_everything_is_written_and_nothing_half(tmp_path):
    some = [record for record in whole().records if isinstance(record, Score | ByFrequency)]
    some = study(
        *(record for record in some if getattr(record, "group", "") not in ("off_alone", "mask", "first_token"))
    )
    assert report.write_report(some, tmp_path) == tmp_path / "report.html"
    names = {figure.name for figure in figures_of(some)}
    assert {"on-alone", "remedies", "controls", "models", "frequency"} <= names
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == names
    for path in (tmp_path / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]
    rows = list(csv.DictReader((tmp_path / "tables/on-alone.csv").open(encoding="utf-8")))
    assert [row["condition"] for row in rows] == [BF16, FLASH, "on k_rotated", "on probs"]
    assert float(rows[2]["shift, local"]) == 0.008


def test_it_is_rendered_again_from_its_file(tmp_path, capsys):
    small = study(frequency(0.03, 0.01))
    write_results(small, tmp_path / "results.json")
    run = CliRunner().invoke
    assert run(again.app, [str(tmp_path)]).exit_code == 0
    assert (tmp_path / "report.html").read_text("utf-8") == render(small)
    elsewhere = run(again.app, [str(tmp_path / "elsewhere")])
    assert (elsewhere.exit_code, "no such file" in elsewhere.stderr) == (2, True)
    assert len(elsewhere.stderr.splitlines()) == 1


def test_studies_of_the_same_model_and_text_are_shown_together(tmp_path):
    own, torchs = study(frequency(0.03, 0.01)), study(pairs(0.01, attention_from="torch eager"))
    other_model = torchs.model_copy(update={"model": torchs.model.model_copy(update={"sha256": "other"})})
    other_text = torchs.model_copy(update={"text": torchs.text.model_copy(update={"documents": ["another"]})})
    for name, one in (("own", own), ("torch", torchs), ("model", other_model), ("text", other_text)):
        (tmp_path / name).mkdir()
        write_results(one, tmp_path / name / "results.json")
    run = CliRunner().invoke
    assert run(again.app, [str(tmp_path / "own"), "--beside", str(tmp_path / "torch")]).exit_code == 0
    both = study(frequency(0.03, 0.01), pairs(0.01, attention_from="torch eager"), seconds=25.0)
    assert (tmp_path / "own" / "report.html").read_text("utf-8") == render(both)
    for name in ("model", "text"):
        refused = run(again.app, [str(tmp_path / "own"), "--beside", str(tmp_path / name)])
        assert refused.exit_code == 2
        assert f"is of another {name}; give a study of the same" in refused.stderr


# -- docs/precision.md -------------------------------------------------------------------------------------------------


def test_the_document_s_numbers_are_replaced(tmp_path):
    file = tmp_path / "precision.md"
    file.write_text(
        f"before\n{BEGIN}\nobsolete\n{END}\n{COMMANDS_BEGIN}\nold\n{COMMANDS_END}\nafter\n", encoding="utf-8"
    )
    refresh(whole(), file)
    text = file.read_text("utf-8")
    assert (text.splitlines()[0], text.splitlines()[-1]) == ("before", "after")
    assert numbers(whole(), [one for one in figures_of(whole()) if one.name in FIGURES]) in text
    assert "obsolete" not in text
    assert f"{COMMANDS_BEGIN}\n\n    jaxref study configs/study/tiny.yaml\n\n{COMMANDS_END}" in text
    assert "| split q and k | 32 tokens ending at 32 | 0.1 |" in text


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    text = numbers(outputs_alone(), (), whole())
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_a_document_without_its_marks_is_refused(tmp_path):
    file = tmp_path / "precision.md"
    file.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"precision\.md"):
        refresh(whole(), file)
    assert file.read_text("utf-8") == "nothing"


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(page, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {"whole": page, "empty": render(study()), "hostile": render(hostile())}
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("name", ["whole", "empty", "hostile"])
def test_it_is_shown_without_complaint_in_every_width(open_page, pages, name):
    for width, scheme in ((1280, "dark"), (400, "light")):
        page = open_page(pages[name], width, scheme)
        page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("img, script:not(body > script)").count() == 0


def test_every_figure_and_claim_is_there_once_and_every_link_leads_somewhere(open_page, pages):
    page = open_page(pages["whole"])
    ids = page.locator("[id]").evaluate_all("all => all.map((each) => each.id)")
    assert max(Counter(ids).values()) == 1
    names = [figure.name for figure in figures_of(whole())]
    assert len(names) == 16
    assert {*names, *(f"claim-{key}" for key in TRIED)} <= set(ids)
    targets = page.locator("[href]").evaluate_all("all => all.map((each) => each.getAttribute('href'))")
    assert {target[0] for target in targets} == {"#"}
    assert {target[1:] for target in targets} <= set(ids)
    assert all(page.locator("svg").evaluate_all("all => all.map((each) => each.ariaLabel)"))


@pytest.mark.parametrize(("scheme", "colours"), [("light", LIGHT), ("dark", DARK)])
def test_drawings_follow_the_scheme(open_page, pages, scheme, colours):
    page = open_page(pages["whole"], scheme=scheme)
    for selector, paint in (("svg text", "fill"), ("svg path[fill]", "fill"), ("svg [stroke]", "stroke")):
        seen = page.locator(selector).evaluate_all(f"all => all.map((each) => getComputedStyle(each).{paint})")
        assert len(seen) > 100
        known = {"rgb({}, {}, {})".format(*bytes.fromhex(colour[1:])) for colour in colours.values()} | {"none"}
        assert set(seen) <= known


def test_a_column_of_numbers_is_sorted_by_every_digit(open_page, pages):
    page = open_page(pages["whole"])
    page.locator("#on-alone summary").click()
    head = page.locator("#on-alone th.n", has_text="shift, local")
    cells = page.locator("#on-alone tbody td:nth-child(5)")
    for way in ("descending", "ascending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == way
        values = [float(value) for value in cells.evaluate_all("all => all.map((each) => each.dataset.value)")]
        assert values == sorted(values, reverse=way == "descending")
        assert len(set(values)) > 2
