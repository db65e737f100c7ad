"""Text on every setting, from the schema: of `torchtrain config --explain`, and of a page of the site.

`python -m torchtrain.config.reference` prints the page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from anchorline.errors import UserError, did_you_mean, quoted
from anchorline.settings import members_of
from torchtrain.config.load import Config
from torchtrain.config.preparation import Preparation

_INTRODUCTION = """# Settings

A run's config has these sections; `torchtrain prepare` reads `tokenizer`, `data` and `prepare`. Write a key in the YAML
file, or give it on the command line: `train.steps=20`. `torchtrain config --explain KEY` prints one entry of this page.
An entry has the key, the allowed values, the default and the meaning.
"""


@dataclass(frozen=True)
class Setting:
    """A key of the config: its dotted name, allowed values, default as YAML, and meaning."""

    key: str
    values: str
    default: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.key}\n  values:  {self.values}\n  default: {self.default}\n  {self.meaning}"


def list_settings(schemas: Sequence[type[BaseModel]] = (Config, Preparation)) -> list[Setting]:
    """Return all settings of these schemas, in their order: of a run and of a preparation."""
    found = {setting.key: setting for schema in schemas for setting in _walk(schema, "")}
    return list(found.values())


def explain_settings(key: str | None) -> str:
    """Return the text on a key or on all keys of a section; None: a line for every setting.

    Raises UserError: there is no such key; it names the nearest.
    """
    settings = list_settings()
    if key is None:
        return "\n".join(f"{one.key}: {' '.join(one.meaning.split())}" for one in settings)
    # The index of a list is N: data.sources.0.files is data.sources.N.files.
    wanted = ".".join("N" if part.isdecimal() else part for part in key.split("."))
    found = [one for one in settings if one.key == wanted or one.key.startswith(wanted + ".")]
    if not found:
        known = [one.key for one in settings]
        ends = [name for name in known if name.rpartition(".")[2] == wanted]
        hint = did_you_mean(wanted, known, ends) or "; `torchtrain config --explain` lists all"
        raise UserError(f"--explain {quoted(key)}: there is no such setting{hint}")
    return "\n\n".join(map(str, found))


def format_page() -> str:
    """Return the page."""
    lines, section = [_INTRODUCTION], ""
    for setting in list_settings():
        name, _, rest = setting.key.partition(".")
        if name != section:
            section = name
            lines.append(f"\n## {name}\n")
        meaning = setting.meaning.replace("\n", " ")
        lines.append(f"- `{rest}` ({setting.values}; `{setting.default}`): {meaning}")
    return "\n".join(lines) + "\n"


def _walk(schema: type[BaseModel], above: str) -> Iterator[Setting]:
    for name, field in schema.model_fields.items():
        key = f"{above}{name}"
        inner, is_list = _section_of(field.annotation)
        if inner is None or (above and field.description is not None):
            yield Setting(key, _format_values(field), _format_default(field), field.description or "")
        if inner is not None:
            yield from _walk(inner, f"{key}.N." if is_list else f"{key}.")


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section in a field, or None, and whether the field is a list of sections."""
    for kind in members_of(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind, False
        if get_origin(kind) is list:
            return _section_of(get_args(kind)[0])[0], True
    return None, False


def _format_values(field: FieldInfo) -> str:
    names: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null"}
    found: list[str] = []
    for kind in members_of(field.annotation):
        if get_origin(kind) is Literal:
            found += [str(value) for value in get_args(kind)]
        elif get_origin(kind) in (list, tuple):
            found.append("list")
        elif get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
            found.append("section")
        else:
            found.append(names[kind])
    return ", ".join(found)


def _format_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "{}"
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]


if __name__ == "__main__":
    print(format_page(), end="")
