"""One process at a time writes a run's folder. The system drops the lock when its holder ends, however it ends."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtrain.errors import UserError

_ATTEMPTS, _SECONDS_BETWEEN = 5, 0.2


@contextmanager
def hold(record: Path) -> Iterator[None]:
    """Hold a run for as long as the block lasts.

    Args:
        record: `run.json`, which is written once and never replaced.

    Raises:
        UserError: another process holds it.
    """
    with record.open("rb") as file:
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(_SECONDS_BETWEEN)
        else:
            raise UserError(
                f"run.folder {record.parent}: another process is at work in it; stop that, or choose another folder"
            )
        yield


def is_held(record: Path) -> bool:
    """Whether a process is at work on a run. Looking takes a shared lock for an instant, which `hold` waits out."""
    with record.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
