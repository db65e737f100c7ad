"""What to do and what was found, by the study's numbers."""

import math
import re

import pytest

from ropestudy.report.answers import actions, advise, brief_actions, in_short, small_table
from ropestudy.report.docs import numbers
from ropestudy.report.effects import Effect
from ropestudy.report.findings import case_rows, findings
from ropestudy.schema import Stat
from ropestudy.tests.by_hand import BF16, FLASH, TOKENS, outcome, outputs_alone, study


def test_what_to_do_follows_from_the_numbers():
    heads, rows = actions(outputs_alone())
    assert heads == ["setup", "action", "32 tokens ending at 8,192", "cost (not measured)"]
    said = {action: cell.split(", loss")[0] for _, action, cell, _ in rows}
    assert rows[0][0] == "float64's own loss, nats a token"
    assert said[""].startswith("3 (-0.7")  # three texts of 1.5, 3 and 4.5
    assert said["keep positions out of TF32"] == "**do** 0.001"
    assert said["keep inv_freq in float32"] == "**do** 0.769"
    assert said["rotate in float32, round q and k once"] == "**do** 0.5"
    assert said["never round q and k"] == "**no matter** 0.9"
    assert said["go back to bf16"] == "**do** 0.05"
    (cell,) = (cell for _, action, cell, _ in rows if action == "keep positions out of TF32")
    assert ", loss -0.999 (-2.2" in cell, "the loss of 1 nat is gone, in the mean of three texts"


def test_what_to_do_is_told_by_the_length_of_a_row():
    """Of two cases of a length: near and far, with a word each; of a length with one, nothing."""
    names = {BF16: (1e-3, 1e-3), f"{BF16}_tf32": (1.0, 1.0), f"{BF16}_inv_freq": (1e-3, 1.3e-3)}
    records = [outcome(name, near) for name, (near, _) in names.items()]
    records += [outcome(name, far, start=0, gap=8192 - TOKENS) for name, (_, far) in names.items()]
    records += [outcome(name, 1.0, start=0, gap=1024) for name in names]
    heads, rows = brief_actions(study(*records))
    assert heads == ["setup", "action", "8,192 positions", "cost (not measured)"]
    said = {action: re.sub(r", loss [^<]*", "", cell) for _, action, cell, _ in rows}
    assert said["keep positions out of TF32"] == "near **do** 0.001<br>far **do** 0.001"
    assert said["keep inv_freq in float32"] == "near **no matter** 1<br>far **do** 0.77"
    assert brief_actions(outputs_alone()) == actions(outputs_alone())
    short = in_short(study(*records))
    assert "**Shown to help wherever it was tried:** keep positions out of TF32." in short
    assert "to harm in none:** keep inv_freq in float32 (1 of 2)." in short


def test_a_word_is_bold_where_it_holds_with_all_intervals_of_the_table():
    """Three texts whose quotients spread: below .8 by itself, not at a hundredth of the level."""
    before, after = outcome(FLASH, 1.0), outcome("paper_bf16", 1.0)
    kl = after.outputs.kl.model_copy(update={"values": [0.5 * 0.57, 1.0 * 0.55, 1.5 * 0.53]})
    after = after.model_copy(update={"outputs": after.outputs.model_copy(update={"kl": kl})})
    some = study(before, after)
    ((_, _, cell, _),) = actions(some)[1][1:]
    assert cell.startswith("**do** 0.55 (")
    many = study(*(one.model_copy(update={"start": start}) for one in (before, after) for start in range(1000, 1400)))
    cells = actions(many)[1][1][2:-1]
    assert len(cells) == 400
    assert all(cell.startswith("do 0.55 (") for cell in cells)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.5, 0.7, "do"),
        (0.7, 0.9, "may help"),
        (0.7, 1.25, "may help"),
        (0.85, 1.2, "no matter"),
        (0.7, 1.3, "not settled"),
        (0.8, 1.3, "may harm"),
        (0.9, 3.0, "may harm"),
        (1.3, 3.0, "do not"),
    ],
)
def test_an_interval_says_what_it_leaves_open(low, high, word):
    assert advise(Effect(math.sqrt(low * high), low, high, 8)) == word


def test_findings_have_a_number_each_and_none_is_of_position_0():
    found = findings(outputs_alone())
    assert len(found) == 5
    # Of two rows of 14 tokens 0.8 are right in float64; 0.01 and 0.25 of the 28 are lost.
    assert "a loss of 0.05 of the copies is excluded down to 7 mantissa bits in all of RoPE" in found[0].head
    assert "7 (bf16's) lose 0.0125" in found[0].says
    assert "3 (e4m3's, range not limited) lose 0.312 (0.278 to 0.357)" in found[0].says
    assert "of 22 copies" in found[0].says
    assert "99,999 positions before it copies 10%" in found[0].says
    copied = {"task": "copy", "gap": 8000, "start": 0, "site": "all of RoPE"}
    doses = [
        outcome(f"all of RoPE, {bits} bits", 1.0, "dose", mantissa_bits=bits, lost=lost, **copied)
        for bits, lost in ((2, 0.25), (3, 0.0), (5, 0.25), (7, 0.0), (10, 0.0))
    ]
    outputs = [
        outcome(f"q and k, {bits} bits", 2.0**-bits, "dose", site="q and k", mantissa_bits=bits, gap=8000, start=0)
        for bits in (4, 5, 6, 7)
    ]
    (cliff,) = findings(study(*doses, *outputs, outcome(BF16, 0.02, gap=8000, start=0)))
    assert "excluded down to 7 mantissa bits" in cliff.head, "5 bits lose, whatever 3 do"
    assert "together make there (KL 0.0" in cliff.says
    assert "between 5 and 6 bits" in cliff.says
    assert "leaves 0.9 of FlashAttention-2's error in the outputs" in found[1].head
    assert "TF32 positions make the outputs' error up to 1,000 times as large" in found[2].head
    assert "the same in every text (0.9 of its mean square)" in found[3].head
    assert "fp8 makes up to 20 times the error of bf16" in found[4].head
    assert "leaves of that near 0.5, helping in 1" in found[4].says
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
    assert "with exact angles near 8.4 million positions (8.4 to 8.4; near keys)" in found.says
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
    assert "TF32 positions make the outputs' error up to 2 times" in found.head
    assert "inverse" not in found.head


def test_copies_that_float64_does_not_make_are_no_part_that_is_lost():
    fields = {"group": "dose", "site": "q and k", "mantissa_bits": 7, "task": "copy", "gap": 8000}
    none = Stat(mean=0.0, std=0.0, values=[0.0, 0.0, 0.0])
    one = outcome("q and k, 7 bits", 1e-3, **fields)
    silent = one.model_copy(update={"outputs": one.outputs.model_copy(update={"right_p": none, "right_q": none})})
    assert small_table(study(silent), "dose", "copy")[0][-2:] == ["0", "NaN"]
