"""Read settings from strict YAML and `section.key=value` overrides into a validated pydantic model.

Strict means: keys are text and appear once; values have no tags, dates or merge keys; integers fit into 64 bits.
"""
# pyright: reportUnknownMemberType=false
# PyYAML has incomplete types.

import itertools
import os
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from anchorline.errors import UserError, did_you_mean, one_line, quoted, quoted_reason
from anchorline.files import read_file

SHIPPED = Path(__file__).parent / "configs"  # in a checkout a link to configs/ at the top
MOST_BYTES = 1 << 16  # the parser takes about a second
_MOST_SHOWN = 8  # mistakes in one message

Tree = dict[str, Any]
Schema = TypeVar("Schema", bound=BaseModel)

_TAG = "tag:yaml.org,2002:"
_PLAIN = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_MEND = {  # by what PyYAML says
    "'\\t'": "indent with spaces, not with tabs",
    "<block end>": "indent the line like those that it belongs to",
    "mapping values": "quote text that holds ': ', and indent the line like those that it belongs to",
    "end of stream": "close the quote that is open",
    "<stream end>": "close the bracket that is open",
    "tag": "take the tag out",
    "another document": "keep one document",
    "": "write key: value, and quote text that begins with a sign such as * or @",
}
_NUMBERS = {  # by YAML 1.2: 2e-5 is a number, 12:30 is not
    f"{_TAG}int": r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    f"{_TAG}float": r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))",
}


class _Loader(yaml.SafeLoader):
    """A loader of plain values. 2026-11-30, 12:30 and 010 stay text, unlike in YAML 1.1."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[Any, int] = {}  # values of each node

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _PLAIN and tag not in _NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: construct for tag, construct in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _PLAIN
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count the values of each node, those behind an alias each time: a few aliases of aliases make billions."""
        node: Any = super().compose_node(parent, index)
        if (size := self._sizes.get(node)) is None:
            children: Any = () if isinstance(node, yaml.ScalarNode) else node.value
            parts: Any = itertools.chain.from_iterable(children) if isinstance(node, yaml.MappingNode) else children
            size = self._sizes[node] = 1 + sum(self._sizes.get(child, 1) for child in parts)
        if size > MOST_BYTES:
            raise UserError(
                f"line {node.start_mark.line + 1}: aliases make more than {MOST_BYTES:,} values; remove them"
            )
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag != f"{_TAG}str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else f"(a {key.id})"
                raise UserError(f"line {key.start_mark.line + 1}: key {quoted(shown)} is not a name; quote it")
            if key.value in seen:
                raise UserError(f"line {key.start_mark.line + 1}: key {quoted(key.value)} appears twice; remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_plain(self, node: Any) -> Any:
        value = yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(f"{quoted(node.value)} does not fit into 64 bits; give a smaller number")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise UserError(f"{quoted(value)} holds NUL or half a surrogate pair; remove it")
        return value


for _name in ("int", "str"):
    _Loader.add_constructor(f"{_TAG}{_name}", _Loader.construct_plain)
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$"), list("-+.0123456789"))


def find_file(path: str | Path) -> Path:
    """Return the user's file at `path`, or the shipped one: `demo`, `demo.yaml`, `configs/demo.yaml` are one."""
    path = Path(path)
    if os.path.lexists(path) or path.is_absolute() or ".." in path.parts or "\0" in str(path):
        return path
    parts = path.parts[1:] if path.parts[:1] == (SHIPPED.name,) else path.parts
    named = SHIPPED.joinpath(*parts)
    with suppress(OSError):  # such as a name that is too long
        return next((file for file in (named, Path(f"{named}.yaml")) if file.is_file()), path)
    return path


def load(
    schema: type[Schema],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    example: str,
    prepare: Callable[[Tree], Tree] = lambda tree: tree,
) -> Schema:
    """Read a YAML file, apply overrides, validate.

    path: the file, or the name of a shipped file (`find_file`); None: the overrides are all there is.
    overrides: `section.key=value`, or `list.0.key=value`; values are YAML.
    example: an override, for messages.
    prepare: changes the tree before validation.
    Raises UserError: the file cannot be read or is not strict YAML, a key is unknown or appears twice, or a value is
        not allowed. For an unknown key the message names the nearest known one.
    """
    tree = {} if path is None else _read(schema, path)
    for override in overrides:
        _override(tree, override, example)
    tree = prepare(tree)
    return validate(schema, tree, "settings" if path is None else f"config {quoted(Path(path))}")


def _read(schema: type[BaseModel], path: str | Path) -> Tree:
    name = quoted(Path(path))
    try:
        content = _parse(read_file(find_file(path), MOST_BYTES).decode("utf-8-sig"))
    except OSError as error:
        reason = one_line(error.strerror or error).lower()
        raise UserError(f"config {name}: {reason}; give a YAML file that can be read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config {name}: byte {error.start:,} is not UTF-8; save the file as UTF-8") from None
    except ValueError as error:
        raise UserError(f"config {name}: {one_line(error)}") from None
    if not isinstance(content, dict):
        sections = " and ".join(f"`{field}:`" for field in list(schema.model_fields)[:2])
        held = "is empty" if content is None else f"holds {_KINDS.get(type(cast('object', content)), 'a value')}"
        raise UserError(f"config {name}: {held}; give sections such as {sections}")
    return cast("Tree", content)


def dump(tree: Tree) -> str:
    """Return a tree of plain values as YAML, from which `load` reads an equal tree."""
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    # PyYAML writes U+0085 and the like unescaped, and reads them as spaces. With them, all but ASCII is escaped.
    same = all(character not in text for character in "\x85\u2028\u2029\ufeff")
    return text if same else yaml.safe_dump(tree, sort_keys=False)


def validate(schema: type[Schema], tree: Any, what: str) -> Schema:
    """Validate a tree of plain values. Raises UserError, which starts with `what`: one line for all mistakes."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{what}: {explain(schema, error)}") from None
    except RecursionError:
        raise UserError(f"{what}: values are nested too deep") from None


def explain(schema: type[BaseModel], error: ValidationError) -> str:
    """Return a ValidationError as one line: each field, its value and the allowed values."""
    fixes_of: dict[str, list[str]] = {}  # a union has one error for each member
    for item in error.errors(include_url=False):
        what, fix = _explain_one(schema, item)
        fixes_of.setdefault(what, []).append(fix)
    shown = [f"{what}{_either(fixes)}" for what, fixes in list(fixes_of.items())[:_MOST_SHOWN]]
    more = f"; and {len(fixes_of) - _MOST_SHOWN} more" if len(fixes_of) > _MOST_SHOWN else ""
    return one_line("; ".join(shown)) + more


def _either(fixes: Sequence[str]) -> str:
    """Join fixes into `give 'auto', an integer or a list`; fixes of other forms come first."""
    *first, last = [fix.removeprefix(_GIVE) for fix in dict.fromkeys(fixes) if fix.startswith(_GIVE)] or [""]
    others = [fix for fix in dict.fromkeys(fixes) if not fix.startswith(_GIVE)]
    given = f"{_GIVE}{', '.join(first)}{' or ' if first else ''}{last}" if last else ""
    return "; ".join(filter(None, [*others, given]))


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError:
        raise UserError("values are nested too deep") from None
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        problem, end = str(error.problem), error.problem_mark
        mark = (error.context_mark if "stream" in problem else None) or end  # where what does not end begins
        fix = next(fix for words, fix in _MEND.items() if words in problem)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{where}not valid YAML: {quoted_reason(problem)}; {fix}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"line {line}: not valid YAML: holds {quoted(chr(error.character))}; remove it") from None
    except (yaml.YAMLError, ValueError, LookupError) as error:  # the last two for a bad number or tag
        raise UserError(f"not valid YAML: {quoted_reason(error)}") from None


def _override(tree: Tree, override: str, example: str) -> None:
    dotted, equals, text = override.partition("=")
    opening = f"override {quoted(override)}"
    if not equals or not dotted:
        raise UserError(f"{opening}: write section.key=value, for example {example}")
    *parents, leaf = dotted.split(".")
    node: Tree | list[Any] = tree
    for name in parents:
        inner = node[_index(node, name, opening)] if isinstance(node, list) else node.get(name)
        if inner is None and isinstance(node, dict):
            inner = node[name] = {}
        if not isinstance(inner, dict | list):
            raise UserError(f"{opening}: {quoted(name)} holds a value, not a section")
        node = cast("Tree | list[Any]", inner)
    try:
        value = _parse(text)
    except UserError as error:
        reason = re.sub("^line 1(, column [0-9]+)?: ", "", str(error))
        raise UserError(f"{opening}: {reason}; quote it if it is text") from None
    if isinstance(node, list):
        node[_index(node, leaf, opening)] = value
    else:
        node[leaf] = value


def _index(items: list[Any], name: str, opening: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10) or int(name) >= len(items):
        raise UserError(f"{opening}: {quoted(name)} is not an index of a list of {len(items)}")
    return int(name)


def _explain_one(schema: type[BaseModel], item: Any) -> tuple[str, str]:
    kind, loc = item["type"], item["loc"]
    location, inner = _locate(schema, loc[:-1] if kind == "extra_forbidden" else loc)
    # A validator may validate a model that is not in the schema.
    where = ".".join(location or map(str, loc))
    if kind == "extra_forbidden":
        key, known = str(loc[-1]), [x.alias or n for n, x in inner.model_fields.items()] if inner else []
        name = key[:100].lower().replace("-", "_")
        found = [one for one in _dotted(schema) if one.endswith(f".{name}")]  # in another section first
        hint = (
            did_you_mean(name, known, found, "".join(f"{one}." for one in location)) or f"; known: {', '.join(known)}"
        )
        return f"{'.'.join([*location, quoted(key)[1:-1]])}: ", f"unknown key{hint}"
    if kind == "missing":
        return f"{where}: ", "missing; add it"
    if kind == "value_error":
        return f"{where}: " if where else "", quoted_reason(item["msg"].removeprefix("Value error, "))
    wanted = _WANTED.get(kind)
    bounds = {name: f"{bound:g}" if isinstance(bound, float) else bound for name, bound in item.get("ctx", {}).items()}
    fix = f"{_GIVE}{wanted.format(**bounds)}" if wanted else quoted_reason(item["msg"])
    return f"{where}: {_as_typed(item['input'])}: ", fix


_GIVE = "give "
_KINDS: dict[type, str] = {int: "a number", float: "a number", str: "a text", bool: "true or false", list: "a list"}
_WANTED = {  # by pydantic's type of error
    "string_type": "a text (quoted, where YAML reads something else)",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "list_type": "a list such as [a, b], or []",
    "tuple_type": "a list such as [a, b]",
    "dict_type": "a section such as {{key: value}}",
    "model_type": "a section such as {{key: value}}",
    "model_attributes_type": "a section such as {{key: value}}",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
}


def _as_typed(value: Any) -> str:
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else quoted(value)


def _locate(schema: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the fields and indices of a place, without pydantic's names for members of unions, and the model there."""
    location: list[str] = []
    kinds: list[Any] = [schema]
    for part in loc:
        inner = [kind for held in kinds for kind in _inside(held, part)]
        if inner:
            location.append(quoted(str(part))[1:-1])
            kinds = [member for kind in inner for member in members_of(kind)]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return location, models[0] if models else None


def _dotted(schema: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield f"{above}{name}"
        for kind in members_of(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _dotted(kind, f"{above}{name}.")


def _inside(kind: Any, part: str | int) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if isinstance(part, str) and part in kind.model_fields:
            yield kind.model_fields[part].annotation
    elif get_origin(kind) in (list, tuple) and isinstance(part, int):
        yield get_args(kind)[0]
    elif get_origin(kind) is dict:
        yield get_args(kind)[1]


def members_of(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself."""
    origin = get_origin(kind)
    if origin in (Annotated, Union, types.UnionType):
        for member in get_args(kind)[: 1 if origin is Annotated else None]:
            yield from members_of(member)
    else:
        yield kind
