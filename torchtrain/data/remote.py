"""Files by URL, on whatever file system fsspec knows: s3://, gs://, hf://, https://, zip://...::... and the like."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from tarfile import TarError
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile

from anchorline.errors import UserError, quoted, quoted_reason

# What tells one version of a file from another, by what file systems call it.
_VERSIONS = ("ETag", "etag", "blob_id", "sha256", "md5", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class FileInfo:
    """A file of a source: its path or URL, its size in bytes, and what tells one version of it from another."""

    place: str
    bytes: int
    version: str | int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.place.partition("::")[0].rpartition("/")[2]


def is_url(pattern: str) -> bool:
    """Whether a path is a URL: what names a protocol."""
    return "://" in pattern or "::" in pattern


def list_urls(pattern: str) -> list[FileInfo]:
    """Return the files that a URL with wildcards means, sorted.

    Raises:
        UserError: nothing matches, the file system is not known, needs a package or does not answer.
    """
    shown = f"data.sources: files {quoted(pattern)}"
    fsspec = _import(shown)
    first, *rest = pattern.split("::")
    behind = "".join(f"::{part}" for part in rest)
    try:
        system, path = fsspec.core.url_to_fs(pattern)
        found = system.glob(path, detail=True)
        files = []
        for name in sorted(found):
            info = found[name] if found[name].get("size") is not None else system.info(name)
            if info.get("type") == "directory":
                continue
            # Behind `::` stands a place in another place, which `unstrip_protocol` does not know of.
            url = f"{first.partition('://')[0]}://{name}{behind}" if rest else system.unstrip_protocol(name)
            version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
            files.append(FileInfo(url, int(info.get("size") or 0), version))
    except faults() as error:
        raise UserError(f"{shown} cannot be listed: {quoted_reason(error)}") from None
    if not files:
        raise UserError(f"{shown} matches no file; check the URL")
    return files


def open_url(url: str) -> AbstractContextManager[BinaryIO]:
    """Open a file for reading its bytes as they are. Raises what `faults` names."""
    return cast("AbstractContextManager[BinaryIO]", _import(f"data.sources: {quoted(url)}").open(url, "rb"))


def faults() -> tuple[type[Exception], ...]:
    """Return what file systems raise of a place that cannot be listed or read."""
    return OSError, ValueError, ImportError, RuntimeError, LookupError, TypeError, EOFError, BadZipFile, TarError


def _import(shown: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise UserError(f"{shown} needs the package fsspec: pip install 'anchorline[torch]'") from None
    return fsspec
