"""The glossary names what is there, and a name is one thing."""

import ast
import collections
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


def test_each_term_stands_once_and_says_where_it_is():
    terms = [term for term, _ in TERMS]
    assert len(terms) == len(set(terms)) > 20
    assert [term for term, line in TERMS if not line.endswith("`")] == []


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


# Public classes of one name in two modules: one concept on two sides that never see each other.
TWINS = {
    "ModelConfig": "the section `model` of a configuration, of the study and of the trainer",
    "Run": "of a study's comparison, and of an experiment",
    "Documents": "their lengths as a plan counts them, and their tokens in a store",
}


def test_a_public_class_has_its_name_alone():
    places = collections.defaultdict(list)
    for package in ("anchorline", "jaxref", "ropestudy", "torchtrain", "parity_tests"):
        for path in (ROOT / package).rglob("*.py"):
            if "tests" in path.relative_to(ROOT / package).parts or path.name.startswith(("test_", "conftest")):
                continue
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(path.relative_to(ROOT)))
    twins = {name: where for name, where in places.items() if len(where) > 1}
    assert twins.keys() <= TWINS.keys(), twins
