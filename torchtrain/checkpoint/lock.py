"""One process at a time writes a run's folder. The system drops the lock when its holder ends, however it ends."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anchorline.errors import UserError, disk_fault

_ATTEMPTS, _SECONDS_BETWEEN = 5, 0.2


@contextmanager
def hold(record: Path) -> Iterator[None]:
    """Hold a run for as long as the block lasts.

    Args:
        record: `run.json`, which is written once and never replaced.

    Raises:
        UserError: another process holds it; it cannot be written; or its disk has no locks.
    """
    try:
        file = record.open("r+b")  # nothing is written, but NFS gives this lock only to who may
    except OSError as error:
        raise UserError(f"run.folder {record.parent}: cannot be written: {disk_fault(error)}") from None
    with file:
        for attempt in range(_ATTEMPTS):
            if _taken(record, file.fileno(), fcntl.LOCK_EX):
                break
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_SECONDS_BETWEEN)
        else:
            raise UserError(at_work(record))
        yield


def is_held(record: Path) -> bool:
    """Whether a process is at work on a run. Looking takes a shared lock for an instant, which `hold` waits out.

    Raises:
        UserError: its disk has no locks.
    """
    with record.open("rb") as file:
        return not _taken(record, file.fileno(), fcntl.LOCK_SH)


def at_work(record: Path) -> str:
    """Return, in words, that a run is held."""
    return f"run.folder {record.parent}: another process is at work in it; stop that, or choose another folder"


def _taken(record: Path, handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"run.folder {record.parent}: its disk gives no locks ({disk_fault(error)}); mount it with them "
            "(Lustre: -o flock; NFS: with its lock service), or choose another disk"
        ) from None
    return True
