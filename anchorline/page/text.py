"""Text on a page: what can stand there, where a name may break, numbers with their nouns, a date."""

import re
from datetime import UTC, datetime

from markupsafe import Markup


def printable(text: str) -> str:
    """Return a text in which what neither HTML, XML nor UTF-8 can hold is a replacement character."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def breakable(name: str) -> Markup:
    """Return a long name that may go on in the next line after its separators."""
    return Markup("<wbr>").join(re.findall(r"[^-._+/]*[-._+/]+|[^-._+/]+", printable(name)))


def count(amount: int, noun: str) -> str:
    """`1 sequence`, `3 sequences`."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def day(created: str) -> str:
    """`20 November 2026, 12:34 UTC`; what is not ISO 8601 as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%d %B %Y, %H:%M} UTC"
    except (ValueError, OverflowError):
        return created
