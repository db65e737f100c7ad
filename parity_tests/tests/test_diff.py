"""Two reports: what moved, and whether anything got worse."""

import pytest
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.report.diff import diff
from parity_tests.report.schema import Report, write_report
from parity_tests.tests.reports import judged_case as case
from parity_tests.tests.reports import report


def test_the_same_report_has_not_moved():
    one = report(case("a", 0.5, 0.1), case("b", 3.0))
    found = diff(one, one)
    assert (found.same, found.worse, found.better, found.moved, found.settings) == (2, [], [], [], [])
    assert not found.got_worse


def test_a_case_that_breaks_is_worse_and_one_that_is_mended_better():
    found = diff(report(case("a", 0.5), case("b", 3.0)), report(case("a", 4.0), case("b", 0.2)))
    assert found.worse == ["a: passed -> broken: layers.0.q breaks"]
    assert found.better == ["b: broken -> passed: layers.0.q breaks"]
    assert found.got_worse


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ([case("a", 0.5)], [case("a", 0.5, problem="it raises")], True),
        ([case("a", 0.5)], [case("a", skipped="no GPU")], True),
        ([case("a", skipped="no GPU")], [case("a", 0.5)], False),
        ([case("a", 0.5)], [], True),
        ([], [case("a", 0.5)], False),
        ([], [case("a", 5.0)], True),
        ([case("a", 5.0)], [case("a", 5.0, problem="it raises")], True),
        ([case("a", 5.0)], [case("a", 50.0)], False),
    ],
    ids=["raises", "skipped", "run at last", "missing", "new", "new and broken", "broken and raises", "still broken"],
)
def test_what_counts_as_worse(before, after, worse):
    always = case("other", 0.1)
    assert diff(report(always, *before), report(always, *after)).got_worse is worse


def test_what_was_judged_and_is_gone_is_worse_unless_it_is_named():
    before, after = report(case("a", 0.5, 0.1), case("b", 0.1)), report(case("a", 0.5))
    found = diff(before, after)
    assert (found.got_worse, found.gone) == (True, ["b", "a:layers.1.q"])
    assert not diff(before, after, ["b", "a:layers.1.*"]).got_worse
    assert diff(before, after, ["b"]).got_worse
    assert diff(report(), report()).got_worse


def invoke(tmp_path, a: Report, b: Report):
    for name, one in (("a", a), ("b", b)):
        write_report(one, tmp_path / f"{name}.json")
    return CliRunner().invoke(cli.app, ["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")])


def test_the_command_exits_with_1_only_where_something_got_worse(tmp_path):
    good, bad = report(case("a", 0.5)), report(case("a", 7.0))
    same = invoke(tmp_path, good, good)
    assert (same.exit_code, "NO WORSE: 1 with the same verdict" in same.stdout) == (0, True)
    worse = invoke(tmp_path, good, bad)
    assert (worse.exit_code, "WORSE: 0 with the same verdict, 0 better, 1 worse" in worse.stdout) == (1, True)
    assert "layers.0.q breaks" in worse.stdout
    assert invoke(tmp_path, bad, good).exit_code == 0


def test_a_file_that_is_no_report_is_a_mistake(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    result = CliRunner().invoke(cli.app, ["diff", str(tmp_path / "a.json"), str(tmp_path / "none.json")])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("parity: report ")
