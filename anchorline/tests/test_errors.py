"""What a message may hold: one line, printable, of bounded length."""

import errno
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from anchorline.errors import disk_fault, one_line, quoted, quoted_reason

ANY = st.text(alphabet=st.characters())  # half surrogate pairs and control characters, too


@given(text=ANY)
def test_any_text_becomes_one_printable_line(text):
    for line in (one_line(text), quoted(text), quoted_reason(text)):
        assert line.isprintable()
        line.encode()


def test_what_is_cut_shows_it():
    assert quoted("x" * 1000) == f"'{'x' * 116}..."
    assert quoted("short") == "'short'"
    assert quoted(Path("runs/a")) == "runs/a"
    assert quoted_reason("y" * 1000) == f"{'y' * 297}..."
    assert quoted_reason(KeyError()) == "KeyError"
    assert one_line("a\0b\ud800\x1b[31m\u2028c") == "a\\x00b\\ud800\\x1b[31m c"


def test_a_fault_of_the_disk_names_the_file():
    assert disk_fault(OSError(errno.ENOSPC, "No space left on device", "a\nb")) == "no space left on device (a b)"
    assert disk_fault(OSError("closed")) == "closed"
