"""docs/precision.md and README.md: every number of the study in them comes from the kept studies."""

import re
import subprocess
import sys

import pytest

from anchorline.errors import UserError
from benchmarks.precision_page import MARKER, PAGE, README, fill_page, kept_numbers

# What a number of a result looks like; positions, bits and sizes are whole numbers without a unit.
RESULT = re.compile(r"\d+\.\d+|\d+(?:\.\d+)?e-\d+|\d+ ?%")


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_pages_hold_the_numbers_of_the_kept_studies(page):
    numbers = kept_numbers()
    for text in (page, README.read_text(encoding="utf-8")):
        assert MARKER.findall(text)
        assert fill_page(text, numbers) == text


def test_no_number_of_a_result_is_written_by_hand(page):
    prose = MARKER.sub("", page.split("## Methods")[0])
    prose = re.sub(r"\(?arXiv\s\d+\.\d+|https?://\S+|`[^`]*`|section\s[\d.]+", "", prose)
    quoted = {"95%", "80%", "91%", "13%", "89%"}  # the levels of intervals and power, and what another engine measured
    assert [number for number in RESULT.findall(prose) if number not in quoted] == []


def test_a_script_with_numpy_alone_recomputes_the_verdicts(page):
    script = PAGE.parents[1] / "benchmarks" / "precision_sceptic.py"
    imported = {*re.findall(r"^(?:import|from) (\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)}
    assert imported - sys.stdlib_module_names == {"numpy"}
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    recomputed, numbers = dict(line.split(": ", 1) for line in shown.stdout.splitlines()), kept_numbers()
    assert recomputed == {key: numbers[key] for key in recomputed}
    claims = re.findall(r"\| `(\w+)` \|", page)
    assert len(claims) == 7
    for claim in claims:
        assert f"def {claim}()" in script.read_text(encoding="utf-8")


def test_an_unknown_key_is_refused():
    with pytest.raises(UserError, match=r"'no\.such' is unknown"):
        fill_page("<!--n:no.such-->1<!--/n-->", {})
