"""Files that survive a crash: written once, flushed to the disk, committed by a rename."""

import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from anchorline.errors import UserError, disk_fault, quoted, quoted_reason

# What a folder or file is called before it counts, and while it is removed.
PARTIAL, DELETED = ".partial", ".deleted"
_BLOCK = 1 << 22
MOST_JSON = 1 << 26  # bytes: more than the settings of any model, and its tokenizer


class FileEntry(BaseModel):
    """What a file must be: its size in bytes and the SHA-256 of its content, as hex."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int
    sha256: str


def expanded(path: str | Path) -> Path:
    """Return a user's path with ~ and ~NAME replaced.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{quoted(str(path))}: ~ stands for the folder of nobody here; write the path out") from None


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
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = bytearray()
        try:
            while block := file.read(min(_BLOCK, most + 1 - len(content))):
                content += block
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        if len(content) > most:
            raise OSError(errno.EFBIG, f"longer than {most:,} bytes", str(path))
        return bytes(content)


def read_json(path: Path, what: str, most: int = MOST_JSON) -> dict[str, Any]:
    """Read a user's file that holds one JSON object.

    Args:
        path: the file.
        what: opens the message.
        most: bytes that are read.

    Raises:
        UserError: it cannot be read, or is no JSON, or no object.
    """
    try:
        found = json.loads(read_file(path, most).decode("utf-8"))
    except OSError as error:
        raise UserError(f"{what}: {disk_fault(error)}") from None
    except RecursionError:
        raise UserError(f"{what}: {quoted(path)} is not JSON (values are nested too deep)") from None
    except ValueError as error:  # of JSON, of UTF-8, of an integer's digits
        raise UserError(f"{what}: {quoted(path)} is not JSON ({quoted_reason(error)})") from None
    if not isinstance(found, dict):
        raise UserError(f"{what}: {quoted(path)} holds no values by name, but a {type(found).__name__}")
    return found


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
