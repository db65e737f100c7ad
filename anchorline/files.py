"""Read and write files. A crash leaves every file whole: it is written, flushed to the disk, then renamed.

Removing a folder removes only the files that a list names.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from anchorline.errors import UserError, one_line, quoted, quoted_reason

# Endings of names: of what is not yet complete, and of what is being removed.
PARTIAL, DELETED = ".partial", ".deleted"
_BLOCK = 1 << 22
MOST_JSON = 1 << 26  # bytes: more than the settings of any model, and its tokenizer
# Paths below a folder that a user names are at most this much longer, in bytes.
_ROOM_BELOW = 200
# Why a folder may stay: it holds something, is a disk's root, or is where we may not write.
_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS}


class FileEntry(BaseModel):
    """The size of a file in bytes, and the SHA-256 of its content as hex."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes: int
    sha256: str


def expand(path: str | Path) -> Path:
    """Return a user's path with ~ and ~NAME replaced. Raises UserError: there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{quoted(str(path))}: ~ names the folder of a user who is not here; write the path out"
        ) from None


def resolve(field: str, path: str | Path) -> Path:
    """Return a user's folder as an absolute path without links and `..`; messages name the field. Making folders later
    cannot change what it means. Raises UserError: no folder can have this path, or a link leads to nothing.
    """
    opening = f"{field} {quoted(str(path))}" if field else quoted(Path(path))
    try:
        written = expand(path).absolute()
        for place in (written, *written.parents):
            if place.is_symlink() and not place.exists():
                raise UserError(
                    f"{opening}: {quoted(place)} is a link to what is not there; mount its disk, or remove the link"
                )
        real = Path(os.path.realpath(written))
        with suppress(FileNotFoundError, NotADirectoryError):  # a later write reports that it is not a folder
            os.lstat(real / ("0" * _ROOM_BELOW))
        return real
    except OSError as error:
        raise UserError(f"{opening}: {one_line(error.strerror).lower()}; choose another") from None
    except ValueError as error:  # NUL, or half a surrogate pair
        if isinstance(error, UserError):
            raise
        raise UserError(f"{opening}: no folder can have this name; choose another") from None


def resolve_folder(field: str, path: str | Path) -> Path:
    """Return the path of a folder as `resolve` does. Raises UserError: as `resolve`; or a file has this name."""
    real = resolve(field, path)
    if os.path.lexists(real) and not real.is_dir():
        raise UserError(f"{field} {quoted(str(path))}: is a file; give the name of a folder")
    return real


def check_no_pattern(opening: str, folder: str | Path) -> None:
    """Refuse a data set's folder whose path `datasets` takes for a pattern. Raises UserError: it would read others."""
    if re.search(r"[*?\[\]\n\r]|::", os.path.abspath(folder)):
        raise UserError(
            f"{opening}: datasets reads * ? [ ] :: and line breaks in a path as a pattern; rename the folder"
        )


def open_file(path: Path) -> FileIO:
    """Open a regular file to read, no pipe, which could be waited for without end. Raises OSError."""
    try:
        file = FileIO(str(path), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError:  # NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_file(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes, its size known or not. Raises OSError: as `open_file`; or it is longer."""
    content = bytearray()
    with open_file(path) as file:
        try:
            while block := file.read(min(_BLOCK, most + 1 - len(content))):
                content += block
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    if len(content) > most:
        raise OSError(errno.EFBIG, f"longer than {most:,} bytes", str(path))
    return bytes(content)


def read_json(path: Path, what: str = "", most: int = MOST_JSON) -> dict[str, Any]:
    """Read a file of one JSON object, at most `most` bytes. Raises UserError, which opens with `what`: it is none."""
    opening = f"{what}: {quoted(path)}" if what else quoted(path)
    try:
        return parse_json(read_file(path, most))
    except OSError as error:
        raise UserError(f"{opening}: {one_line(error.strerror or error).lower()}") from None
    except ValueError as error:
        raise UserError(f"{opening} {quoted_reason(error)}") from None


def parse_json(text: bytes) -> dict[str, Any]:
    """Return a text's JSON object. Raises ValueError, whose message goes on after a file's name: it is none."""
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of an integer's digits
        reason = "values are nested too deep" if isinstance(error, RecursionError) else quoted_reason(error)
        raise ValueError(f"is not JSON ({reason})") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds no values by name, but a {type(content).__name__}")
    return cast("dict[str, Any]", content)


def write_file(path: Path, *parts: bytes | memoryview) -> FileEntry:
    """Write a new file, one part after another, and flush it to the disk. Raises OSError, such as a full disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return FileEntry(bytes=sum(map(len, parts)), sha256=digest.hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Make a file or replace its content. A reader sees the old content or the new one, never a part."""
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    write_file(partial, content)
    os.replace(partial, path)
    sync(path.parent)


def save(path: Path, content: bytes) -> None:
    """Replace the content of a file that a user names. A link stays a link, and a device is written to. Raises OSError:
    what the system says; of a file, the old content is still there.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():  # a device or a pipe
            with target.open("wb") as stream:
                stream.write(content)
        else:
            replace_file(target, content)
    except OSError as error:  # it may name the partial file
        raise OSError(error.errno, error.strerror, str(path)) from None


def entry_of(path: Path, length: int | None = None) -> FileEntry:
    """Return the size and the digest of a file, or of its first `length` bytes. Raises OSError: as `open_file`."""
    digest, size = hashlib.sha256(), 0
    with open_file(path) as file:
        while block := file.read(_BLOCK if length is None else min(_BLOCK, length - size)):
            digest.update(block)
            size += len(block)
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def entries_of(folder: Path) -> dict[str, FileEntry]:
    """Return the size and the digest of every file below a folder, by its path from the folder."""
    paths = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): entry_of(path) for path in sorted(paths)}


def differs(path: Path, entry: FileEntry, whole: bool = True) -> str | None:
    """Return how a file differs from its entry, in size or, if `whole`, in content; or None. Raises OSError."""
    if path.is_symlink() or not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != entry.bytes:
        return f"is cut off or overwritten ({size:,} bytes; {entry.bytes:,} were written)"
    if whole and entry_of(path) != entry:
        return "its content has changed (its SHA-256 is not the one written down)"
    return None


def follow_umask(folder: Path) -> None:
    """Give all files below a folder the mode that this process gives to new files. Some libraries make private ones."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for place, _, names in os.walk(folder):
        for name in names:
            os.chmod(Path(place, name), mode)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk, so that a rename after it cannot become durable before it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit(partial: Path, final: Path) -> None:
    """Flush a folder to the disk, then give it its final name. Raises OSError: also if something has that name."""
    for folder, _, names in os.walk(partial):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    os.rename(partial, final)
    sync(final.parent)


@contextmanager
def build_folder(folder: Path) -> Generator[Path]:
    """Yield a path at which to make a folder; it gets its final name when the block ends. A failure leaves nothing.
    Raises OSError: what the system says; or something has the name by then.
    """
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=PARTIAL, dir=folder.parent))
    try:
        yield partial / folder.name
        follow_umask(partial / folder.name)
        commit(partial / folder.name, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_tree(path: Path) -> None:
    """Remove a folder, if it is there; of a link the link alone. Raises OSError: what the system says."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif os.path.lexists(path):
        shutil.rmtree(path)


def set_aside(folder: Path) -> Path:
    """Give a folder that is no longer valid a new name; return it. Raises OSError: what the system says."""
    names = (f"{folder.name}{DELETED}" + (f"-{number}" if number else "") for number in itertools.count())
    aside = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    os.rename(folder, aside)
    sync(folder.parent)
    return aside


def remove(folder: Path, names: Iterable[str]) -> bool:
    """Remove files of a folder by their paths in it, then folders that this empties; return whether the folder is gone.
    Nothing behind a link is removed, and one of the names may be missing. Raises OSError.
    """
    names = sorted(names)
    if folder.is_symlink():
        return False
    top, parents = os.path.realpath(folder), {folder}
    for name in names:
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            continue
        if os.path.realpath(path.parent) == os.path.normpath(f"{top}/{os.path.dirname(name)}"):
            parents |= {parent for parent in path.parents if parent.is_relative_to(folder)}
            if path.is_dir() and not path.is_symlink():
                parents.add(path)
            else:
                path.unlink(missing_ok=True)
    for place in sorted(parents, reverse=True):
        try:
            place.rmdir()
        except OSError as error:
            if error.errno not in _STAYS:
                raise
    return not folder.exists()
