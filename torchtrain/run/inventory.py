"""Which files of a run's folder are the run's: those that its record lists, or whose name only a run gives."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from anchorline.files import DELETED, PARTIAL, FileEntry, differs
from torchtrain.checkpoint.folder import OWN, STEP
from torchtrain.run.outputs import MODEL, Outputs

_STEP = STEP.pattern
_PARTIAL, _DELETED = re.escape(PARTIAL), rf"{re.escape(DELETED)}(?:-\d+)?"
_FIXED = [
    re.compile(pattern)
    for pattern in (
        rf"run\.json(?:{_PARTIAL}|{re.escape(DELETED)})?",
        rf"(?:outputs\.json|loss\.png)(?:{_PARTIAL})?",
        r"config\.yaml|metrics\.jsonl|timing\.jsonl",
        rf"checkpoints/{_STEP}(?:{_PARTIAL}|{_DELETED})?/(?:{OWN.pattern})",
        rf"bad_steps/{_STEP}\.json(?:{_PARTIAL})?",
        r"tensorboard/events\.out\.tfevents\.[^/]+",
    )
]
_FOLDERS = re.compile(rf"(?:checkpoints|exports)(?:/{_STEP}(?:{_PARTIAL}|{_DELETED})?)?|bad_steps|tensorboard|wandb")
MODEL_FOLDER = re.compile(rf"({MODEL}|exports/{_STEP})({_PARTIAL}|{_DELETED})?(?:/(.+))?")
# Links, too: it makes some of the last run.
_WANDB = re.compile(r"wandb/(?:(?:offline-)?run-[^/]+(?:/.*)?|latest-run|debug[^/]*\.log)")
# What transformers writes: by this alone are the files of an export known to a run of before `outputs.json`.
TRANSFORMERS = re.compile(
    r"(?:generation_)?config\.json|model(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer(?:_config)?\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|merges\.txt|chat_template\.jinja"
)


class Inventory:
    """Tells the run's files from those of others. What it has read once it does not read again while it stays as it is.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int, int, int], bool] = {}

    def take(self, outputs: Outputs, *, listed: bool, wandb: bool) -> tuple[list[str], list[str]]:
        """Return the paths, from the folder, of the run's own files, and of all else.

        Args:
            outputs: what the run says that it has exported.
            listed: whether it is a run that says so; else exports are known by the names of their files.
            wandb: whether it sends to Weights & Biases, whose files then are the run's.

        Raises:
            OSError: a folder cannot be read.
        """
        own: list[str] = []
        strange: list[str] = []
        for name, is_folder, is_plain in _walk(self._folder):
            if wandb and _WANDB.fullmatch(name):
                ours = not is_folder
            elif is_folder:
                ours = bool(_FOLDERS.fullmatch(name) or MODEL_FOLDER.fullmatch(name))
            else:
                ours = is_plain and (
                    any(pattern.fullmatch(name) for pattern in _FIXED) or self._is_exported(name, outputs, listed)
                )
            (own if ours else strange).append(name)
        return own, strange

    def _is_exported(self, name: str, outputs: Outputs, listed: bool) -> bool:
        match = MODEL_FOLDER.fullmatch(name)
        if not match or match[3] is None:
            return False
        folder, state, file = match[1], match[2], match[3]
        if state == PARTIAL and outputs.writing == folder:
            return True
        if state and state != PARTIAL and listed and outputs.removing != f"{folder}{state}":
            return False
        if state != PARTIAL and folder in outputs.models:
            entry = outputs.models[folder].get(file)
            return entry is not None and self._same(self._folder / name, entry)
        return not listed and bool(TRANSFORMERS.fullmatch(file))

    def _same(self, path: Path, entry: FileEntry) -> bool:
        seen = path.stat()
        key = (entry.sha256, seen.st_ino, seen.st_size, seen.st_mtime_ns)
        if key not in self._known:
            self._known[key] = differs(path, entry) is None
        return self._known[key]


def find_change(folder: Path, files: Mapping[str, FileEntry], whole: bool) -> str | None:
    """Return, in words, how an exported folder is not what was exported, or None; what else lies in it does not matter.

    Args:
        folder: where it is.
        files: what it must hold.
        whole: read the content of its files, too, and not only their sizes.

    Raises:
        OSError: a file cannot be read.
    """
    for name, entry in sorted(files.items()):
        if (fault := differs(folder / name, entry, whole)) is not None:
            return f"{folder / name}: {fault}"
    return None if files else f"{folder}: is empty"


def _walk(top: Path, below: str = "") -> Iterator[tuple[str, bool, bool]]:
    """Yield path, whether it is an empty folder, and whether it is a plain file, of all that a folder holds.

    No link is followed.
    """
    with os.scandir(top / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        name = f"{below}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            yield name, False, entry.is_file(follow_symlinks=False)
        elif any(os.scandir(entry.path)):
            yield from _walk(top, f"{name}/")
        else:
            yield name, True, False
