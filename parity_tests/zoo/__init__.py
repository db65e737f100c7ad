"""The zoo: real bugs as small reversible patches of the candidate, to ask a gate which of them it catches.

A bug is one name in a file of `parity_tests/zoo/bugs/`, and under the same name an entry of `bugs.yaml`, which says
what it is and where it happened. Mostly it is the function that is put in another's place:

    @bug(rotation)
    def rope_interleaved(q_BHTD, k_BKTD, cos_BTD, sin_BTD): ...

Nothing else has to know of it. A bug touches torchtrain, transformers or torch, never oracle or judge.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from parity_tests.report.schema import Group


@dataclass(frozen=True)
class Bug:
    """One way to be wrong.

    apply: makes a context manager; inside, the candidate has the bug; after it, it is bitwise what it was.
    what: the bug in a few words, for the kill table.
    where: one line on where it really happened.
    stage: the first stage of a case in which it shows.
    likely: fields of a case, with the values under which the bug shows; cases that have them are tried first.
    caught_by: the configuration that catches it where CI's cannot: a path below the repository's root.
    name: the name of the bug's variable. `discover` fills in all but `apply`.
    """

    apply: Callable[[], AbstractContextManager[Any]] = field(repr=False)
    what: str = ""
    where: str = ""
    stage: Group = "forward"
    likely: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    caught_by: str | None = None
    name: str = ""


def bug(apply: Callable[..., AbstractContextManager[Any]], *given: Any) -> Callable[[Callable[..., Any]], Bug]:
    """Make a decorator. The bug is `apply(*given, function)` of the function that it decorates."""
    return lambda function: Bug(lambda: apply(*given, function))


@cache
def discover() -> Mapping[str, Bug]:
    """Every bug by name, in alphabetical order."""
    from parity_tests.zoo import bugs as package

    said = yaml.safe_load((Path(__file__).parent / "bugs.yaml").read_text(encoding="utf-8"))
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for name, value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items():
            if isinstance(value, Bug):
                assert name not in found, f"two bugs are named {name}"
                found[name] = replace(value, name=name, **said.pop(name))
    assert not said, f"bugs.yaml has entries without a bug: {', '.join(said)}"
    return MappingProxyType(dict(sorted(found.items())))
