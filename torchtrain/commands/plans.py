"""The verbs before a run: init, plan, config."""

import os
from pathlib import Path
from typing import Annotated

import typer

from anchorline.command import finite
from anchorline.errors import UserError, print, quoted
from anchorline.files import expand
from torchtrain.commands.arguments import MOST, MOST_PROCESSES, ConfigFile, Overrides
from torchtrain.commands.ending import report_once


def init(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="documents: a .jsonl, .parquet or text file, or a folder of them")
    ],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder of a Hugging Face model, or its hub id")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="the config to write")] = Path("anchorline.yaml"),
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="tokens of a row; default: twice the model's, at most 65,536")
    ] = None,
) -> None:
    """Write a config that trains MODEL on DATA, after checking both, and print the next command.

    Checks the tokenizer, the first records and the memory. Writes only FILE.

    Example: torchtrain init documents.jsonl HuggingFaceTB/SmolLM2-135M --out mine.yaml
    """
    with report_once():
        # Before the imports, which take seconds.
        if not os.path.exists(expand(data)):
            raise UserError(f"DATA {quoted(data)}: no such file or folder; give .jsonl, .parquet or text files")
        if out.exists():
            raise UserError(f"--out {quoted(out)}: exists; choose another name, or remove it")
        if out.suffix not in (".yaml", ".yml"):
            raise UserError(f"--out {quoted(out)}: is not the name of a YAML file; end it with .yaml")

        from torchtrain.modeling.source import check_source

        check_source(model, "MODEL")

        from transformers.utils import logging

        from torchtrain.commands.first_config import write_first_config

        logging.disable_progress_bar()
        write_first_config(data, model, out, length)
        print(f"config    {out}; next: torchtrain train {out}")


def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[
        int,
        typer.Option("--processes", "-n", min=1, max=MOST_PROCESSES, help="number of processes, each with its own GPU"),
    ] = 1,
    gpu_memory: Annotated[
        float, typer.Option("--memory", min=1e-6, max=2**20, callback=finite, help="GiB of each GPU, or process")
    ] = 80,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="the processes have no GPU: nothing is counted for CUDA and NCCL")
    ] = False,
    host_memory: Annotated[
        float | None,
        typer.Option("--host-memory", min=1e-6, max=2**30, callback=finite, help="GiB of all hosts together"),
    ] = None,
    document_tokens: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=MOST,
            callback=finite,
            help="E[n^2] / E[n] of the documents' tokens, which sets attention's cost; default: from data.prepared, or "
            "the paper's statistics",
        ),
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=1e-9, max=1e15, callback=finite, help="speed of all processes together")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="name of the GPU, for the peak of --mfu")] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.001, max=1, callback=finite, help="share of the peak of --gpu")
    ] = None,
) -> None:
    """Estimate a run's memory, tokens, FLOPs, time and disk; propose a change if it does not fit.

    Reads the config, the model's config.json and the lengths in data.prepared, but no weights.
    Exit code 0: it fits; 1: it does not.

    Example: torchtrain plan configs/paper/llama2-7b-128k-anchor.yaml -n 8 --gpu A100 --mfu 0.4
    """
    with report_once():
        from torchtrain.config import load_config

        config = load_config(file, overrides or [])
        if cpu and (gpu is not None or host_memory is not None):
            raise UserError("--cpu: there is no GPU, and --memory is the host's; leave --gpu and --host-memory out")

        from torchtrain.planning.answer import Machine, Pace, print_plan  # isort: skip
        from torchtrain.planning.budget import GIB

        hosts = None if host_memory is None else int(host_memory * GIB)
        machine = Machine(processes, int(gpu_memory * GIB), hosts, cpu)
        if not print_plan(config, machine, Pace(tokens_per_second, gpu, mfu), document_tokens):
            raise typer.Exit(1)


def config(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="YAML config, for example configs/demo.yaml")
    ] = None,
    overrides: Overrides = None,
    key: Annotated[
        str | None,
        typer.Option("--explain", metavar="KEY", help="explain a setting or a section, such as train.betas or rope"),
    ] = None,
) -> None:
    """Print the config with every default, as YAML that can replace the file. Without FILE: a line for every setting.

    Example: torchtrain config configs/demo.yaml pack.variant=intra > mine.yaml

    Example: torchtrain config --explain pack.variant
    """
    with report_once():
        if key is not None or file is None:
            from torchtrain.config.reference import explain_settings

            print(explain_settings(key))
            return

        from torchtrain.config import dump_config, load_config
        from torchtrain.planning.work import describe_schedule

        resolved = load_config(file, overrides or [])
        typer.echo(dump_config(resolved), nl=False)
        counted = "" if resolved.train.epochs is not None else "; `torchtrain plan` counts the bytes"
        print(f"# saves {describe_schedule(resolved.save, resolved.train)}{counted}")
