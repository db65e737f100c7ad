"""The glossary names what is there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
TERMS = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
NAMES = sorted(
    {
        name
        for _, line in TERMS
        for name in re.findall(r"`((?:anchorline|jaxref|ropestudy|torchtrain|parity_tests)\.[\w.]+)`", line)
    }
)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_names_exists(name):
    module, attributes = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
    for attribute in attributes:
        found = getattr(found, attribute)
