"""A block that kills the worker it runs in, once; in a module of its own, because workers import it."""

import os
import signal
from pathlib import Path
from typing import Any

from torchtrain.data.blocks import ReadRecords

TASK = 3


class KilledOnce(ReadRecords):
    """As its base, but who reads task 3 first is killed in the middle of it."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        mark = Path(self.sources[0].files or "").parent.with_name("killed")
        for number, document in enumerate(super().run(data, rank, world_size)):
            if rank == TASK and number == 20 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield document
