"""What was measured, kept line by line: a turn that is over is not measured again, whatever interrupted the rest.

FOLDER/VERB.jsonl holds the settings in its first line, then one measurement a line; FOLDER/VERB.json the result.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import torchtrain
from anchorline.environment import git_state, processor, versions
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import replace_file
from torchtrain.bench.clock import Clock

PACKAGES = ("torch", "transformers", "trl", "flash-attn", "flash-attn-4", "triton", "numpy")


class BenchRecord:
    """The measurements of one verb in a folder. Made by `open_record`."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self._found = path, dict[str, Any]()
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        whole = lines[:-1]  # what follows the last line break was cut off while it was written
        if not whole:
            self._write(json.dumps({"settings": settings}) + "\n", "wb")
            return
        try:
            head, *rest = [json.loads(line) for line in whole]
            self._found = {_name(entry["key"]): entry["value"] for entry in rest}
            before = head["settings"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--out {quoted(path)}: is damaged; remove it, and all is measured anew") from None
        if before != settings:
            raise UserError(f"--out {quoted(path)}: holds measurements of another config or device; give a new folder")
        if lines[-1]:
            self._write(b"\n".join([*whole, b""]).decode(), "wb")

    def once(self, key: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """Return what was measured by this key, now or before."""
        name = _name(key)
        if name not in self._found:
            self._found[name] = value = measure()
            self._write(json.dumps({"key": key, "value": value}) + "\n", "ab")
        return self._found[name]

    def knows(self, key: dict[str, Any]) -> bool:
        """Whether something was measured by this key."""
        return _name(key) in self._found

    def _write(self, text: str, mode: str) -> None:
        try:
            with self.path.open(mode) as file:
                file.write(text.encode())
        except OSError as error:
            raise UserError(f"--out {quoted(self.path)}: {disk_fault(error)}") from None


@contextmanager
def open_record(folder: Path, verb: str, settings: dict[str, Any]) -> Iterator[BenchRecord]:
    """Open what a folder holds of a verb, or begin it; one process at a time.

    Raises:
        UserError: it cannot be written, is of other settings or damaged, or another process measures there.
    """
    lock = FileLock(folder / f".{verb}.lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"--out {quoted(folder)}: another process measures there; give another folder") from None
    except OSError as error:
        raise UserError(f"--out {quoted(folder)}: {disk_fault(error)}") from None
    except NotImplementedError:
        raise UserError(f"--out {quoted(folder)}: its file system takes no locks; give another folder") from None
    try:
        yield BenchRecord(folder / f"{verb}.jsonl", settings)
    finally:
        lock.release()


def write_result(folder: Path, verb: str, result: dict[str, Any]) -> Path:
    """Write FOLDER/VERB.json; return its path.

    Raises:
        UserError: the disk does not take it.
    """
    path = folder / f"{verb}.json"
    try:
        replace_file(path, (json.dumps(result, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"--out {quoted(path)}: {disk_fault(error)}") from None
    return path


def tell_environment(clock: Clock) -> dict[str, Any]:
    """Return when, where and with what, for a result."""
    name = torch.cuda.get_device_name(clock.device) if clock.device.type == "cuda" else processor()
    commit, changed = git_state(Path(torchtrain.__file__).parents[1])
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "threads": torch.get_num_threads() if clock.device.type == "cpu" else None,
        "seconds": clock.kind,
        "commit": commit,
        "changed": changed,
        "versions": versions(PACKAGES),
        "command": shlex.join(["torchtrain", *sys.argv[1:]]),
    }


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
