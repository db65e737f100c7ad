"""The page of versions: a cell is the worst of its cases, and what fails is said below the table."""

from parity_tests.matrix import HEAD, ROOT, page
from parity_tests.tests.reports import judged_case, report


def test_a_page_has_a_row_for_each_pair_and_says_what_fails():
    good = report(judged_case("a", 0.2, 0.41), judged_case("b", 0.3), judged_case("c", 0.5, dtype="float32"))
    bad = report(judged_case("a", 0.2, 7.0), judged_case("d", 9.0, engine="flex", skipped="no GPU"))
    pairs = [("2.13.0", "5.18.0"), ("2.13.0", "5.24.0"), ("2.12.0", "5.24.0")]
    head, _, table = page(dict(zip(pairs, [good, bad, "no such build"], strict=True)), "m.yaml").partition("\n\n|")
    assert "from `m.yaml` on An ordinary processor" in head
    assert table.splitlines()[0] == " torch | transformers | sdpa bfloat16 (2) | sdpa float32 (1) |"
    assert "5.18.0 | 0.41 | 0.50 |\n| 2.13.0 | 5.24.0 | **7** | not run |\n| 2.12.0 | 5.24.0 | not run |" in table
    assert "- torch 2.13.0, transformers 5.24.0: `a`: layers.1.q breaks\n" in table
    assert table.endswith("- torch 2.12.0, transformers 5.24.0: no such build\n")
    assert (ROOT / "docs/matrix.md").read_text().startswith(HEAD.partition("{")[0])
