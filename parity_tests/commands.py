"""Every verb of the three commands with its options, as docs/commands.md shows them: what scripts of others rely on.

python -m parity_tests.commands --write docs/commands.md
"""

import argparse
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

import anchorline.command
from anchorline.files import save

_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
HEAD = """# The command lines

Every verb with its arguments and options: in brackets what may be left out, behind `=` the default. They change
only with a new version. `COMMAND VERB --help` explains each.
`python -m parity_tests.commands --write docs/commands.md` makes this page.

Exit codes, of all three:

```
{codes}
```

`torchtrain` adds 143: SIGTERM stopped the run after a checkpoint.
"""


def load_apps() -> dict[str, typer.Typer]:
    """Return the three commands by name."""
    import jaxref.cli
    import parity_tests.cli
    import torchtrain.cli

    return {"torchtrain": torchtrain.cli.app, "jaxref": jaxref.cli.load_app(), "parity": parity_tests.cli.app}


def describe() -> str:
    """Return the page: each verb with its arguments and options."""
    doc = anchorline.command.__doc__ or ""
    codes = "\n".join(line[4:] for line in doc.splitlines() if line.startswith("    "))
    parts = [HEAD.format(codes=codes)]
    for name, app in load_apps().items():
        for verb in (verb for verb in app.registered_commands if not verb.hidden):
            assert verb.callback is not None
            called = verb.name or verb.callback.__name__.replace("_", "-")
            about = (verb.callback.__doc__ or "").strip().splitlines()[0]
            usage = textwrap.wrap(" ".join([name, called, *_usage(verb.callback)]), 96, **_WHOLE)
            lines = "    " + "\n        ".join(usage).replace("\N{NO-BREAK SPACE}", " ")
            rows = [lines, *(_settings() if (name, called) == ("parity", "run") else ())]
            parts.append(f"## {name} {called}\n\n{about}\n\n" + "\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _usage(function: Callable[..., Any]) -> Iterator[str]:
    """Yield each argument and option as it is written: what may be left out in brackets, a default behind `=`."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:
            continue
        takes, info = get_args(hints[name])
        needed = parameter.default is inspect.Parameter.empty
        default = "" if needed or parameter.default in (None, False, "") else f"={parameter.default}"
        kind, several = _takes(takes)
        if isinstance(info, ArgumentInfo):
            written = kind if "|" in kind else info.metavar or name.upper() + "..." * several
            yield written if needed or "[" in written else f"[{written}{default}]"
            continue
        # Inside Annotated the first name stands where a default would.
        given = [said for said in (info.default, *(info.param_decls or ())) if isinstance(said, str)]
        option = name.replace("_", "-")
        if parameter.default is True:  # what turns it off
            given, default = [f"--no-{option}"], ""
        names = "|".join(given or [f"--{option}"])
        written = "\N{NO-BREAK SPACE}".join(filter(None, [names, kind + default]))
        yield (written if needed else f"[{written}]") + "..." * several


def _settings() -> Iterator[str]:
    """The keys of a case of the gate, as a gate and `parity run KEY=VALUE` take them."""
    from parity_tests.gate.spec import Single
    from torchtrain.config.reference import list_settings

    yield "\nThe keys of a single case:\n"
    for setting in list_settings([Single]):
        yield f"- `{setting.key}` ({setting.values}; `{setting.default}`): {setting.meaning}"


def _takes(annotation: Any) -> tuple[str, bool]:
    """Return what a parameter takes, its type without None or its choices, and whether it may be given again."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    several = get_origin(annotation) is list
    kind = get_args(annotation)[0] if several else annotation
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind))), several
    return {"bool": "", "str": "TEXT", "int": "INTEGER", "float": "NUMBER", "Path": "PATH"}[kind.__name__], several


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.write is None:
        print(describe(), end="")
    else:
        save(arguments.write, describe().encode())


if __name__ == "__main__":
    main()
