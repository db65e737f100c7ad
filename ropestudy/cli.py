"""The verb `jaxref study`. The command `jaxref` loads this file as a plug-in."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from anchorline.command import INTERRUPTED, Leave
from anchorline.errors import print
from anchorline.terminal import progress
from jaxref.cli import app, main


@app.command()
def study(
    config: Annotated[Path, typer.Argument(help="a study, such as configs/study/demo.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="changes to it: shift_pairs.tokens=128 masks=off")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of results.json and the finished cells")] = Path("runs/study"),
) -> None:
    """Study which rounding breaks RoPE's invariance to shifts, where, and what it costs; leave results and a report.

    Every finished cell is kept under --out. After an interruption the same command continues.

    \b
    Examples:
      jaxref study configs/study/demo.yaml --out runs/study
      jaxref study configs/study/paper.yaml model.source=my/model --out runs/study-paper
    """
    from ropestudy.spec import load_study

    resolved = load_study(config, overrides or [])
    from ropestudy.report import write_report
    from ropestudy.run import run_study
    from ropestudy.schema import RESULTS

    command = shlex.join(["jaxref", *sys.argv[1:]])
    try:
        with progress("study") as advance:
            results = run_study(resolved, out, advance, command)
    except KeyboardInterrupt:
        raise Leave("interrupted; finished cells are kept, and the same command continues", INTERRUPTED) from None
    print(f"{len(results.records)} records in {out / RESULTS}")
    write_report(results, out)
    print(f"tables and figures in {out}")


if __name__ == "__main__":
    main()
