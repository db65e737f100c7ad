"""The road to a terminal: what is printed, and rich's console, write nothing raw that would move or change it.

Names of folders, domains and tasks, texts and errors of libraries may hold escape codes.
"""

import builtins
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from anchorline.errors import printable


class Console(rich.console.Console):
    """rich's console, on which only rich's own styles are escape codes."""

    def render(self, *what: Any, **how: Any) -> Iterable[Segment]:
        """Render as rich does, with unprintable characters escaped."""
        for text, style, control in super().render(*what, **how):
            yield Segment(text if control else printable(text), style, control)


def print(*parts: object, **how: Any) -> None:
    """Print as Python does, with unprintable characters escaped."""
    builtins.print(*(printable(str(part)) for part in parts), **how)
