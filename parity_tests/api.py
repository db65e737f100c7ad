"""The site's page of the Python API, made from the docstrings: python -m parity_tests.api."""

import inspect
import re
import sys

import torchtrain

HEAD = """# Python API

`import torchtrain` is cheap: torch and transformers are imported with the first use of a function.
[The example](index.md#in-your-own-training-loop) has three of them in their places.
`python -m pydoc torchtrain.pack` prints a function's entry in the terminal."""
FUNCTIONS = ("pack", "attach", "collate", "extend")


def format_page() -> str:
    """Return the page: each function's call and docstring."""
    return "\n\n".join([HEAD, *map(_format_function, FUNCTIONS)]) + "\n"


def _format_function(name: str) -> str:
    function = getattr(torchtrain, name)
    signature = inspect.signature(function)
    given = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    call = signature.replace(parameters=given, return_annotation=signature.empty)
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    about = [
        text if text.startswith("    ") else _format_paragraph(text, [*signature.parameters]) for text in paragraphs
    ]
    return "\n\n".join([f"## {name}", f"    torchtrain.{name}{call}", *about])


def _format_paragraph(text: str, parameters: list[str]) -> str:
    """Return arguments as a list, and what a function returns and raises as paragraphs."""
    text = text.replace("\n    ", " ")  # a line that goes on
    text = re.sub(rf"^({'|'.join(parameters)}): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return re.sub(r"\n(Returns|Raises) ", r"\n\n**\1** ", text)


if __name__ == "__main__":
    sys.stdout.write(format_page())
