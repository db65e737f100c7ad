"""Where a model is: a folder of this disk, looked for first, or an id of a hub that has to answer in time.

`huggingface_hub.snapshot_download` does not serve here: with `etag_timeout` 0.5 s it did not return within 45 s from a
hub that takes the connection and never answers (`test_hub.py`). Here the hub is asked once what it holds, with a time
limit, and a download goes on for as long as something arrives.
"""

import difflib
import fnmatch
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, one_line, quoted, quoted_reason

ANSWER_SECONDS = 10.0  # for the hub to say what a model consists of
STALL_SECONDS = 60.0  # without a byte, of a download; huggingface_hub tries again in between
CONFIGS = ("*.json", "*.model", "*.txt", "*.jinja")
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
CODE = ("*.py",)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MOST_ID = 96  # characters, by the hub's own rule
_MOST_LISTED = 10_000  # neighbours that are compared with a name

logger = logging.getLogger(__name__)


def find_model(
    source: str, field: str, patterns: Sequence[str], say: Callable[[str], None] = logger.info, special: str = "smollm2"
) -> Path:
    """Return the folder that holds a model's files: the one that `source` names, or a copy of the hub's in its cache.

    Args:
        source: a folder, or a hub id such as `name/model`.
        field: opens messages.
        patterns: of the files that are needed.
        say: takes a line when the hub is asked, and when it did not answer and its cache stands in.
        special: a name that the caller takes besides, for the message.

    Raises:
        UserError: neither a folder with a config.json nor an id, or an id that the hub does not know; without the model
        in the cache, no answer within `ANSWER_SECONDS` or a download that stalls for `STALL_SECONDS`.
    """
    folder = _expand(source)
    try:
        if folder is not None and (folder / "config.json").is_file():
            return folder
        there = folder is not None and folder.exists()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise UserError(f"{field} {quoted(source)}: {one_line(error.strerror).lower()}; give a folder") from None
    looked = f"{field} {quoted(source)}: no folder with a config.json{_nearest(folder)}"
    if there:
        raise UserError(
            f"{field} {quoted(source)}: is there, but is not a folder with a config.json, and thus not a hub id"
        )
    if not _ID.fullmatch(source) or len(source) > _MOST_ID:
        raise UserError(f"{looked}, and no hub id such as name/model; give one of them, or {special}")
    return _from_hub(source, looked, patterns, say)


def _expand(source: str) -> Path | None:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # ~ of somebody who does not exist
        return None


def _nearest(folder: Path | None) -> str:
    """Return, in words, where was looked and which model's folder there is called nearly so."""
    if folder is None:
        return ""
    parent = folder.parent
    try:
        names = [path.name for path in itertools.islice(parent.iterdir(), _MOST_LISTED)]
        near = difflib.get_close_matches(folder.name[:255], names, n=3, cutoff=0.5)
        found = next((name for name in near if (parent / name / "config.json").is_file()), None)
    except FileNotFoundError:
        return " here"
    except OSError as error:
        return f" here ({quoted(parent)}: {one_line(error.strerror).lower()})"
    return f" here (did you mean {quoted(parent / found)}?)" if found else " here"


def _from_hub(source: str, looked: str, patterns: Sequence[str], say: Callable[[str], None]) -> Path:
    say(f"asking the hub for {source}: no folder of that name here")
    download = _Download(source, patterns)
    download.start()
    download.wait()
    if download.folder is not None:
        return download.folder
    cached = _in_cache(source, patterns, download.wanted)
    if cached is None or download.unknown:
        raise UserError(f"{looked}, and no id that can be reached: {download.reason}; give a folder, or another id")
    say(f"warning   {source}: {download.reason}; taken from the cache, {cached}")
    return cached


def _in_cache(source: str, patterns: Sequence[str], wanted: Sequence[str]) -> Path | None:
    """Return the folder of a model in the cache if it is all there: what the hub listed, if it did."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        folder = Path(snapshot_download(source, allow_patterns=list(patterns), local_files_only=True))
        whole = all((folder / name).is_file() for name in (wanted or ["config.json"]))
        weights = not set(WEIGHTS) <= set(patterns) or any(folder.glob("*.safetensors"))
        return folder if whole and weights else None
    except Exception:  # LocalEntryNotFoundError, or what a damaged cache makes of it: it does not hold the model
        return None


class _Download(threading.Thread):
    """Fetches a model's files, one after the other, in a thread that the process does not wait for at its end."""

    def __init__(self, source: str, patterns: Sequence[str]) -> None:
        super().__init__(name="download", daemon=True)
        self.source, self.patterns = source, patterns
        self.folder: Path | None = None
        self.wanted: list[str] = []  # of what the hub has
        self.reason = ""
        self.unknown = False  # the hub has answered, and has no such model
        self._answered = threading.Event()
        self._moved = time.monotonic()

    def wait(self) -> None:
        """Wait for the end, for as long as something arrives."""
        deadline = self._moved + ANSWER_SECONDS
        while self.is_alive() and not self._answered.is_set() and time.monotonic() < deadline:
            self.join(0.05)
        if self.is_alive() and not self._answered.is_set():
            self.reason = f"the hub did not answer within {ANSWER_SECONDS:g} s"
            return
        while self.is_alive():
            self.join(0.2)
            if self.is_alive() and time.monotonic() - self._moved > STALL_SECONDS:
                self.reason = f"the hub sent nothing for {STALL_SECONDS:g} s"
                return

    def run(self) -> None:
        """Ask what there is, then fetch it."""
        from huggingface_hub import HfApi, hf_hub_download  # pyright: ignore[reportUnknownVariableType]
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            info = HfApi().model_info(self.source, timeout=2 * ANSWER_SECONDS)  # `wait` gives up first
            self._move()
            self._answered.set()
            names = [file.rfilename for file in info.siblings or []]
            top = [name for name in names if "/" not in name]
            self.wanted = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)]
            if "config.json" not in self.wanted:
                self.reason, self.unknown = "the hub has it, but without a config.json", True
                return
            paths: dict[str, str] = {}
            for name in sorted(self.wanted):
                paths[name] = hf_hub_download(self.source, name, etag_timeout=ANSWER_SECONDS, tqdm_class=self._watch())
                self._move()
            if len({Path(path).parent for path in paths.values()}) > 1:  # a folder for each commit
                self.reason = "the hub's model changed while it was fetched; try again"
                return
            self.folder = Path(paths["config.json"]).parent
        except (RepositoryNotFoundError, GatedRepoError) as error:
            self.unknown = True
            gated = isinstance(error, GatedRepoError)
            self.reason = (
                "the hub asks for an account that may read it"
                if gated
                else "the hub has none of that name, or not for you"
            )
        except (
            Exception
        ) as error:  # what a network, a hub or its library may say; the command tells the first line of it
            self.reason = self.reason or quoted_reason(str(error).partition("\n")[0] or type(error).__name__)

    def _move(self) -> None:
        self._moved = time.monotonic()

    def _watch(self) -> Any:
        """Return a progress bar that notes each arrival."""
        from huggingface_hub.utils import tqdm

        move = self._move

        class Watched(tqdm):
            def update(self, n: float | None = 1) -> bool | None:
                move()
                return super().update(n)

        return Watched
