"""The page: what it says, that nothing in a report can break it, and what a browser makes of it."""

from html import unescape
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from parity_tests.report.html import headline, place, ratio, render
from parity_tests.report.schema import Divergence, Environment, Profile, Report
from parity_tests.tests.reports import WORDS, broken_case, case, measure, profile, report


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
        ([case("a"), case("b")], ("The same", "140 arrays of 2 cases keep within their allowance.")),
        ([case("a"), broken_case()], ("Different", "Of 2 cases, 1 breaks the rule.")),
        ([case("a", problem="raises")], ("Different", "Of 1 case, 1 could not be judged.")),
        ([case("a", skipped="no GPU", measures=[])], ("Not judged", "1 case could not run on this machine.")),
        ([], ("Not judged", "The report holds no case.")),
    ],
)
def test_the_verdict_is_a_word_and_a_sentence(cases, told):
    assert headline(report(*cases)) == told


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


# -- what stands in a report is text -----------------------------------------------------------------------------------


HOSTILE = (
    "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\" onfocus='alert(2)' &amp; \0 é \u202e"
)


def hostile() -> Report:
    """A report whose every text is markup."""
    divergence = Divergence(name=HOSTILE, ratio=3, words=HOSTILE)
    texts = dict.fromkeys(("model", "variant", "rope", "engine", "dtype", "preset", "command", "problem"), HOSTILE)
    bad = [
        measure(f"{i}{HOSTILE}", 3, layer=layer, group=group, profile=profile(3))
        for i, group in enumerate(("forward", "loss", "gradients", "step", "trajectory"))
        for layer in (None, 0)
    ]
    cases = [case(HOSTILE, **texts, first_divergence=divergence, measures=bad), case(f"2{HOSTILE}", skipped=HOSTILE)]
    environment = Environment(
        versions={HOSTILE: HOSTILE}, hardware=HOSTILE, threads=1, git_commit=HOSTILE, git_dirty=False
    )
    return report(*cases, title=HOSTILE, created=HOSTILE, command=HOSTILE, environment=environment)


def test_nothing_in_a_report_is_taken_for_markup():
    text = render(hostile())
    assert (text.count("<script"), text.count("</script"), text.count("</style")) == (1, 1, 1)
    assert "<img src=x" not in text
    assert '" onfocus' not in text
    assert "\0" not in text
    assert unescape(text).count(HOSTILE.replace("\0", "\ufffd")) > 30


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    long_names = [
        case(f"llama-anchor+tag+interleave-{'x' * 60}-{n}", command=f"parity run {'y' * 90}") for n in range(3)
    ]
    skipped = case("skipped", skipped="no GPU", measures=[])
    reports = {"mixed": mixed(), "passing": report(*long_names, skipped), "empty": report(), "hostile": hostile()}
    for name, made in reports.items():
        (folder / f"{name}.html").write_text(render(made), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in reports}


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_text_contents()]


@pytest.mark.parametrize("name", ["mixed", "passing", "empty", "hostile"])
def test_it_is_shown_without_complaint_in_every_width_and_scheme(open_page, pages, name):
    for width, scheme, paper in ((1280, "dark", "#14171a"), (360, "light", "#ffffff")):
        page = open_page(pages[name], width, scheme)
        page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert background == "rgb({}, {}, {})".format(*bytes.fromhex(paper[1:]))
        assert page.locator("script:not(body > script), [onfocus]").count() == 0


def test_the_verdict_and_what_failed_stand_first(open_page, pages):
    page = open_page(pages["mixed"])
    assert page.title() == "Different: CI"
    assert texts(page, "h1.bad + .lede") == [headline(mixed())[1]]
    assert texts(page, ".news p") == [WORDS, "layers.0.q is NaN at [0, 3, 1, 7], 12 of 131072 elements"]
    order = ["case-3", "case-4", "case-1", "case-2"]
    assert page.locator(".case").evaluate_all("all => all.map((each) => [each.id, each.open])") == [
        [name, name in ("case-3", "case-4")] for name in order
    ]
    rows = page.locator("section .list tbody tr")
    assert rows.locator("a").evaluate_all("all => all.map((each) => each.hash)") == [f"#{name}" for name in order]
    assert texts(rows, ".verdict") == ["✗ broken", "! not judged", "✓ passed", "– skipped"]
    assert texts(rows.nth(0), "td")[1:] == ["41", "0.21", "0.75", "0.75", "0.68", "3.2"]
    worst = rows.nth(0).locator("td").nth(1).get_attribute("title")
    assert worst == "layers.2.k_rope: error 8.20e-2, allowance 2.00e-3"


def test_a_case_lists_its_measures_and_plots(open_page, pages):
    page = open_page(pages["mixed"])
    expected = mixed().cases[2].measures
    rows = page.locator("#case-3 .measures tbody tr")
    assert texts(rows, "th") == [m.name for m in expected]
    assert texts(rows, "td:nth-child(4)") == [ratio(m) for m in expected]
    assert page.locator("#case-3 .measures tbody .x").count() == sum(not m.passed for m in expected)
    assert texts(page, "#case-3 figcaption")[0] == "layers.2.k_rope 41 over all, above its allowance from token 512 on"


def test_only_broken_hides_the_rest(open_page, pages):
    page = open_page(pages["mixed"])
    page.locator("#only-broken").check()
    assert texts(page, ".case:visible > summary .verdict .broken, .case:visible > summary .verdict .not-judged") == [
        "✗ broken",
        "! not judged",
    ]
    assert page.locator("section .list tbody tr:visible").count() == page.locator(".case:visible").count() == 2
    page.locator("#case-3 .measures > summary").click()
    page.locator("#case-3 .measures input").check()
    broken = sum(not m.passed for m in mixed().cases[2].measures)
    assert page.locator("#case-3 .measures tbody tr:visible").count() == broken


def test_a_link_opens_its_case_and_a_command_is_copied_or_selected(open_page, pages):
    page = open_page(pages["mixed"])
    page.locator('a[href="#case-1"]').click()
    page.locator("#case-1[open]").wait_for()
    page.locator("#case-1 .command button").click()
    page.locator("#case-1 .command button", has_text="ed").wait_for()
