"""Files of events, one JSON object on a line, and the fields that readers rely on.

`metrics.jsonl` holds computed values: an interrupted and resumed run leaves the same bytes as an uninterrupted run.
`timing.jsonl` holds durations and is only appended to.
"""

import errno
import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import FileEntry, entry_of, open_file, parse_json, read_file, sync

_MOST_BYTES = 1 << 31
_FIRST_BYTES = 1 << 20  # in which a first line is looked for
NOTHING = FileEntry(bytes=0, sha256=hashlib.sha256().hexdigest())


class MetricsFile:
    """A file of events such as `metrics.jsonl`, as a context manager. Several threads may write.

    An event survives a crash of the process once `write` has returned. Opening the file drops an incomplete last line.

    path: the file; None writes nothing (on all ranks but the first).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "MetricsFile":
        if self._path is not None:
            start, end = _read_end(self._path, 0) if os.path.lexists(self._path) else (0, b"")
            complete = start + end.rfind(b"\n") + 1
            # Unbuffered: closing the file does not repeat a write that failed.
            self._file = open(self._path, "ab", buffering=0, opener=_open_without_blocking)
            self._file.truncate(complete)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append an event's line; null for a number that is not finite. Raises UserError: it could not be written."""
        if self._file is None or self._path is None:
            return
        left = memoryview((json.dumps(finite({"event": event, **values}), allow_nan=False) + "\n").encode())
        try:
            with self._lock:
                while left:
                    left = left[self._file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self._path}: could not be written: {disk_fault(error)}; "
                f"correct that, then: torchtrain resume {self._path.parent}"
            ) from None

    def settle(self) -> FileEntry:
        """Flush the file to the disk; return its size and digest."""
        if self._file is None or self._path is None:
            return NOTHING
        os.fsync(self._file.fileno())
        return entry_of(self._path)


def has_beginning(path: Path, entry: FileEntry) -> bool:
    """Whether a file of events begins with the bytes that a checkpoint recorded. Raises OSError: it cannot be read."""
    return (entry_of(path, entry.bytes) if path.exists() else NOTHING) == entry


def rewind_metrics(path: Path, entry: FileEntry) -> None:
    """Truncate a file of events to a checkpoint's size, after `has_beginning`."""
    path.touch()
    os.truncate(path, entry.bytes)
    sync(path)


class _Event(BaseModel):
    """The fields of an event that readers rely on; others are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Loss = float | None


class _DomainLoss(_Event):
    loss: _Loss
    labelled_tokens: _Count


class _Losses(_Event):
    step: _Count
    tokens_seen: _Count
    loss: _Loss
    domains: dict[str, _DomainLoss]


class _Step(_Losses):
    gradient_norm: _Loss
    left_out: str = ""


class _Speed(_Event):
    step: _Count = 0
    seconds: Annotated[float, Field(ge=0, lt=1e9)] = 0.0
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    flops_per_second: Annotated[float, Field(ge=0)] = 0.0
    mfu: float = 0.0
    memory_gib: float = 0.0


class _OfStep(_Event):
    step: _Count


class _Begin(_OfStep):
    tokens: str
    tokens_sha256: str
    base: str | None


_METRICS = {"step": _Step, "evaluation": _Losses}
_TIMING = {"step": _Speed, "save": _OfStep, "begin": _Begin}


def read_metrics(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """Return the events of a `metrics.jsonl` or `timing.jsonl` in order, without an incomplete last line; none without
    a file.

    last: read no more than the first line and about so many last ones, which takes the same time of any length.
    Raises UserError: the file cannot be read, or a line is damaged; the message names file and line.
    """
    start, lines = 0, list[bytes]()
    try:
        if last is None:
            *lines, _ = read_file(path, _MOST_BYTES).split(b"\n")
        else:
            start, end = _read_end(path, last)
            *lines, _ = end.split(b"\n")
            if start:
                with open_file(path) as file:
                    first, newline, _ = file.read(_FIRST_BYTES).partition(b"\n")
                lines[:1] = [first] if newline else []  # the line that is cut off goes
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: {one_line(error.strerror or error).lower()}") from None
    kinds = _TIMING if path.name == "timing.jsonl" else _METRICS
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = parse_json(line)
            if not isinstance(event.get("event"), str):
                raise ValueError("the field event is missing")
            if (kind := kinds.get(event["event"])) is not None:
                kind.model_validate(event)
        except ValueError as error:
            where, reason = f"line {number}", one_line(error)[:200]
            if start and number > 1:
                where = f"line {len(lines) + 1 - number} from the end"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{quoted('.'.join(map(str, first['loc'])))[1:-1]}: {first['msg']}"
            raise UserError(f"{path}: {where} is damaged: {reason}") from None
        events.append(event)
    return events


def _read_end(path: Path, lines: int) -> tuple[int, bytes]:
    """Return where the end of a file begins that has more than its last `lines`, and that end; a short file whole."""
    size, length = path.stat().st_size, 1 << 16
    while True:
        start = max(0, size - length)
        with open_file(path) as file:
            file.seek(start)
            end = file.read(size - start)
        if not start or end.count(b"\n") > lines:
            return start, end
        if length >= _MOST_BYTES:
            raise OSError(errno.EFBIG, f"its last lines are longer than {_MOST_BYTES:,} bytes", str(path))
        length *= 4


def last_saved(events: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the last saved step of `timing.jsonl`, or None; a `begin` says that later checkpoints are gone."""
    steps = [event["step"] for event in events if event["event"] in ("begin", "save")]
    return steps[-1] or None if steps else None


def finite(value: Any) -> Any:
    """Return a tree with None for every number that is not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def step_status(event: Mapping[str, Any]) -> str:
    """Return a step's event as text: loss, gradient norm, tokens/s, and MFU and memory if known."""
    loss = "none" if event["loss"] is None else f"{event['loss']:.4f}"
    norm = "none" if event["gradient_norm"] is None else f"{event['gradient_norm']:.3g}"
    parts = [f"loss {loss}", f"gradient {norm}", f"{event['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in event:
        parts.append(f"MFU {event['mfu']:.1%}")
    if "memory_gib" in event:
        parts.append(f"peak {event['memory_gib']:.1f} GiB")
    if "left_out" in event:
        parts.append(f"left out: {event['left_out']}")
    return " · ".join(parts)


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
