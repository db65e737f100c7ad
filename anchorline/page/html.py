"""Render a template as one HTML page that needs no other file. Jinja2 escapes all text of a report.

A page shows the same with scripts switched off.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, cast

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(
    package: str,
    template: str,
    *,
    title: str,
    created: str,
    command: str,
    facts: Mapping[str, str],
    versions: Mapping[str, str],
    **values: object,
) -> str:
    """Return a page as HTML text, to be written in UTF-8.

    package: whose folder holds the template.
    template: file name; extends `base.html.j2`.
    title: of the report, over the headline.
    created: when, ISO 8601; shown as it is if it is not; empty: not shown.
    command: what makes the report again.
    facts: where and how it was made: a name and its text.
    versions: of packages.
    values: the other names that the template uses.
    """
    loader = ChoiceLoader([PackageLoader("anchorline.page", "."), PackageLoader(package, ".")])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
        keep_trailing_newline=True,
    )
    filters = cast("dict[str, Any]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters.update(breakable=breakable, day=day, count=count)
    return environment.get_template(template).render(
        values,
        title=title,
        created=created,
        command=command,
        facts=facts,
        versions=versions,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
    )


def _printable(value: object) -> object:
    """Make the value of a template's expression printable, before it is escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _asset(name: str) -> str:
    return files("anchorline.page").joinpath(name).read_text("utf-8").strip()


def printable(text: str) -> str:
    """Return a text with a replacement character for each one that HTML, XML or UTF-8 cannot hold."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def breakable(name: str) -> Markup:
    """Return a long name that may be broken into lines after its separators."""
    return Markup("<wbr>").join(re.findall(r"[^-._+/]*[-._+/]+|[^-._+/]+", printable(name)))


def count(amount: int, noun: str) -> str:
    """Return `1 sequence` or `3 sequences`."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def day(created: str) -> str:
    """Return `20 November 2026, 12:34 UTC`; a text that is not ISO 8601 stays as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%d %B %Y, %H:%M} UTC"
    except (ValueError, OverflowError):
        return created
