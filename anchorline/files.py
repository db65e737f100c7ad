"""Files that survive a crash: written once, flushed to the disk, committed by a rename."""

import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path

from pydantic import BaseModel, ConfigDict

# What a folder or file is called before it counts, and while it is removed.
PARTIAL, DELETED = ".partial", ".deleted"
_BLOCK = 1 << 22


class FileEntry(BaseModel):
    """What a file must be: its size in bytes and the SHA-256 of its content, as hex."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int
    sha256: str


def read_file(path: Path, most: int) -> bytes:
    """Read a user's file whole: a regular one (a pipe would make us wait), of at most `most` bytes.

    Raises:
        OSError: what the system says; or it is no regular file, it is longer, or no file can have its name.
    """
    try:
        file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115 - closed below
    except ValueError:  # NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    with file:
        held = os.fstat(file.fileno())
        if not stat.S_ISREG(held.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if held.st_size > most:
            raise OSError(errno.EFBIG, f"longer than {most:,} bytes", str(path))
        return file.read(most)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def write_file(path: Path, content: bytes | memoryview) -> FileEntry:
    """Write a file that does not exist yet, and flush it to the disk.

    Raises:
        OSError: what the system says, such as a full disk.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Give a file a new content, or make it: anyone sees the old or the new, never a part."""
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    write_file(partial, content)
    os.replace(partial, path)
    sync(path.parent)


def entry_of(path: Path, length: int | None = None) -> FileEntry:
    """Return what a file is, or its first `length` bytes are (fewer where it is shorter)."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK if length is None else min(_BLOCK, length - size)):
            digest.update(block)
            size += len(block)
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk, so that a rename after it cannot become durable before it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit(partial: Path, final: Path) -> None:
    """Rename a folder, everything in it flushed first, to the name under which it counts.

    One that has the name already is removed only after the new one has taken it.
    """
    for folder, _, names in os.walk(partial):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    doomed = _set_aside(final) if final.exists() else None
    os.rename(partial, final)
    sync(final.parent)
    if doomed is not None:
        shutil.rmtree(doomed)


def discard(folder: Path) -> None:
    """Remove a folder. It loses its name first, so that a crash never leaves a part of it under that name."""
    shutil.rmtree(_set_aside(folder))


def sweep(folder: Path) -> None:
    """Remove from a folder, if it is there, what interruptions left in it. Only for who may write there alone."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.endswith((PARTIAL, DELETED)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _set_aside(folder: Path) -> Path:
    doomed = folder.with_name(folder.name + DELETED)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    sync(folder.parent)
    return doomed
