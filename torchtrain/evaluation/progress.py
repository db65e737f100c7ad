"""How far a measurement is, told every few seconds."""

import time
from collections.abc import Callable
from dataclasses import astuple
from datetime import timedelta

from torchtrain.evaluation.generation import AnswerCost

_SECONDS_BETWEEN_LINES = 5.0


class AnswerProgress:
    """Counts what batches cost, and tells every few seconds what is left.

    Args:
        what: opens each line.
        say: takes lines.
        pulse: called after each batch.
    """

    def __init__(
        self,
        what: str = "",
        say: Callable[[str], None] = lambda line: None,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self._what, self._say, self._pulse = what, say, pulse
        self._began = self._told = time.monotonic()
        self.total = 0
        self.cost = AnswerCost(0, 0, 0)

    def note(self, done: int, work: AnswerCost) -> None:
        """Add a batch, after which `done` are done."""
        self.cost = AnswerCost(*(a + b for a, b in zip(astuple(self.cost), astuple(work), strict=True)))
        now = time.monotonic()
        if done < self.total and now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            left = timedelta(seconds=round((now - self._began) / done * (self.total - done)))
            self._say(f"{self._what} {done}/{self.total} · {left} left")
        self._pulse()
