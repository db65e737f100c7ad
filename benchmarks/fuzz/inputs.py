"""An input: one command, on files that lie beside it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Input:
    """One command on damaged files: what the runner needs, and what a person needs to see.

    Attributes:
        command: torchtrain, jaxref or parity.
        arguments: of the command, its verb first.
        environment: variables that are set for it.
        about: what was damaged.
        made: the only thing in the folder that the command makes, if it ends with 0; otherwise it makes nothing. Empty
            where that is not known.
        refused: whether it ends before it trains or compiles, though its verb does both.
    """

    command: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    about: str = ""
    made: str = ""
    refused: bool = False

    @property
    def quick(self) -> bool:
        """Whether it neither trains nor compiles."""
        return self.refused or not self.arguments or (self.command, self.arguments[0]) in _QUICK


_QUICK = {
    *(("torchtrain", verb) for verb in ("plan", "config", "status", "verify")),
    *(("jaxref", verb) for verb in ("mask", "rope", "convert")),
    ("parity", "diff"),
}

Make = Callable[[random.Random, Path], Input]  # from random numbers and a copy of the valid files, which it damages
