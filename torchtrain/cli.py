"""The command line. A mistake is one line on standard error and exit code 2; an interruption is one line and 130."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from torchtrain.errors import UserError

app = typer.Typer(
    help="Extend a language model's context: train it on packed long sequences, AnchorAttention and others.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/demo.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="override values of the file, for example train.steps=20"),
]


@app.callback()
def _torchtrain() -> None:
    """Keep the verbs verbs: typer makes a single command the whole program."""


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="remove the run that run.folder holds, and run anew")
    ] = False,
) -> None:
    """Train, and leave a Hugging Face folder in run.folder.

    Writes there: model/ (loads with AutoModelForCausalLM and AutoTokenizer), metrics.jsonl, loss.png, config.yaml with every
    default written out, and run.json. Converted models and tokens are kept in data.cache. Everything that can be checked is
    checked before run.folder is made.

    Example: torchtrain train configs/demo.yaml train.steps=20 run.folder=runs/short
    """
    with _one_line_errors():
        from torchtrain.config import load_config

        config = load_config(file, overrides or [])

        # First, so that the absence of torch is told by us and not by transformers.
        from torchtrain.training.loop import train as run  # isort: skip
        from rich.console import Console
        from transformers.utils import logging

        from torchtrain.training.report import final_table

        # What of transformers' warnings matters here is checked and said by ourselves.
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        result = run(config, replace=replace)
        out = Console()
        out.print(final_table(result.before, result.after, result.tokens_seen, result.tokens_per_second))
        out.print(f"model in {result.model}", markup=False, soft_wrap=True)


@app.command()
def config(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config, every default written out, as YAML that can be used in the file's place.

    Example: torchtrain config configs/demo.yaml pack.variant=intra > mine.yaml
    """
    with _one_line_errors():
        from torchtrain.config import dump_config, load_config

        typer.echo(dump_config(load_config(file, overrides or [])), nl=False)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        _fail(str(error), 2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "torchtrain":
            raise
        _fail(f"the package {error.name} is not installed: pip install 'anchorline[torch]'", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    print(f"torchtrain: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the command `torchtrain`."""
    try:
        sys.exit(app(standalone_mode=False))
    except Exception as error:
        # What typer says of arguments; its exceptions are click's own or not, by its version.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if message := " ".join(describe().split()):  # empty where help was printed instead
            print(f"torchtrain: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
