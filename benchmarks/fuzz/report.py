"""What is printed: each fault with the command that shows it again, and counts."""

import collections
import time

from benchmarks.fuzz.inputs import Input
from benchmarks.fuzz.runner import Ended

SHOWN_LINES, SHOWN_CHARACTERS = 8, 300
EVERY = 100  # inputs between two lines of progress


class Report:
    """Counts of inputs by kind, and of faults."""

    def __init__(self, slow: float) -> None:
        """slow: seconds after which an input is shown though it ended as it should."""
        self.slow = slow
        self.counts: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()

    @property
    def faults(self) -> int:
        """How many inputs found a fault."""
        return self.counts["faults"]

    def add(self, number: int, given: Input, ended: Ended, again: str) -> None:
        """Count an input, and show it if it is a fault or slow. again: the command that runs it once more."""
        self.counts["inputs"] += 1
        self.counts[given.about.partition(":")[0]] += 1
        self.counts["faults"] += not ended.good
        if not ended.good or ended.seconds > self.slow:
            arguments = " ".join(repr(argument)[:SHOWN_CHARACTERS] for argument in given.arguments)
            print(f"{number}: {ended.why or 'right'} ({ended.seconds:.1f} s)\n  {again}\n  {given.about}")
            print(f"  {given.environment or ''} {given.command} {arguments}")
            for line in ended.said.splitlines()[-SHOWN_LINES:]:
                print(f"    {line[:SHOWN_CHARACTERS]}")
        if self.counts["inputs"] % EVERY == 0:
            print(f"{number}: {self.faults} faults in {self._seconds():.0f} s", flush=True)

    def end(self) -> None:
        """Print the counts."""
        print(f"{dict(self.counts)} in {self._seconds():.0f} s")

    def _seconds(self) -> float:
        return time.monotonic() - self.started
