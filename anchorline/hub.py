"""Find a model: a folder of this disk, or an id of a hub. The hub is asked first which files there are, with a time
limit: `snapshot_download` alone did not return within 45 s from a hub that never answers.
"""

import fnmatch
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from anchorline.errors import UserError, quoted, quoted_reason

ANSWER_SECONDS = 10.0  # for the hub to say what a model consists of
CONFIGS = ("*.json", "*.model", "*.txt", "*.jinja")
WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors")
CODE = ("*.py",)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MOST_ID = 96  # characters, by the hub's own rule

logger = logging.getLogger(__name__)


def find_model(source: str, field: str, patterns: Sequence[str], log: Callable[[str], None] = logger.info) -> Path:
    """Return the folder that holds a model's files: the one that `source` names, or a copy of the hub's in its cache.

    source: a folder, or a hub id such as `name/model`.
    field: opens messages.
    patterns: of the files that are needed.
    log: takes a line when the hub is asked, and when its cache is used because it did not answer.
    Raises UserError: neither a folder with a config.json nor an id, or an id that the hub does not know; without the
        model in the cache, no answer within `ANSWER_SECONDS` or a download that fails.
    """
    folder, looked = os.path.expanduser(source), f"{field} {quoted(source)}: no folder with a config.json here"
    if os.path.isfile(os.path.join(folder, "config.json")):
        return Path(folder)
    if os.path.exists(folder):
        raise UserError(
            f"{field} {quoted(source)}: is there, but has no config.json that can be read; give another folder"
        )
    if not is_id(source):
        raise UserError(f"{looked}, and no hub id such as name/model; give one of them, or smollm2")
    return _from_hub(source, looked, patterns, log)


def is_id(source: str) -> bool:
    """Whether a hub may have a model of this id."""
    return _ID.fullmatch(source) is not None and len(source) <= _MOST_ID


def _from_hub(source: str, looked: str, patterns: Sequence[str], log: Callable[[str], None]) -> Path:
    """Download the files that the hub lists, and return their folder. Use the cache where the hub does not answer."""
    from huggingface_hub import HfApi, snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    log(f"asking the hub for {source}: no folder of that name here")
    wanted: list[str] = []
    try:
        info = HfApi().model_info(source, timeout=ANSWER_SECONDS)
        top = [file.rfilename for file in info.siblings or [] if "/" not in file.rfilename]
        wanted = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        if "config.json" not in wanted:
            raise UserError(f"{looked}, and the hub has it without a config.json; give a folder, or another id")
        return Path(snapshot_download(source, allow_patterns=wanted))
    except UserError:
        raise
    except GatedRepoError:
        raise UserError(f"{looked}, and the hub wants an account that may read it; run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UserError(f"{looked}, and the hub has none of that name, or not for you; give another id") from None
    except Exception as error:  # any error of a network, a hub or its library
        late = "Timeout" in type(error).__name__  # httpx's or requests', by huggingface_hub's version
        reason = (
            "the hub did not answer in time" if late else quoted_reason(str(error).partition("\n")[0] or type(error))
        )
    if (cached := find_cached(source, patterns, wanted)) is None:
        raise UserError(f"{looked}, and the hub cannot be reached: {reason}; give the folder of a model, or smollm2")
    log(f"warning   {source}: {reason}; taken from the cache, {cached}")
    return cached


def find_cached(source: str, patterns: Sequence[str], wanted: Sequence[str] = ()) -> Path | None:
    """Return the folder of a model in the cache if it is complete, by the hub's list where there is one."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        folder = Path(snapshot_download(source, allow_patterns=list(patterns), local_files_only=True))
    except Exception:  # LocalEntryNotFoundError, or another error from a damaged cache
        return None
    whole = all((folder / name).is_file() for name in (wanted or ["config.json"]))
    weights = not set(WEIGHTS) <= set(patterns) or any(folder.glob("*.safetensors"))
    return folder if whole and weights else None
