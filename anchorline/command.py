"""How every command ends: its line on standard error, and its exit code.

    0    done
    1    a verdict of "no"; or a fault of the machine: memory that ran out, a process that is gone
    2    a mistake of the user's, or a file that cannot be used: one line that names it and the fix
    70   a bug of ours (EX_SOFTWARE of sysexits.h): a traceback, and a last line that says so and how to report it
    130  interrupted

A command adds its own (143 of a run that SIGTERM stopped) by raising `Leave`.
"""

import errno
import importlib.util
import math
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from anchorline.environment import version
from anchorline.errors import UserError, disk_fault, one_line, quoted

MISTAKE, BUG, INTERRUPTED = 2, 70, 130

# Errors of the disk or the system that any read or write may raise.
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE}
_EXTRAS = {"torchtrain": "torch", "jaxref": "jax", "parity": "jax,torch"}  # the extra of each command
_REPORTED = ("anchorline", "torch", "transformers", "jax")  # versions in the report of a bug


class Leave(Exception):  # noqa: N818 - not always an error
    """End the command with an exit code and one line on standard error; an empty message prints nothing."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Ends:
    """A command, or a group of commands, that ends in one of the ways above."""

    name: str | None

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An interruption is caught here, before typer reports it."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt:
            raise Leave("interrupted", INTERRUPTED) from None

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        return _end(self.name or "anchorline", super().main, args, *rest, **extra)  # type: ignore[misc]


class Command(_Ends, TyperCommand):
    """A single command."""


class Commands(_Ends, TyperGroup):
    """A command with verbs."""


def make_app(name: str, about: str, begin: Callable[[], None] = lambda: None) -> typer.Typer:
    """Make a command with its help text; add its verbs with `@app.command()`. `begin` is called before a verb runs."""
    app = typer.Typer(
        name=name,
        cls=Commands,
        help=about,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(asked: bool) -> None:
        if asked:
            typer.echo(f"{name} {version('anchorline') or '(not installed)'}")
            raise typer.Exit

    @app.callback()
    def prepare(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version")
        ] = False,
    ) -> None:
        begin()

    return app


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity; for `callback` of an option."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def _end(name: str, run: Callable[..., Any], args: Sequence[str] | None, *rest: Any, **extra: Any) -> NoReturn:
    extra["standalone_mode"] = False
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="backslashreplace")  # for terminals that lack a character
    try:
        code = run(args, *rest, **extra)
        sys.stdout.flush()
    except Leave as leave:
        _leave(name, str(leave), leave.code)
    except UserError as error:
        _leave(name, str(error), MISTAKE)
    except MemoryError as error:
        _leave(
            name,
            f"memory ran out: {str(error) or 'the system has no more'}; choose smaller settings, or a larger machine",
            1,
        )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if name not in _EXTRAS or not package or importlib.util.find_spec(package) is not None:
            _bug(name)
        _leave(name, f"the package {package} is not installed: pip install 'anchorline[{_EXTRAS[name]}]'", MISTAKE)
    except OSError as error:
        if error.errno == errno.EPIPE:
            _leave(name, "", 1)  # the reader of our output has closed the pipe
        if error.filename is None and error.errno not in _DISK_FAULTS:
            _bug(name)
        _leave(name, disk_fault(error), MISTAKE)
    except Exception as error:
        # An error of typer about arguments; its class differs among versions.
        describe = getattr(error, "format_message", None)
        if describe is None:
            _bug(name)
        context, message = getattr(error, "ctx", None), describe().rstrip(".")
        verb = f" {context.command.name}" if context is not None and context.parent is not None else ""
        _leave(name, message and f"{message}; see `{name}{verb} --help`", MISTAKE)  # empty after printed help
    sys.exit(code if isinstance(code, int) else 0)


def _has_no_platform() -> bool:
    """Whether JAX cannot start on the platforms of JAX_PLATFORMS. JAX raises many kinds of error then."""
    jax = sys.modules.get("jax")
    if jax is None or not os.environ.get("JAX_PLATFORMS"):
        return False
    try:
        jax.devices()
    except Exception:
        return True
    return False


def _bug(name: str) -> NoReturn:
    if _has_no_platform():
        platforms = quoted(os.environ["JAX_PLATFORMS"])
        _leave(name, f"JAX_PLATFORMS: {platforms} is not on this machine; unset it, or set it to cpu", MISTAKE)
    traceback.print_exc()
    known = ", ".join(f"{package} {number}" for package in _REPORTED if (number := version(package)))
    _leave(
        name,
        "this is a bug of Anchorline, not a mistake of yours; please open an issue with all lines above, the "
        f"command and its configuration ({known}, Python {platform.python_version()})",
        BUG,
    )


def _leave(name: str, message: str, code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # closed pipe or full disk: Python must not try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if message:
        print(f"{name}: {one_line(message)}", file=sys.stderr)
    sys.exit(code)
