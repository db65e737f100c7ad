"""Which of this repository's files compute a case: the module that judges it, what that imports, and so on to the end.

They are found by reading, before anything runs: an import inside a function counts like one at the top of a file.
"""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
JUDGE = "parity_tests.gate.case"


def digest_of(module: str = JUDGE, root: Path = ROOT) -> str:
    """Digest of the names and the bytes of `sources_of`."""
    digest = hashlib.sha256()
    for path in sources_of(module, root):
        digest.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def sources_of(module: str = JUDGE, root: Path = ROOT) -> list[Path]:
    """Files below `root` that a module is made of: its own, its packages', and those of all that they import."""
    found: set[Path] = set()
    left = [module]
    while left:
        name = left.pop()
        file = _file_of(name, root)
        if file is None or file in found:
            continue
        found.add(file)
        if package := name.rpartition(".")[0]:
            left.append(package)
        left += _imports(ast.parse(file.read_text(encoding="utf-8")))
    return sorted(found)


def _file_of(module: str, root: Path) -> Path | None:
    stem = root.joinpath(*module.split("."))
    return next((path for path in (stem / "__init__.py", stem.with_suffix(".py")) if path.is_file()), None)


def _imports(node: ast.AST) -> Iterator[str]:
    """Names of modules, and of what is taken out of them, which may be modules too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None, "imports name their modules in full"
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not _never_runs(child):
            yield from _imports(child)


def _never_runs(node: ast.AST) -> bool:
    """What only a type checker reads; and what a package gives on demand, which counts for whom it is demanded by."""
    checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return checked or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
