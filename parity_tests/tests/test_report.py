"""The page: what it says."""

import re
from html import unescape
from math import inf, nan

import pytest

from anchorline.tests.test_page import HOSTILE
from parity_tests.report.html import place, ratio, render
from parity_tests.report.schema import Divergence, Profile, Report
from parity_tests.report.verdict import in_words
from parity_tests.tests.reports import WORDS, broken_case, case, measure, report


def mixed() -> Report:
    """One case of each kind; the first measure of the one that could not be judged is NaN."""
    not_finite = [
        measure("embed", 0.3),
        measure("q", 0, layer=0, error=nan, profile=Profile(starts=[0, 9], error=[1e-3, inf], allowance=[1e-3, 2e-3])),
        measure("k", 0, layer=0, error=inf),
        measure("v", 0, layer=0, error=1.0, allowance=inf),
        measure("q_rope", 0, layer=0, error=3.0, allowance=0.0),
    ]
    return report(
        case(),
        case(
            "qwen3-anchor-keep-flash-bfloat16-t1024-s0",
            model="qwen3",
            engine="flash",
            skipped="attention flash: there is no CUDA device here",
            measures=[],
        ),
        broken_case(),
        case(
            "qwen2-full-keep-sdpa-float16-t1024-s0",
            problem="layers.0.q is NaN at [0, 3, 1, 7], 12 of 131072 elements",
            first_divergence=Divergence(name="layers.0.q", ratio=nan, words="layer 0, q: the error is not finite"),
            measures=not_finite,
        ),
    )


# -- what it says ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "told"),
    [
        (
            [case("a"), case("b"), case("c", skipped="no GPU", measures=[])],
            "SAME: 6 arrays of 2 cases within their allowance, 1 cases cannot run here, at worst 0.40 of it "
            "(layers.2.k_rope in b)",
        ),
        ([case("a")], "SAME: 3 arrays within their allowance, at worst 0.40 of it (layers.2.k_rope)"),
        ([case("a"), broken_case()], f"DIFFERENT: {WORDS} [broken]; 1 of 2 cases fail"),
        ([case("a", problem="raises")], "DIFFERENT: raises"),
        ([case("a", skipped="no GPU", measures=[])], "NOT JUDGED: no case can run here: no GPU"),
    ],
)
def test_the_verdict_is_a_word_and_a_sentence(cases, told):
    assert in_words(report(*cases)) == told


@pytest.mark.parametrize(
    ("error", "allowance", "told"),
    [
        (0, 1.0, ("p0", "0")),
        (1e-9, 1.0, ("p1", "0.00")),
        (0.5, 1.0, ("p3", "0.50")),
        (0.9999, 1.0, ("p4", "0.99")),
        (1, 1.0, ("p4", "1.00")),
        (1 + 1e-9, 1.0, ("b0", "1.01")),
        (41, 1.0, ("b2", "41")),
        (123456, 1.0, ("b3", "1.23e5")),
        (inf, 1.0, ("b3", "∞")),
        (nan, 1.0, ("b3", "NaN")),
        (1.0, inf, ("b3", "NaN")),
    ],
)
def test_the_border_of_the_rule_is_at_1(error, allowance, told):
    made = measure("embed", 0, error=error, allowance=allowance)
    assert (place(made), ratio(made)) == told
    assert made.passed == told[0].startswith("p")


def test_the_verdict_and_what_failed_stand_first():
    page = unescape(render(mixed()))
    assert "<title>DIFFERENT: CI</title>" in page
    assert page.index("; 2 of 3 cases fail") < page.index("What differs first") < page.index('href="#case-3"')
    order = ["case-3", "case-4", "case-1", "case-2"]
    assert re.findall(r'<details[^>]*id="(case-\d)"', page) == order
    assert list(dict.fromkeys(re.findall(r'href="#(case-\d)"', page))) == order
    verdicts = re.findall(r'<th scope="row"><a href.*?<td class="verdict"><span class="([a-z-]+)"', page)
    assert verdicts == ["broken", "not-judged", "passed", "skipped"]
    assert "layers.2.k_rope: error 8.20e-2, allowance 2.00e-3" in page
    assert "above its allowance from token 512 on" in page


def test_text_in_a_report_is_no_markup():
    divergence = Divergence(name=HOSTILE, ratio=3, words=HOSTILE)
    text = render(report(case(HOSTILE, problem=HOSTILE, first_divergence=divergence), title=HOSTILE, command=HOSTILE))
    assert (text.count("<script"), text.count("</style"), text.count("<img src=x")) == (1, 1, 0)
