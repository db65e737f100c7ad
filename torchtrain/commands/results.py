"""The commands `evaluate` and `compare`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from anchorline.errors import UserError, print, quoted
from anchorline.files import resolve_folder
from anchorline.marked import read_marked
from torchtrain.commands.arguments import MOST, MOST_PROCESSES, Overrides
from torchtrain.commands.ending import report_once


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_FOLDER", help="a run's folder, an exported folder, a hub id, or smollm2")
    ],
    overrides: Overrides = None,
    suite: Annotated[Path, typer.Option(help="YAML of tasks and materials")] = Path("configs/eval/ruler.yaml"),
    tasks: Annotated[
        str | None, typer.Option(help="RULER's tasks or any of lm-eval's, with commas; default: the suite's")
    ] = None,
    lengths: Annotated[str, typer.Option(help="tokens of prompt and answer together; several with commas")] = "4096",
    samples: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="samples of each task and length; default: the suite's")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=MOST, help="number of a run's last models")] = 1,
    anchor: Annotated[
        bool | None, typer.Option(help="put the anchor before each prompt; default: if the training had one")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--apply-chat-template", help="put each prompt into the model's chat template")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="processes that share the tasks")] = 1,
    log: Annotated[
        Path | None, typer.Option("--lm-eval-log", help="folder for lm-eval's own logs; default: no logs")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder of results; default: TARGET-evaluation")] = None,
) -> None:
    """Measure RULER, perplexity by position, and any task of lm-eval; finished results are not computed again.

    Writes a file for each model, task and length into --out, for torchtrain compare. A task that cannot run is reported
    with its reason before any other starts. Attention is plain causal attention. Of a run, the held-out losses follow.

    Example: torchtrain evaluate runs/demo --lengths 1024,4096 --samples 20 --last 5

    Example: torchtrain evaluate runs/demo --tasks arc_easy,gsm8k --samples 100 --processes 2
    """
    with report_once():
        from torchtrain.evaluation.suite import load_suite, parse_lengths

        given = [*(overrides or []), *([f"samples={samples}"] if samples is not None else [])]
        given += [f"tasks=[{tasks}]"] * (tasks is not None) + ["chat_template=true"] * chat
        if tasks is not None and not any(of.startswith("perplexity") for of in given):
            given.append("perplexity=null")
        chosen, at = load_suite(suite, given), parse_lengths(lengths)
        if not os.path.lexists(os.path.join(target, "run.json")):
            from torchtrain.modeling.source import check_source

            check_source(target, "RUN_OR_FOLDER")

        from transformers.utils import logging

        from torchtrain.evaluation.compare import tables_of_run
        from torchtrain.evaluation.evaluate import evaluate as measure
        from torchtrain.evaluation.measure import Checkpoint
        from torchtrain.evaluation.results import NotRun
        from torchtrain.evaluation.tables import print_tables
        from torchtrain.run.folder import RunFolder
        from torchtrain.run.status import held_out_lines
        from torchtrain.training.events import read_metrics

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        checkpoints, training = [Checkpoint("model", None, target)], None
        if os.path.lexists(os.path.join(target, "run.json")):
            models, training = RunFolder(target).last_models(last), RunFolder(target).check_run().training()
            checkpoints = [Checkpoint(name, step, str(folder), training) for name, step, folder in models]
        elif last > 1:
            raise UserError(f"--last {last}: {quoted(target)} is not a run's folder; leave it out")
        folder = resolve_folder("--out", out or f"{target.rstrip('/')}-evaluation")
        results = measure(
            checkpoints,
            chosen,
            at,
            folder,
            anchor=anchor,
            processes=processes,
            log=None if log is None else resolve_folder("--lm-eval-log", log),
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print_tables(tables_of_run(results))
        if training is not None:  # of fine-tuned answers, theirs
            for line in held_out_lines(read_metrics(RunFolder(target).metrics)):
                print(line)
        print(f"results in {folder}")
        if all(isinstance(one, NotRun) for one in results):
            print("nothing ran: the reasons are above", file=sys.stderr)
            raise typer.Exit(1)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="evaluated runs, or folders of results; NAME=RUN,RUN: seeds of one row"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder for results.md, results.tex and figures; default: not written")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="number of each run's last checkpoints; default: all evaluated")
    ] = None,
    document: Annotated[
        Path | None, typer.Option(help="a Markdown file to update the tables in, such as docs/results.md")
    ] = None,
) -> None:
    """Compare results by run and length: the paper's tables and figures, with n, intervals and what did not run.

    Differences are paired by sample, and by seed if there are several. A best value is bold if its intervals over
    samples and over seeds exclude zero; that needs seeds. Results of different samples or lengths are refused.

    Example: torchtrain compare runs/full runs/intra runs/anchor --out runs/tables

    Example: torchtrain compare intra=runs/intra-0,runs/intra-1 anchor=runs/anchor-0,runs/anchor-1
    """
    with report_once():
        from torchtrain.evaluation.compare import compare as tables_of
        from torchtrain.evaluation.tables import TABLES, print_tables, write_document, write_tables

        if document is not None:
            read_marked(document, [TABLES])  # refuse a wrong file before writing
        tables, facts, measured = tables_of(runs, last)
        print_tables(tables)
        if out is None and document is None:
            return
        from torchtrain.evaluation.tables import figures_of

        figures = figures_of(measured)
        if out is not None:
            folder = resolve_folder("--out", out)
            write_tables(tables, facts, folder, figures)
            print(f"tables in {folder}")
        if document is not None:
            write_document(tables, facts, document, figures)
            print(f"tables in {document}")
