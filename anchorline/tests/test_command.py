"""How commands end: the line on standard error, and the exit code."""

import errno
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from anchorline.command import Leave, finite, make_app
from anchorline.errors import UserError

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def call():
    """Return a function that runs a verb which raises what it is given, and returns (exit code, stdout, stderr)."""

    def call(error: BaseException | None = None, *arguments: str) -> tuple[int, str, str]:
        app = make_app("ship", "A ship.")

        @app.command()
        def sail(
            speed: float = typer.Option(1.0, callback=finite), name: str = "x", knots: int = typer.Option(1, max=9)
        ) -> None:
            print("under sail ■")
            if error is not None:
                raise error

        @app.command()
        def anchor() -> None:
            raise AssertionError

        result = CliRunner().invoke(app, list(arguments or ["sail"]))
        return result.exit_code, result.stdout, result.stderr

    return call


def test_done(call):
    assert call() == (0, "under sail ■\n", "")


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError("speed: 3; give 2\nor 1"), 2, "ship: speed: 3; give 2 or 1\n"),
        (Leave("stopped", 143), 143, "ship: stopped\n"),
        (Leave("", 7), 7, ""),
        (KeyboardInterrupt(), 130, "ship: interrupted\n"),
        (typer.Exit(1), 1, ""),
        (FileNotFoundError(2, "No such file or directory", "a\nb"), 2, "ship: no such file or directory (a b)\n"),
        (NO_SPACE, 2, "ship: no space left on device\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (
            MemoryError(),
            1,
            "ship: memory ran out: the system has no more; choose smaller settings, or a larger machine\n",
        ),
    ],
)
def test_ways_to_end(call, error, code, printed):
    assert call(error) == (code, "under sail ■\n", printed)


@pytest.mark.parametrize("error", [ValueError("x"), AssertionError(), OSError("odd")])
def test_a_bug_of_ours_says_so_and_how_to_report_it(call, error):
    code, _, printed = call(error)
    assert code == 70
    assert printed.lstrip().startswith("Traceback (most recent call last):\n")
    last = printed.splitlines()[-1]
    assert last.startswith(
        "ship: this is a bug of Anchorline, not a mistake of yours; please open an issue with all lines above"
    )
    assert "Python 3." in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sail", "--speed", "inf"], "inf is not a finite number"),
        (["sail", "--speed", "nan"], "nan is not a finite number"),
        (["sail", "--speed", "x"], "Invalid value for '--speed'"),
        (["sail", "--knots", "9" * 5000], "Invalid value for '--knots'"),
        (["sial"], "No such command 'sial'"),
        (["sail", "--depth", "1"], "No such option: --depth"),
        (["sail", "--name"], "requires an argument"),
    ],
)
def test_mistakes_in_arguments(call, arguments, message):
    code, printed, wrong = call(None, *arguments)
    assert (code, printed, wrong.count("\n")) == (2, "", 1)
    assert wrong.startswith("ship: ")
    assert message in wrong


PROGRAM = """
import typer
from anchorline.command import Command
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
@app.command("ship", cls=Command)
def ship(lines: int = 1) -> None:
    for _ in range(lines):
        print("under sail ■")
app()
"""


def program(*arguments: str, stdout, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_a_terminal_without_the_characters_is_no_bug():
    ended = program(stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "under sail \\u25a0\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        ended = program(stdout=full)
    assert (ended.returncode, ended.stderr) == (2, "ship: no space left on device\n")


def test_no_message_for_a_reader_that_has_closed_the_output():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        ended = program("--lines", "100000", stdout=nobody)
    assert (ended.returncode, ended.stderr) == (1, "")
