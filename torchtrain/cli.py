"""The command line. How it ends is `anchorline.command`'s, but for what many processes add: who speaks, and 143 where
SIGTERM ended a run (it is saved).

`torchtrain train` is one process; torchrun starts many: torchrun --nproc_per_node 8 -m torchtrain train CONFIG.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anchorline.command import INTERRUPTED, MISTAKE, Leave, finite, make_app
from anchorline.errors import UserError, one_line, quoted
from anchorline.files import resolve
from torchtrain.errors import TERMINATED, OtherRankFailed, RankLost, TasksUnfinished, Terminated

if TYPE_CHECKING:
    from torchtrain.planning.budget import Memory

# torchrun stops all processes when the first one leaves. Rank 0 speaks at once; another rank that found a mistake waits
# in case rank 0 found the same; one with nothing to say leaves last.
_SECONDS_BEFORE_SPEAKING = 2.0
_SECONDS_BEFORE_LEAVING = 5.0
MOST, MOST_PROCESSES = 2**31 - 1, 2**16

app = make_app(
    "torchtrain", "Extend a language model's context: train it on packed long sequences, AnchorAttention and others."
)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/demo.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="override values of the file, for example train.steps=20"),
]


@app.callback()
def _torchtrain() -> None:
    # Packages that we call must not wait for an answer from whoever started us.
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="remove the run that run.folder holds, and run anew")
    ] = False,
) -> None:
    """Train, and leave a Hugging Face folder in run.folder.

    Writes there: model/ (loads with AutoModelForCausalLM and AutoTokenizer), metrics.jsonl, loss.png, config.yaml with
    every default written out, and run.json. Converted models and tokens are kept in data.cache. Everything that can be
    checked is checked before run.folder is made.

    Example: torchtrain train configs/demo.yaml train.steps=20 run.folder=runs/short

    On several GPUs, as the file's `distributed` section says: torchrun --nproc_per_node 8 -m torchtrain train FILE
    """
    started = time.perf_counter()
    with _one_speaks():
        from torchtrain.config import load_config

        config = load_config(file, overrides or [])

        # First, so that the absence of torch is told by us and not by transformers.
        from torchtrain.run.recipe import train as run  # isort: skip

        _tell(lambda: run(config, replace=replace, started=started))


def _tell(run: Callable[[], Any]) -> None:
    """Train, and tell what came of it."""
    from rich.console import Console
    from transformers.utils import logging

    from torchtrain.run.report import final_table

    # What of transformers' warnings matters here is checked and said by ourselves.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    result = run()
    if result is None:  # rank 0 speaks; or there was nothing left to do
        return
    out = Console()
    out.print(final_table(result.before, result.after, result.tokens_seen, result.tokens_per_second))
    out.print(f"model in {result.model}", markup=False, soft_wrap=True)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the run's folder")],
    overrides: Overrides = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, max=MOST, help="from the checkpoint of this step; 0 begins anew; default: the last"
        ),
    ] = None,
) -> None:
    """Go on with a run after anything: it ends as if it had never been interrupted.

    As many processes as before leave the same bits. Another number of them, or another distributed section, goes on
    with the same rows and weights. Nothing that decides the numbers may change; such a change is refused and named.

    Example: torchtrain resume runs/demo

    On several GPUs: torchrun --nproc_per_node 8 -m torchtrain resume FOLDER distributed.sequence_parallel=8
    """
    started = time.perf_counter()
    with _one_speaks():
        from torchtrain.config_history import load_config_of_run

        if not os.path.lexists(resolve("", folder) / "config.yaml"):
            raise UserError(f"{folder}: holds no run of ours; give the folder of one (run.folder in its config)")
        config = load_config_of_run(folder / "config.yaml", overrides or [])
        config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(folder)})})

        from torchtrain.run.recipe import resume as run  # isort: skip

        _tell(lambda: run(config, step=step, started=started))


@app.command()
def status(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the run's folder")]) -> None:
    """Tell where a run stands, without touching it: at work or not, steps, loss, time left, checkpoints, bad steps.

    Example: torchtrain status runs/demo
    """
    with _one_speaks():
        from torchtrain.run.status import status_lines

        for line in status_lines(folder):
            print(line)


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a run's folder, or a token store's (cache/corpus/...)")
    ],
) -> None:
    """Read everything that has a digest, and say what has changed: a run's checkpoints and tokens, or a store.

    Exit code 0: all is as it was written; 1: something is not.

    Example: torchtrain verify runs/demo
    """
    with _one_speaks():
        from torchtrain.run.verify import verify_folder

        good = True
        for found in verify_folder(folder):
            print(found)
            good &= found.good
        if not good:
            raise typer.Exit(1)


@app.command()
def prepare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML config, for example configs/data/slimpajama-64k.yaml; or a run's"),
    ],
    out: Annotated[Path, typer.Option("--out", help="the store's folder, which is new; or that of the same store")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="of prepare.executor slurm: print the script, submit and write nothing")
    ] = False,
) -> None:
    """Tokenise a corpus into a store, with as many processes as there are; interrupted, it goes on where it was.

    Writes into --out the store, which runs read by data.prepared, and its statistics. Tokens, order and fingerprint are
    the same whoever does the work: prepare.executor is local, slurm or ray.

    Example: torchtrain prepare configs/data/slimpajama-128k.yaml --out data/slimpajama-128k prepare.workers=32
    """
    with _one_speaks():
        from torchtrain.config import load_preparation

        preparation = load_preparation(file, overrides or [])

        from torchtrain.run.preparing import prepare_store  # isort: skip

        prepare_store(preparation, out, dry_run)


@app.command()
def stats(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a token store's, from `torchtrain prepare` or a run's")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="where to write; default: the store's folder")] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--sequence-length", min=2, max=2**24, help="tokens a row; may be given more than once"),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="whose FLOPs tell what a step gains: a folder or hub id")
    ] = "meta-llama/Llama-2-7b-hf",
) -> None:
    """Tell what a token store holds: domains, lengths, what a mixture changed, how much of attention packing leaves.

    Writes statistics.json and statistics.html.

    Example: torchtrain stats data/slimpajama-128k --sequence-length 131072
    """
    with _one_speaks():
        from torchtrain.run.statistics import show, write_statistics

        show(write_statistics(folder, out or folder, lengths or (), model))


@app.command()
def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option("--processes", "-n", min=1, max=MOST_PROCESSES, help="how many, each with its own GPU")
    ] = 1,
    gpu_memory: Annotated[
        float, typer.Option("--memory", min=1e-6, max=2**20, callback=finite, help="GiB of each GPU")
    ] = 80,
    host_memory: Annotated[
        float | None,
        typer.Option("--host-memory", min=1e-6, max=2**30, callback=finite, help="GiB of all hosts together"),
    ] = None,
    document_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="mean tokens of a document, which says how much attention is left"),
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=1e-9, max=1e15, callback=finite, help="of all processes together")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="folder of a run on the same kind of GPU: its FLOP/s per process")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="name of the GPU, whose peak --mfu is a share of")] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.001, max=1, callback=finite, help="share of the peak, of --gpu")
    ] = None,
) -> None:
    """Tell before a run: memory, tokens, FLOPs, expected time, what it writes, and what to change if it does not fit.

    Reads the config and the model's config.json, no weights and no data. Exit code 0: it fits; 1: it does not.

    Example: torchtrain plan configs/paper/llama2-7b-128k-anchor.yaml -n 8 --document-tokens 1060 --gpu A100 --mfu 0.4
    """
    with _one_speaks():
        from torchtrain.config import load_config

        config = load_config(file, overrides or [])

        from torchtrain.planning import budget  # isort: skip
        from rich.console import Console

        from torchtrain.distributed.layout import check_layout
        from torchtrain.planning.saves import count_saves, describe_schedule
        from torchtrain.run.report import memory_table, time_line

        ways = sum(way is not None for way in (tokens_per_second, measured, mfu))
        if ways > 1 or (mfu is None) != (gpu is None):
            raise UserError("--tokens-per-second, --measured, --gpu with --mfu: give one of the three")
        check_layout(config, processes)
        shapes = budget.Shapes(budget.model_config(config))
        limit = int(gpu_memory * budget.GIB)
        memory = budget.memory(config, shapes, processes)
        work = budget.work(config, shapes, document_tokens)
        seconds = None
        if tokens_per_second is not None:
            seconds = work.tokens / tokens_per_second
        elif measured is not None:
            seconds = budget.seconds_like(work, measured, processes)
        elif mfu is not None and gpu is not None:
            seconds = budget.seconds_by_mfu(work, gpu, mfu, processes)
        out = Console()
        out.print(memory_table(memory, limit, processes))
        bound = "" if work.exact else "at most "
        hint = "" if work.exact else " (attention counted as full: give --document-tokens)"
        if (published := budget.published_shapes(config)) is not None:
            print(f"model     the shapes of {published} come with torchtrain; the hub was not asked")
        if config.model.fused != "none":
            print(f"fused     activations are counted as without model.fused {config.model.fused}, which keeps fewer")
        trained = "" if config.model.lora is None else f", {work.trained:,} of them trained"
        print(f"weights   {work.weights:,}{trained}")
        print(f"tokens    {work.tokens:,} in {config.train.steps:,} steps")
        print(f"FLOPs     {bound}{work.flops:.3g}{hint}")
        print(f"time      {time_line(seconds, bound)}")
        bytes_each = shapes.model(config.model).dtype.itemsize
        saves = count_saves(config.save, config.train, work.weights, work.trained, bytes_each)
        gib = f"{saves.checkpoint / budget.GIB:,.1f} GiB each, {describe_schedule(config.save, config.train)}"
        print(f"saves     {saves.checkpoints:,} checkpoints of {gib}")
        print(f"models    {saves.models:,} of {saves.model / budget.GIB:,.1f} GiB each")
        written, most = (f"{size / budget.GIB:,.1f} GiB" for size in (saves.written, saves.most))
        print(f"disk      {written} written in all, up to {most} there at a time")
        over = host_memory is not None and memory.hosts > host_memory * budget.GIB
        if over:
            when = "loads" if memory.host_load >= memory.host else "trains"
            print(f"hosts     hold {memory.hosts / budget.GIB:.1f} GiB while it {when}, more than --host-memory")
        if memory.gpu <= limit and over:
            raise typer.Exit(1)
        if memory.gpu <= limit:
            print(f"fits      {memory.gpu / limit:.0%} of the memory; the CUDA context, NCCL and fragments come on top")
            print(f"fastest   {_describe_fastest(budget.fastest(config, shapes, processes, limit))}")
            return
        changes, after = budget.remedies(config, shapes, processes, limit)
        when = " while it loads" if memory.load > memory.step else ""
        print(f"too much  {(memory.gpu - limit) / budget.GIB:.1f} GiB more than there is{when}")
        verdict = "fits" if after.gpu <= limit else "is still too much: take more or larger GPUs"
        if host_memory is not None and after.hosts > host_memory * budget.GIB:
            verdict += f"; the hosts would hold {after.hosts / budget.GIB:.1f} GiB, more than --host-memory"
        print(f"change    {' '.join(changes) or 'nothing helps'}: {after.gpu / budget.GIB:.1f} GiB, {verdict}")
        raise typer.Exit(1)


def _describe_fastest(found: "tuple[list[str], Memory] | None") -> str:
    assert found is not None, "the config as it is fits"
    changes, memory = found
    return f"{' '.join(changes)}: {memory.gpu / 2**30:.1f} GiB" if changes else "as it is"


@app.command()
def config(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved config, every default written out, as YAML that can be used in the file's place.

    Example: torchtrain config configs/demo.yaml pack.variant=intra > mine.yaml
    """
    with _one_speaks():
        from torchtrain.config import dump_config, load_config
        from torchtrain.planning.saves import describe_schedule

        resolved = load_config(file, overrides or [])
        typer.echo(dump_config(resolved), nl=False)
        typer.echo(f"# saves {describe_schedule(resolved.save, resolved.train)}; `torchtrain plan` counts the bytes")


@app.command()
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_FOLDER", help="a run's folder, an exported folder, a hub id, or smollm2")
    ],
    overrides: Overrides = None,
    suite: Annotated[Path, typer.Option(help="YAML of tasks and materials")] = Path("configs/eval/ruler.yaml"),
    lengths: Annotated[str, typer.Option(help="tokens, prompt and answer together; several with commas")] = "4096",
    samples: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="of each task and length; default: the suite's")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=MOST, help="how many of a run's last models")] = 1,
    anchor: Annotated[bool, typer.Option("--anchor", help="put the training's anchor before each prompt")] = False,
    out: Annotated[Path | None, typer.Option(help="folder of results; default: TARGET-evaluation")] = None,
) -> None:
    """Measure RULER, LongBench, MMLU, HellaSwag and perplexity by position; what is finished is never computed again.

    Leaves a file for each model, task and length in --out, which torchtrain compare reads. A task whose material is
    missing is told as not run, and no average hides it. Attention is plain causal attention.

    Example: torchtrain evaluate runs/demo --lengths 1024,4096 --samples 20 --last 5
    """
    with _one_speaks():
        from torchtrain.evaluation.suite import load_suite, parse_lengths

        given = [*(overrides or []), *([f"samples={samples}"] if samples is not None else [])]
        chosen, at = load_suite(suite, given), parse_lengths(lengths)

        from transformers.utils import logging

        from torchtrain.evaluation.compare import tables_of_run
        from torchtrain.evaluation.evaluate import Checkpoint
        from torchtrain.evaluation.evaluate import evaluate as measure
        from torchtrain.evaluation.tables import print_tables
        from torchtrain.run.trained import last_models, read_training

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        checkpoints = [Checkpoint("model", None, target)]
        if os.path.lexists(os.path.join(target, "run.json")):
            found, training = last_models(Path(target), last), read_training(Path(target))
            checkpoints = [Checkpoint(name, step, str(folder), training) for name, step, folder in found]
        elif last > 1:
            raise UserError(f"--last {last}: {quoted(target)} is not a run's folder; leave it out")
        folder = resolve("--out", out or f"{target.rstrip('/')}-evaluation")
        results = measure(
            checkpoints,
            chosen,
            at,
            folder,
            anchor=anchor,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print_tables(tables_of_run(results))
        print(f"results in {folder}")


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="what was evaluated, or folders of results; NAME=RUN,RUN: seeds of one row"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="folder for results.md, results.tex, results.html and figures; default: none is written"),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="how many of each run's checkpoints, its last; default: all evaluated"),
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(help="YAML of published tables; default: configs/paper/results.yaml, where it is there"),
    ] = None,
) -> None:
    """Put results side by side, run by length: the paper's tables and figures, with n, intervals and what did not run.

    Differences are paired by sample (bootstrap, McNemar); bold stands only where the interval of each leaves out zero.
    Results of other samples, templates or lengths are refused. What the paper publishes of the same model, data,
    variant and length stands in a table beside ours, in no mean and no figure.

    Example: torchtrain compare runs/full runs/intra runs/anchor --out runs/tables

    Example: torchtrain compare intra=runs/intra-0,runs/intra-1 anchor=runs/anchor-0,runs/anchor-1
    """
    with _one_speaks():
        from torchtrain.evaluation.compare import compare as tables_of
        from torchtrain.evaluation.published import PLACE, load_published
        from torchtrain.evaluation.tables import print_tables, write_tables

        if published is None and not PLACE.is_file():
            print(f"{PLACE} is not here: no published numbers; --published names them", file=sys.stderr)
            tables, facts, measured = tables_of(runs, last)
        else:
            tables, facts, measured = tables_of(runs, last, load_published(published or PLACE))
        print_tables(tables)
        if out is not None:
            folder = resolve("--out", out)
            from torchtrain.evaluation.figures import figures_of

            command = "torchtrain compare " + shlex.join(runs)
            write_tables(tables, facts, folder, command, figures_of(measured))
            print(f"tables in {folder}")


@app.command(name="lm-eval-log")
def lm_eval_log(
    run: Annotated[str, typer.Argument(metavar="RUN", help="what was evaluated, or a folder of results")],
    out: Annotated[Path, typer.Option("--out", help="folder of the log, as lm_eval --output_path")],
    cache: Annotated[Path, typer.Option(help="the suite's cache, where the prompts are")] = Path("cache"),
    last: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="how many of the checkpoints, the last; default: all evaluated")
    ] = None,
) -> None:
    """Write results as lm_eval --output_path --log_samples does: results_DATE.json and samples_TASK_DATE.jsonl.

    It reads what torchtrain evaluate left and measures nothing. Prompts and targets come from the suite's cache.

    Example: torchtrain lm-eval-log runs/demo --out runs/lm-eval
    """
    with _one_speaks():
        from torchtrain.evaluation.lm_eval_log import write_log
        from torchtrain.evaluation.measured import read_measured

        folder, place = resolve("--out", out), resolve("--cache", cache)
        measured = read_measured(run, last)
        written = write_log(measured, folder, place, lambda line: print(line, file=sys.stderr, flush=True))
        print("\n".join(map(str, written)))


@app.command()
def experiment(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML, for example configs/experiments/rope_training.yaml")
    ],
    out: Annotated[Path, typer.Option("--out", help="folder of the runs, new or of the same experiment")],
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="runs at work at a time")] = 1,
    launch: Annotated[
        str, typer.Option(help="what starts a run's processes, for example 'torchrun --standalone --nproc_per_node 8'")
    ] = "",
    stages: Annotated[int | None, typer.Option(min=1, max=MOST, help="stop after so many; default: all")] = None,
    document: Annotated[
        Path | None,
        typer.Option(help="a Markdown file, such as docs/training-experiment.md, whose numbers are made anew"),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="measurements.json of the same experiment elsewhere: what stands there is not run again"),
    ] = None,
    only_report: Annotated[bool, typer.Option("--only-report", help="train and measure nothing")] = False,
) -> None:
    """Train many runs that differ in arithmetic, mask and seed alone, measure each, and tell what made a difference.

    Interrupted, the same command goes on where it stopped. Leaves report.md, effects.svg, measurements.json in --out.

    Example: torchtrain experiment configs/experiments/rope_training.yaml --out runs/rope_training --workers 2
    """
    with _one_speaks():
        from torchtrain.experiment.spec import load_experiment

        asked = load_experiment(file, overrides or [])

        from anchorline.marked import read_marked  # isort: skip
        from torchtrain.experiment.records import read_records
        from torchtrain.experiment.report import PLACE, write_report
        from torchtrain.experiment.running import receive, run_experiment

        folder = resolve("--out", out)
        if document is not None:
            read_marked(document, [PLACE])  # before hours of work
        try:
            launcher = shlex.split(launch)
        except ValueError as error:
            raise UserError(f"--launch {quoted(launch)}: {error}; close what is quoted") from None
        records = None if measured is None else read_records(asked, resolve("--measured", measured))
        if only_report and records is not None:
            receive(asked, folder, records)
        if not only_report:
            run_experiment(
                asked,
                folder,
                workers,
                launcher,
                stages,
                lambda line: print(line, file=sys.stderr, flush=True),
                records,
            )
        print(f"report: {write_report(asked, folder, document)}")


@app.command()
def bench(
    what: Annotated[
        Literal["attention", "step", "memory"], typer.Argument(metavar="WHAT", help="attention, step or memory")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/bench/cpu.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of results; a turn that is over is not measured again")],
    overrides: Overrides = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="an earlier result, such as benchmarks/results/attention-cpu.json: what moved?"),
    ] = None,
) -> None:
    """Measure attention, steps or memory beside what people would use instead: tables, JSON and a figure in --out.

    Only ratios within one run are compared; what gives other numbers is not timed. Exit code 1: with --check, a ratio
    moved by more than the noise that was measured.

    Example: torchtrain bench attention configs/bench/cpu.yaml --out runs/bench attention.lengths=[2048,4096]
    """
    with _one_speaks():
        from torchtrain.bench.config import load_bench

        config = load_bench(file, overrides or [])

        from transformers.utils import logging

        from torchtrain.bench.run import run

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        moved = run(what, config, out, check, lambda line: print(line, file=sys.stderr, flush=True))
        for line in moved:
            print(f"moved     {line}")
        if check is not None:
            print(f"checked   against {check}: {len(moved)} moved")
        print(f"results in {resolve('--out', out)}")
        if moved:
            raise typer.Exit(1)


@contextmanager
def _one_speaks() -> Iterator[None]:
    """Of the processes of a run, let one say why they end."""
    try:
        yield
    except UserError as error:
        rank, message = os.environ.get("RANK", "0"), str(error)
        if rank != "0":
            time.sleep(_SECONDS_BEFORE_SPEAKING)
            message = message if message.startswith("rank ") else f"rank {quoted(rank)[1:-1]}: {message}"
        raise Leave(message, MISTAKE) from None
    except OtherRankFailed as error:
        with _undisturbed():
            time.sleep(_SECONDS_BEFORE_LEAVING)
        raise Leave("", error.code) from None
    except (RankLost, TasksUnfinished) as error:
        raise Leave(str(error), 1) from None
    except Terminated as error:
        raise Leave(str(error), TERMINATED) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("torchtrain", "anchorline"):
            raise
        raise Leave(f"the package {error.name} is not installed: pip install 'anchorline[torch]'", MISTAKE) from None
    except RuntimeError as error:
        if not _is_memory(error):
            raise
        raise MemoryError(one_line(str(error).partition("\n")[0])) from error
    except KeyboardInterrupt:
        raise Leave("" if os.environ.get("RANK", "0") != "0" else "interrupted", INTERRUPTED) from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave SIGTERM unheard: torchrun sends it to who is on the way out, too, and would be told of another end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_memory(error: RuntimeError) -> bool:
    """Whether torch got no memory: of a GPU it has a class of its own, of the host a text."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def main() -> None:
    """Entry point of the command `torchtrain`."""
    app()


if __name__ == "__main__":
    main()
