"""The glossary names what is there."""

import pkgutil
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
NAMED = re.compile(r"`((?:anchorline|jaxref|ropestudy|torchtrain|parity_tests)\.[\w.]+)`")


@pytest.mark.parametrize("name", sorted(set(NAMED.findall(PAGE.read_text(encoding="utf-8")))))
def test_what_it_names_exists(name):
    pkgutil.resolve_name(name)
