"""From `mypackage.attention:my_function` to the function."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, did_you_mean


def load_target(target: str) -> Callable[..., Any]:
    """Import `module:name` or `path/to/file.py:name`; names may have dots. The working directory is importable.

    Raises UserError, one line: nothing to import, the import fails, no such name, not callable.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"target {target!r}: expected module:function, or path/to/file.py:function")
    try:
        found: Any = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise UserError(f"target {place!r}: importing it raises {type(error).__name__}: {text}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"target {target!r}: {place} has no {part!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if inspect.isclass(found):
        raise UserError(f"target {target!r}: is a class; name a function, or an instance that can be called")
    if not callable(found):
        raise UserError(f"target {target!r}: is not callable, but a {type(found).__name__}")
    return found


def _import(module: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"target {str(path)!r}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path/to/file.py` does
    spec.loader.exec_module(module)
    return module
