"""How messages to a user are written: a mistake is one printable line, and values in it are quoted and short."""

import builtins
import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_MOST_QUOTED, _MOST_OF_A_REASON = 120, 300


class UserError(ValueError):
    """A mistake of the user's: one line that names the field, the value and the fix."""


def disk_fault(error: OSError) -> str:
    """Return the message of an error of the system with the file's name: "no space left on device (PATH)"."""
    message = one_line(error.strerror).lower() if error.strerror else one_line(error)
    named = isinstance(error.filename, str | bytes)
    return f"{message} ({quoted(Path(os.fsdecode(error.filename)))})" if named else message


def quoted(value: object, most: int = _MOST_QUOTED) -> str:
    """Return a value for a message: on one line, printable, cut after `most` characters with `...`."""
    text = one_line(value if hasattr(value, "__fspath__") else repr(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def quoted_reason(error: object) -> str:
    """Return the message of a library's error on one line, cut where it is long."""
    reason = one_line(error) or type(error).__name__
    return reason if len(reason) <= _MOST_OF_A_REASON else f"{reason[: _MOST_OF_A_REASON - 3]}..."


def some(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(name: str, known: Iterable[str], near: Sequence[str] = (), inside: str = "") -> str:
    """` (did you mean NAME?)` of the names that are near, else of the known one that is most like it, or nothing.
    inside: what stands before the known names."""
    near = near or [inside + x for x in difflib.get_close_matches(name[:100], list(dict.fromkeys(known)), n=1)]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def one_line(message: object) -> str:
    """Return a text as one line for any terminal: white space is folded, unprintable characters are escaped."""
    return printable(" ".join(str(message).split()))


def printable(text: str) -> str:
    """Return a text with every unprintable character but tabs and ends of lines escaped."""
    escaped = (c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text)
    return text if text.isprintable() else "".join(escaped)


def print(*parts: object, **how: Any) -> None:
    """Print as Python does, with unprintable characters escaped: names and others' texts may hold escape codes."""
    builtins.print(*(printable(str(part)) for part in parts), **how)
