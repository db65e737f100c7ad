"""`parity check` and the helper for pytest."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.check import attention, check_attention
from parity_tests.checking.cases import LAYOUTS
from parity_tests.pytest_helper import attention_cases
from parity_tests.tests.attention_by_hand import ONE, by_mask

ROOT = Path(__file__).parents[2]
QUICK = ["--layouts", "intra", "--dtypes", "float32", "--heads", "4/2"]


def check(*arguments: str):
    return CliRunner().invoke(cli.app, ["check", *arguments])


def test_the_command_says_same():
    done = check("parity_tests.tests.attention_by_hand:by_mask", *QUICK)
    assert done.exit_code == 0, done.output
    assert "SAME: by_mask: 1 case on 1 layout; out, dq, dk, dv within their allowance" in done.stdout


def test_the_command_says_different():
    done = check("parity_tests.tests.attention_by_hand:interleaved_heads", "--library", "torch", *QUICK)
    assert done.exit_code == 1
    assert "It looks like this: GQA heads in the wrong order" in done.stdout


def test_the_command_takes_a_file():
    done = check(str(ROOT / "examples" / "check_sdpa.py") + ":attend", *QUICK)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere.at_all:f", "raises ModuleNotFoundError: No module named 'nowhere'"),
        ("parity_tests.nothing:f", "raises ModuleNotFoundError: No module named 'parity_tests.nothing'"),
        ("parity_tests.tests.attention_by_hand:rigth", "has no 'rigth' (did you mean right?)"),
        ("parity_tests.tests.attention_by_hand:ONE", "is not callable, but a dict"),
        ("parity_tests.tests.attention_by_hand:Module", "is a class"),
        ("parity_tests.tests.attention_by_hand", "expected module:function"),
        ("nothing.py:f", "no such file"),
        ("FOLDER/broken.py:f", "importing it raises ZeroDivisionError: division by zero"),
        ("FOLDER/leaves.py:f", "importing it raises SystemExit: 3"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_one_line(target, says, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    done = check(target.replace("FOLDER", str(tmp_path)), *QUICK)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("parity: target ")
    assert says in line
    assert done.stdout == ""


@pytest.mark.parametrize("case", attention_cases(by_mask, layouts=["intra", "anchor"], **ONE))
def test_the_helper_gives_one_test_a_case(case):
    case.raise_if_different()


def test_the_helper_fails_in_words_and_skips_what_is_lacking():
    fn = attention(lacks="padding", library="torch")(lambda q, k, v, document_ids: 0 * q)
    intra, padded = attention_cases(fn, layouts=["intra", "padded_end"], **ONE)
    assert intra.id == "intra-h4k2d16-float32"
    assert [mark.kwargs["reason"] for mark in padded.marks] == ["lacks padding"]
    with pytest.raises(AssertionError, match="the output is all zeros"):
        intra.values[0].raise_if_different()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_a_document_mask():
    from examples.check_flex_attention import attend as flex

    result = check_attention(flex, layouts=["intra", "padded_end", "rows", "anchor"], heads=[(4, 2)])
    assert result.passed, result.explain()
    assert [r.not_run for r in result.cases] == [None, None, None, "lacks anchor"]


def test_the_example_test_file_passes():
    from examples.test_my_kernel import test_my_kernel

    (mark,) = test_my_kernel.pytestmark
    cases = {parameter.id: parameter.values[0] for parameter in mark.args[1]}
    assert {bound.case.layout.name for bound in cases.values()} == {
        n for n, layout in LAYOUTS.items() if not layout.adds
    }
    for name in ("anchor", "padded_end", "rows_of_every_kind"):
        test_my_kernel(cases[f"{name}-h4k2d16-float32"])
