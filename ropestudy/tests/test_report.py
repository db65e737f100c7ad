"""The study's page: nothing in the results can break it, and what a browser makes of it; and docs/precision.md."""

import csv
import json
import lzma
import re
from collections import Counter
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anchorline.page.colours import DARK, LIGHT
from ropestudy import report
from ropestudy.report import __main__ as again
from ropestudy.report.claims_paper import paper_claims
from ropestudy.report.compact import read_study, write_compact
from ropestudy.report.docs import BEGIN, COMMANDS_BEGIN, COMMANDS_END, END, FIGURES, every_number, numbers, refresh
from ropestudy.report.html import SHARES, figures_of, render
from ropestudy.schema import ByFrequency, Results, Score, read_results, write_results
from ropestudy.tests.by_hand import BF16, FLASH, claims, frequency, mask_pair, outputs_alone, pairs, score, study, whole
from ropestudy.tests.test_verdicts import TRIED

EVIL = "$x_{1 </script><img src=x onerror=alert(1)> & \"q\" 'a' \x01"


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


def test_the_page_and_the_document_show_them():
    page, text = render(outputs_alone()), numbers(outputs_alone(), figures_of(outputs_alone()), outputs_alone())
    for shown in (unescape(page), text):
        assert "From setup to action" in shown
        assert "fp8 makes up to 20 times" in shown
    assert text.count("### From setup to action") == 2
    assert "figures/precision-dose.png" in text
    assert "## A second model" in text
    assert "| setup | condition |" not in text, "every case is in the other file"
    all_of_it = every_number(outputs_alone(), "precision.md", outputs_alone())
    assert all_of_it.count("### From setup to action, everywhere") == 2
    assert all_of_it.count("### What was found, case by case") == 2


def test_a_verdict_stands_beside_the_second_model_s():
    """By the claim, not by the place in the list: what was not measured of one shifts no verdict of the other."""
    own, second = whole(), study(score("baseline", 0.01), score("baseline", 0.02, condition="fp32"))
    text = numbers(own, (), second)
    claims = {claim.says: claim for claim in paper_claims(second)}
    seen = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] in claims and len(cells) == 4:
            assert cells[3] == claims[cells[0]].verdict
            seen += 1
    assert seen == sum(bool(claim.cases) for claim in paper_claims(own))
    assert "| claim | verdict | number | second model |" in text
    assert "second model |" not in numbers(own)


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
    assert "### Whole presets" in every_number(found, "precision.md")


# -- docs/precision.md -------------------------------------------------------------------------------------------------


def test_the_document_s_numbers_are_replaced(tmp_path):
    file = tmp_path / "precision.md"
    file.write_text(
        f"before\n{BEGIN}\nobsolete\n{END}\n{COMMANDS_BEGIN}\nold\n{COMMANDS_END}\nafter\n", encoding="utf-8"
    )
    refresh(whole(), file)
    text = file.read_text("utf-8")
    assert (text.splitlines()[0], text.splitlines()[-1]) == ("before", "after")
    shown = [one for one in figures_of(whole()) if one.name in FIGURES]
    assert numbers(whole(), shown, None, "precision-numbers.md") in text
    assert "(precision-numbers.md)" in text
    assert "obsolete" not in text
    assert f"{COMMANDS_BEGIN}\n\n    jaxref study configs/study/tiny.yaml\n\n{COMMANDS_END}" in text
    every = (tmp_path / "precision-numbers.md").read_text("utf-8")
    assert every == every_number(whole(), "precision.md")
    assert "| split q and k | 32 tokens ending at 32 | 0.1 |" in every


@pytest.mark.parametrize(
    "text", [numbers(outputs_alone(), (), whole()), every_number(whole(), "a.md", outputs_alone())]
)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(text):
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_a_document_without_its_marks_is_refused(tmp_path):
    file = tmp_path / "precision.md"
    file.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"precision\.md"):
        refresh(whole(), file)
    assert [each.name for each in tmp_path.iterdir()] == ["precision.md"]
    assert file.read_text("utf-8") == "nothing"


def test_the_document_is_made_again_from_a_compact_file(tmp_path):
    """Of a few kilobytes: the same text, byte by byte, as from the same numbers in full."""
    (tmp_path / "study").mkdir()
    write_results(whole(), tmp_path / "study" / "results.json")
    file = tmp_path / "whole.json.xz"
    run = CliRunner().invoke
    assert run(again.app, [str(tmp_path / "study"), "--compact", str(file)]).exit_code == 0
    found = read_study(file)
    assert numbers(found) == numbers(whole())
    assert every_number(found, "a.md") == every_number(whole(), "a.md")
    document = tmp_path / "precision.md"
    document.write_text(f"{BEGIN}\n{END}\n{COMMANDS_BEGIN}\n{COMMANDS_END}\n", encoding="utf-8")
    result = run(again.app, [str(file), "--document", str(document)])
    assert result.exit_code == 0, result.output
    assert "## What to do" in document.read_text("utf-8")
    before = file.read_bytes()
    write_compact(found, file)
    assert file.read_bytes() == before, "what is compact stays as it is"
    for damaged in (before[:-20], b"", b"x" * 100, lzma.compress(b"{}")):
        file.write_bytes(damaged)
        refused = run(again.app, [str(file)])
        assert refused.exit_code == 2
        (line,) = refused.stderr.splitlines()
        assert "whole.json.xz: no compact results of schema version" in line


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
