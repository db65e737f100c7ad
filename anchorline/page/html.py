"""Templates become a page: Jinja2 with autoescape, so that everything a report holds is text and never markup.

A page needs nothing but itself, and its own policy forbids all else: no style but this style sheet, no script but this
one. Without the script it says the same.
"""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, cast

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from anchorline.page.colours import custom_properties
from anchorline.page.text import breakable, count, day, printable


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

    Args:
        package: whose folder holds the template.
        template: file name; extends `base.html.j2`.
        title: of the report, over the headline.
        created: when, ISO 8601; shown as it is if it is not; empty: not shown.
        command: what makes the report again.
        facts: where and how it was made: a name and what stands under it.
        versions: of packages.
        values: what the template asks for besides.
    """
    style = custom_properties() + _asset("page.css")
    script = _asset("page.js")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    policy += "; img-src data:; base-uri 'none'; form-action 'none'"
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
        style=Markup(style),
        script=Markup(script),
        policy=policy,
    )


def _printable(value: object) -> object:
    """What an expression of a template gives, before it is escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _asset(name: str) -> str:
    return files("anchorline.page").joinpath(name).read_text("utf-8").strip()


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
