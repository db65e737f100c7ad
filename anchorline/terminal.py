"""rich's console for names of folders, domains and tasks, and texts of others, which may hold escape codes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def progress(name: str) -> Iterator[Callable[[str | None, int, int], None]]:
    """A bar on standard error, where that is a terminal; yields what takes a line for above it, steps done, and all."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def advance(line: str | None, done: int, total: int) -> None:
            if line is not None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.update(task, completed=done, total=total)

        yield advance
