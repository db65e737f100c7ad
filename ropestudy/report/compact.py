"""A study's results in a megabyte or two, for a repository: whoever doubts a number of the page makes it again from
them in a minute, where the study takes hours. Every text's own numbers are there, to seven digits.
"""

import json
import lzma
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import read_file, replace_file
from ropestudy.schema import VERSION, Results, read_results

_DIGITS = 7
_MOST_BYTES = 1 << 26
_MOST_TEXT = 1 << 28


def read_study(path: Path) -> Results:
    """Read a study: its folder, or the compact file of one.

    Raises:
        UserError: as `read_results`; or the file is damaged, or of another version.
    """
    if not path.is_file():
        return read_results(path / "results.json")
    try:
        unpacker = lzma.LZMADecompressor(memlimit=_MOST_TEXT)
        text = unpacker.decompress(read_file(path, _MOST_BYTES), _MOST_TEXT)
        if not unpacker.eof:
            raise ValueError("it is cut off, or too large")
        return Results.model_validate_json(text)
    except OSError as error:
        raise UserError(f"results {disk_fault(error)}") from None
    except (ValueError, lzma.LZMAError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(
            f"results {quoted(path)}: no compact results of schema version {VERSION}: {one_line(reason)}"
        ) from None


def write_compact(results: Results, path: Path) -> None:
    """Write the compact file of a study; the same results give the same bytes.

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(_compact(results.model_dump(mode="json")), separators=(",", ":")).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lzma.compress(text, preset=9))
    except OSError as error:
        raise UserError(f"--compact: {disk_fault(error)}; choose another place") from None


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _compact(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_compact(held) for held in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
