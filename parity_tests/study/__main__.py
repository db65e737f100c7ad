"""The command: see `parity_tests.study`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils.logging import disable_progress_bar

from anchorline.command import INTERRUPTED, Command, Leave
from parity_tests.study.run import DTYPES, run_torch_study
from ropestudy.report import write_report
from ropestudy.run import RESULTS
from ropestudy.spec import load_study

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("study", cls=Command)
def main(
    config: Annotated[Path, typer.Argument(help="a study; its section shift_pairs is run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes to it: shift_pairs.tokens=128")] = None,
    implementation: Annotated[str, typer.Option(help="eager, sdpa, flash_attention_2, ...")] = "eager",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    out: Annotated[Path, typer.Option(help="folder of results.json")] = Path("runs/study-torch"),
) -> None:
    """The precision study with attention from a torch model."""
    disable_progress_bar()
    command = shlex.join(["python", "-m", "parity_tests.study", *sys.argv[1:]])

    def advance(line: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {line}", file=sys.stderr)

    try:
        loaded = load_study(config, overrides or [])
        found = run_torch_study(loaded, out, implementation, dtype, advance, command)
    except KeyboardInterrupt:
        raise Leave("interrupted; finished sequences are kept, and the same command goes on", INTERRUPTED) from None
    print(f"{len(found.records)} records in {out / RESULTS}")
    print(f"report: {write_report(found, out)}")


if __name__ == "__main__":
    app()
