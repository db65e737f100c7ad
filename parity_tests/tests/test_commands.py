"""Verbs, arguments, options, defaults and exit codes of the commands change only where docs/commands.md does."""

from pathlib import Path

from parity_tests.commands import describe

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_command_lines_are_those_of_the_page():
    assert describe() == PAGE.read_text(encoding="utf-8"), "python -m parity_tests.commands --write docs/commands.md"
