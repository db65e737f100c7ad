"""What to do and what was found, by the study's numbers."""

import math

import pytest

from ropestudy.report.answers import actions, advise, brief_actions, small_table
from ropestudy.report.docs import numbers
from ropestudy.report.effects import Effect
from ropestudy.report.findings import case_rows, findings
from ropestudy.schema import Stat
from ropestudy.tests.by_hand import BF16, FLASH, TOKENS, outcome, outputs_alone, study


def test_what_to_do_follows_from_the_numbers():
    heads, rows = actions(outputs_alone())
    assert heads == ["setup", "change", "32 tokens ending at 8,192", "cost"]
    said = {change: cell for _, change, cell, _ in rows}
    assert said["let TF32 multiply positions"] == "**never** 1,000"
    assert said["let inv_freq become bf16"] == "**do not** 1.3"
    assert said["rotate in float32, round once"] == "**do** 0.5"
    assert said["keep q and k in float32"] == "**no matter** 0.9"
    assert said["stay in bf16"] == "**do** 0.05"


def test_what_to_do_is_told_by_the_length_of_a_row():
    """Of two cases of a length: one verdict where they agree, two where they do not; of a length with one, nothing."""
    names = {BF16: (1e-3, 1e-3), f"{BF16}_tf32": (1.0, 1.0), f"{BF16}_inv_freq": (1e-3, 1.3e-3)}
    records = [outcome(name, near) for name, (near, _) in names.items()]
    records += [outcome(name, far, start=0, gap=8192 - TOKENS) for name, (_, far) in names.items()]
    records += [outcome(name, 1.0, start=0, gap=1024) for name in names]
    heads, rows = brief_actions(study(*records))
    assert heads == ["setup", "change", "8,192 positions", "cost"]
    said = {change: cell for _, change, cell, _ in rows}
    assert said["let TF32 multiply positions"] == "near **never** 1,000<br>far **never** 1,000"
    assert said["let inv_freq become bf16"] == "near **no matter** 1<br>far **do not** 1.3"
    assert brief_actions(outputs_alone()) == actions(outputs_alone())


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.5, 0.7, "do"),
        (0.7, 0.9, "no harm"),
        (0.7, 1.25, "no harm"),
        (0.85, 1.2, "no matter"),
        (0.7, 1.3, "not settled"),
        (0.8, 1.3, "no help"),
        (0.9, 3.0, "no help"),
        (1.3, 3.0, "do not"),
        (2.1, 3.0, "never"),
    ],
)
def test_an_interval_says_what_it_leaves_open(low, high, word):
    assert advise(Effect(math.sqrt(low * high), low, high, 8)) == word


def test_findings_have_a_number_each_and_none_is_of_position_0():
    found = findings(outputs_alone())
    assert len(found) == 5
    # Of two rows of 14 tokens 0.8 are right in float64; 0.01 and 0.25 of the 28 are lost.
    assert found[0].head.startswith(
        "Copying a key from 8,000 positions before loses at every number of mantissa bits of"
    )
    assert "7 (bf16's) lose 0.0125" in found[0].head
    assert "3 (e4m3's, range not limited) lose 0.312 (0.278 to 0.357)" in found[0].head
    assert "Parts of 22 copies" in found[0].says
    copied = {"task": "copy", "gap": 8000, "start": 0, "site": "q and k"}
    doses = [
        outcome(f"q and k, {bits} bits", 1.0, "dose", mantissa_bits=bits, lost=lost, **copied)
        for bits, lost in ((2, 0.25), (3, 0.0), (5, 0.25), (7, 0.0), (10, 0.0))
    ]
    (cliff,) = findings(study(*doses))
    assert "loses nothing that can be seen down to 7 mantissa bits" in cliff.head, "5 bits lose, whatever 3 do"
    assert "At 99,999 float64 itself copies less than half" in found[0].says
    assert "leave 0.9 of the outputs' distance from float64" in found[1].head
    assert "with TF32 the outputs' KL is up to 1,000 times as large" in found[2].head
    assert "in a direction that texts share: 0.9 of the mean square" in found[3].head
    assert "fp8 has up to 20 times the KL of bf16" in found[4].head
    assert "leaves 0.5 of that: it helps in 1 of 1" in found[4].says
    assert all(one.head.count("(") <= 4 and one.cases for one in found), "one number or two"
    rows = case_rows(outputs_alone())
    assert len(rows) == sum(len(one.cases) for one in found)
    assert ["5", "rounding before RoPE: left of fp8's KL", "32 tokens ending at 8,192", "0.5"] in rows
    assert not any("ending at 32" in where for _, _, where, _ in rows), "of position 0"
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
    assert "with about the square of the position (exponent 2, 8,192 to 1,048,576) and equals that" in found.says
    assert "with exact angles near 8.39e6 positions" in found.says
    assert "measured at 16,777,216 it is 4 times that" in found.says


def test_what_is_not_finished_is_named():
    text = numbers(study(outcome(BF16, 1e-3), cells={"setups": (7, 7), "remedies": (3, 40)}))
    assert "Not finished, and not shown: remedies 3 of 40 cells." in text


def test_only_what_does_harm_is_told_never_to_be_rounded():
    """What multiplies the KL by less than `do not` asks for stands in no headline."""
    setups = [outcome(BF16, 1e-3), outcome(f"{BF16}_inv_freq", 1.14e-3)]
    (found,) = findings(study(*setups))
    assert found.head == "Rounding what makes angles is not seen to do harm."
    (found,) = findings(study(*setups, outcome(f"{BF16}_tf32", 2e-3)))
    assert "with TF32 the outputs' KL is up to 2 times" in found.head
    assert "inverse" not in found.head


def test_copies_that_float64_does_not_make_are_no_part_that_is_lost():
    fields = {"group": "dose", "site": "q and k", "mantissa_bits": 7, "task": "copy", "gap": 8000}
    none = Stat(mean=0.0, std=0.0, values=[0.0, 0.0, 0.0])
    one = outcome("q and k, 7 bits", 1e-3, **fields)
    silent = one.model_copy(update={"outputs": one.outputs.model_copy(update={"right_p": none, "right_q": none})})
    assert small_table(study(silent), "dose", "copy")[0][-2:] == ["0", "NaN"]
