"""The zoo: real bugs as small reversible patches of the candidate, to ask a gate which of them it catches.

A bug is one variable of a file in `parity_tests/zoo/bugs/`; the variable's name is the bug's name:

    rope_theta = Bug(what="...", where="...", stage="forward", apply=..., likely={"rope": "yarn"})

Nothing else has to know of it. A bug touches torchtrain, transformers or torch, never oracle or judge.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from parity_tests.report.schema import Group


@dataclass(frozen=True)
class Bug:
    """One way to be wrong.

    Args:
        what: the bug in a few words, for the kill table.
        where: one line on where it really happened.
        stage: the first stage of a case in which it shows.
        apply: makes a context manager; inside, the candidate has the bug; after it, it is bitwise what it was.
        likely: fields of a case, with the values under which the bug shows; cases that have them are tried first.
        caught_by: the configuration that catches it where CI's cannot: a path below the repository's root.
        name: the name of the bug's variable, filled in by `discover`.
    """

    what: str
    where: str
    stage: Group
    apply: Callable[[], AbstractContextManager[Any]] = field(repr=False)
    likely: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    caught_by: str | None = None
    name: str = ""


@cache
def discover() -> Mapping[str, Bug]:
    """Every bug by name, in alphabetical order."""
    from parity_tests.zoo import bugs as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for name, bug in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items():
            if isinstance(bug, Bug):
                assert name not in found, f"two bugs are named {name}"
                found[name] = replace(bug, name=name)
    return MappingProxyType(dict(sorted(found.items())))
