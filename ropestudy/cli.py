"""The verbs `jaxref study` and `jaxref ring`. The command `jaxref` loads this file as a plug-in."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from anchorline.command import INTERRUPTED, Leave
from jaxref.cli import MOST_POSITION, app, main, whole_numbers


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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ropestudy.spec import load_study

    resolved = load_study(config, overrides or [])
    from ropestudy.report import write_report
    from ropestudy.run import run_study
    from ropestudy.schema import RESULTS

    console = Console(stderr=True)
    columns = (TextColumn("study"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    command = shlex.join(["jaxref", *sys.argv[1:]])
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)

            def advance(line: str, done: int, total: int) -> None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                bar.update(task, completed=done, total=total)

            results = run_study(resolved, out, advance, command)
    except KeyboardInterrupt:
        raise Leave("interrupted; finished cells are kept, and the same command continues", INTERRUPTED) from None
    print(f"{len(results.records)} records in {out / RESULTS}")
    write_report(results, out)
    print(f"tables and figures in {out}")


@app.command()
def ring(
    model: Annotated[
        str, typer.Option(help="smollm2, a folder with config.json and safetensors, or a hub id")
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(min=2, max=MOST_POSITION, help="of the row, one document")] = 1024,
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="sizes of the ring; 1 is one process")] = "1,2,4,8",
    rounding: Annotated[str, typer.Option(help="the preset whose roundings everything has")] = "flash_bf16",
    text: Annotated[str, typer.Option(help="demo, or a .jsonl or .txt file or a folder of them")] = "demo",
    seed: Annotated[int, typer.Option(min=0, help="of the choice of the document")] = 0,
) -> None:
    """Show how far zigzag ring attention moves a model's logits from those of one process, in emulation.

    Each rank's output over each part of the keys is rounded before it is merged with the others', and its probabilities
    relative to that part's own maximum. Ulysses does neither: its logits are one process's own. Memory and time are
    those of attention T x T.

    Example: jaxref ring --tokens 1024 --ranks 1,2,4,8
    """
    from jaxref.rounding import preset
    from ropestudy.compute.ring import compare_ring, zigzag
    from ropestudy.models import load_pretrained
    from ropestudy.spec import ModelConfig, TextConfig
    from ropestudy.text import read_pool, row

    sizes, chosen = whole_numbers("ranks", ranks), preset(rounding)
    for size in sizes:
        zigzag(tokens, size)  # raises before a model is loaded
    pretrained = load_pretrained(ModelConfig(source=model))
    pool = read_pool(TextConfig(source=text), pretrained.tokenizer, 1, tokens, seed)
    ids_T = row(pool, 0, tokens, pretrained.bos).ids
    table = Table(title=f"{model}, {tokens:,} tokens ({pool.names[0]}), {rounding}: logits of a zigzag ring")
    for title in (
        "ranks",
        "largest\ndifference",
        "mean\ndifference",
        "argmax\ndiffers",
        "error against\nfloat64 (RMS)",
    ):
        table.add_column(title, justify="right")
    for line in compare_ring(pretrained.decoder, ids_T, sizes, chosen):
        numbers = (f"{line.largest:.4g}", f"{line.mean:.4g}", f"{line.argmax_differs:.2%}", f"{line.error:.4g}")
        table.add_row(str(line.ranks), *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
