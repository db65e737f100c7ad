"""Check shapes while testing: a name such as `q_BTHD` promises a shape, and functions are held to it.

Modules named to `install` are compiled with a check in front of every `return`. There all arguments and variables of
the function whose names end in axes must agree: a letter is one size, a digit is that size, and the number of axes is
the number of letters. The check is at the return and not at the call, because a function may refuse a user's shape with
a message of its own. Outside tests nothing is checked.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

# `index_P2`, `q_nHD`; no constants, no classes
_AXES = re.compile(r"_?[a-z][a-z0-9_]*_(?=[a-z0-9]*[A-Z])([A-Za-z0-9]+)")
_CHECK = "_check_shapes_of_names"


def axes(name: str) -> str | None:
    """Return the axes that a name promises: "BTHD" of `q_BTHD`; None promises nothing."""
    match = _AXES.fullmatch(name)
    return match[1] if match else None


def check_shapes(function: str, names: Sequence[str], values: Mapping[str, Any]) -> None:
    """Hold the arrays among `values` that have these names to the axes in them.

    Raises TypeError: the name, its shape and those of the names before it.
    """
    # A variable that is not yet set, None or a list of arrays has no shape.
    _check_once(
        function, tuple((name, tuple(values[name].shape)) for name in names if hasattr(values.get(name), "shape"))
    )


@cache
def _check_once(function: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    sizes: dict[str, int] = {}
    for i, (name, shape) in enumerate(shapes):
        letters = axes(name) or ""
        known = [int(one) if one.isdigit() else sizes.setdefault(one, size) for one, size in zip(letters, shape)]  # noqa: B905
        if len(letters) != len(shape) or known != list(shape):
            seen = ", ".join(f"{name} {list(shape)}" for name, shape in shapes[: i + 1])
            raise TypeError(f"{function}: {name} has shape {list(shape)}; {seen}")


def install(modules: Sequence[str]) -> None:
    """Check the modules of these names, and all below them, when they are imported; call it before they are."""
    early = [name for name in sys.modules if _below(name, modules)]
    assert not early, f"imported before their shapes could be checked: {early}"
    sys.meta_path.insert(0, _Finder(modules))


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules) and ".tests" not in name


class _Finder(MetaPathFinder):
    def __init__(self, modules: Sequence[str]):
        self.modules = modules

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _below(fullname, self.modules):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the checked module from its source: bytecode in `__pycache__` is that of the plain one."""
        path = self.get_filename(fullname)
        tree = _Checks().visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        setattr(module, _CHECK, check_shapes)
        super().exec_module(module)


class _Checks(ast.NodeTransformer):
    """Puts the check of a function's own names in front of each of its returns."""

    def __init__(self) -> None:
        self._names: list[tuple[str, tuple[str, ...]]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = tuple(dict.fromkeys(name for name in _own_names(node) if axes(name)))
        self._names.append((node.name, names))
        self.generic_visit(node)
        if names:
            node.body.append(_check(node.name, names, node.body[-1]))
        self._names.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        function, names = self._names[-1]
        promised = axes(function) is not None
        if not names and not promised:
            return node
        result = ast.Name(function if promised else "_result", ast.Store())
        keep = ast.copy_location(ast.Assign([result], node.value or ast.Constant(None)), node)
        names = (*names, function) if promised else names
        give = ast.copy_location(ast.Return(ast.Name(result.id, ast.Load())), node)
        return [keep, _check(function, names, node), give]


def _check(function: str, names: tuple[str, ...], at: ast.AST) -> ast.stmt:
    source = f"{_CHECK}({function!r}, {names!r}, locals())"
    call = ast.parse(source).body[0]
    for node in ast.walk(call):
        ast.copy_location(node, at)
    return call


def _own_names(function: ast.FunctionDef) -> Iterator[str]:
    """Arguments and variables of a function, not those of functions and comprehensions inside it."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        yield argument.arg
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    inner = (*inner, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop(0)
        if isinstance(node, inner):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        left.extend(ast.iter_child_nodes(node))
