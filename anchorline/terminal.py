"""rich's console for names of folders, domains and tasks, and texts of others, which may hold escape codes."""

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
