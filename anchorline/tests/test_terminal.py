"""No name or text that is printed can move the cursor, colour a line or ring a bell."""

import io
import re
import sys

import pytest
from rich.table import Table
from rich.text import Text

from anchorline.errors import print
from anchorline.terminal import Console

NAMES = ["a\x1b[2Jb", "\x1b]0;title\x07", "x\ry", "b\x08\x9b31m", "\u202eabc", "\udc80", "\x1b[1A\x1b[2K", "\0"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_printed_is_printable(name, terminal):
    stream = io.StringIO()
    print("run", name, f"{name}!", file=stream)
    console = Console(file=stream, force_terminal=terminal, width=200, _environ={})
    table = Table(name, "loss", title=name)
    table.add_row(name, "1.0")
    console.print(name, markup=False, highlight=False, soft_wrap=True)
    console.print(Text(name, style="bold"), table)
    with console.status(Text(name)) as spinner:
        spinner.update(Text(name))
        console.print(name, markup=False)
    said = stream.getvalue()
    assert terminal is ("\x1b[1m" in said)
    own = r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r" if terminal else "\n"  # rich's
    assert re.sub(own, "", said).replace("\n", "").isprintable()
    escaped, shown = (text.encode("unicode_escape").decode() for text in (name, re.sub("[\a\b\r]", "", name)))
    assert said.startswith(f"run {escaped} {escaped}!\n")
    assert said.count(shown) >= 4  # a narrow cell of a table cuts it


def test_tables_and_scripts_keep_their_lines(capsys):
    print("a\n\tb", 1, end="")
    print("oops", file=sys.stderr)
    assert capsys.readouterr() == ("a\n\tb 1", "oops\n")
