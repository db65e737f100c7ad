"""Places in a Markdown file that programs fill, each between two marked lines. A person writes the rest."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import read_file

_MOST_BYTES = 1 << 24


class MarkedPlace(NamedTuple):
    """The place between two lines. A file has each line once."""

    begin: str
    end: str

    def within(self, text: str) -> bool:
        """Whether a file has both lines, once and in order."""
        return text.count(self.begin) == text.count(self.end) == 1 and text.index(self.begin) < text.index(self.end)

    def put(self, text: str, content: str) -> str:
        """Return a file's text with other Markdown in this place; empty lines around it do not count."""
        assert self.within(text), "the caller checks that the file has the place"
        before, _, rest = text.partition(self.begin)
        between = content.strip("\n")
        return f"{before}{self.begin}\n\n{between}\n\n{self.end}{rest.partition(self.end)[2]}"


def read_marked(document: Path, places: Sequence[MarkedPlace]) -> str:
    """Return the text of a user's `--document`. Raises UserError: it cannot be read, or lacks one of these places."""
    try:
        text = read_file(document, _MOST_BYTES).decode()
    except OSError as error:
        raise UserError(f"--document: {disk_fault(error)}") from None
    except ValueError as error:
        raise UserError(f"--document {quoted(document)}: {error}; give a Markdown file in UTF-8") from None
    for place in places:
        if not place.within(text):
            raise UserError(
                f"--document {quoted(document)}: has not one line {place.begin} and behind it one line {place.end}; "
                "add them"
            )
    return text
