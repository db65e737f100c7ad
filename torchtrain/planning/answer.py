"""What `torchtrain plan` prints: memory, tokens, FLOPs, time, what a run writes, and which settings fit."""

from dataclasses import dataclass

from rich.table import Table

from anchorline.errors import UserError, print, quoted
from anchorline.terminal import Console
from torchtrain.config import Config
from torchtrain.distributed.layout import check_layout
from torchtrain.modeling.source import find_published
from torchtrain.planning.budget import GIB, RESERVE, Memory, Shapes, count_memory, model_config, propose
from torchtrain.planning.work import Documents, Work, count_work, describe_saves, read_documents
from torchtrain.training.flops import peak_of


@dataclass(frozen=True)
class Machine:
    """What a run would have: processes, each with a GPU of its own or none; memory in bytes."""

    processes: int
    each: int  # of each GPU; of a process without one
    hosts: int | None  # of all hosts together; None: the user did not say
    cpu: bool = False

    def needed(self, memory: Memory) -> int:
        """Return what one process needs, with what no shape shows."""
        return memory.of_process(self.processes, self.cpu) + (0 if self.cpu else RESERVE)


@dataclass(frozen=True)
class Pace:
    """How fast a run would be: tokens a second, or a share of a GPU's peak; or nothing is known."""

    tokens_per_second: float | None = None  # of all processes together
    gpu: str | None = None
    mfu: float | None = None  # of the GPU's peak

    def __post_init__(self) -> None:
        if self.tokens_per_second is not None and self.mfu is not None:
            raise UserError("--tokens-per-second, --gpu with --mfu: give one of the two")
        if (self.mfu is None) != (self.gpu is None):
            raise UserError(
                "--gpu, --mfu: give both, or neither: one is the share of the other's peak that a run reaches"
            )
        if self.gpu is not None and peak_of(self.gpu) is None:
            raise UserError(
                f"--gpu {quoted(self.gpu)}: no peak is known; give --tokens-per-second or a name such as A100, H100"
            )

    def seconds(self, work: Work, processes: int) -> float | None:
        """Return how long a run takes; None: nothing is known."""
        if self.tokens_per_second is not None:
            return work.tokens / self.tokens_per_second
        peak = None if self.gpu is None else peak_of(self.gpu)
        return None if peak is None or self.mfu is None else work.flops / (self.mfu * peak * processes)


def print_plan(config: Config, machine: Machine, pace: Pace, document_tokens: float | None) -> bool:
    """Print what a run needs; return whether it fits. Raises UserError: the config is of no run, or has no steps."""
    if config.train.epochs is not None:
        raise UserError(
            f"train.epochs {config.train.epochs:g}: a plan packs no documents, so it takes steps; a run says their "
            "number before the first: train.steps=N"
        )
    check_layout(config.distributed, config.train, machine.processes)
    documents = Documents(document_tokens, "--document-tokens")
    if document_tokens is None:
        documents = read_documents(config.data.prepared, config.pack.sequence_length)
    shapes = Shapes(model_config(config))
    memory = count_memory(config, shapes, machine.processes)
    work = count_work(config, shapes.model(config.model), documents)
    seconds = pace.seconds(work, machine.processes)
    Console().print(_memory_table(memory, machine))
    _print_work(config, shapes, work, documents, seconds)
    over = machine.hosts is not None and memory.hosts > machine.hosts
    if over:
        when = "loads" if memory.host_load >= memory.host else "trains"
        print(f"hosts     hold {memory.hosts / GIB:.1f} GiB while it {when}, more than --host-memory")
    fits = machine.needed(memory) <= machine.each
    if fits and over:
        return False
    changes, after = propose(config, shapes, machine.processes, machine.each, machine.cpu)
    held = f"{after.of_process(machine.processes, machine.cpu) / GIB:.1f} GiB"
    if fits:
        included = "" if machine.cpu else ", the reserve included"
        print(f"fits      {machine.needed(memory) / machine.each:.0%} of the memory{included}")
        print(f"fastest   {' '.join(changes)}: {held}" if changes else "fastest   as it is")
        return True
    when = " while it loads" if memory.load > memory.step else ""
    print(f"too much  {(machine.needed(memory) - machine.each) / GIB:.1f} GiB more than there is{when}")
    larger = "processes or more memory" if machine.cpu else "or larger GPUs"
    verdict = "fits" if machine.needed(after) <= machine.each else f"is still too much: take more {larger}"
    if machine.hosts is not None and after.hosts > machine.hosts:
        verdict += f"; the hosts would hold {after.hosts / GIB:.1f} GiB, more than --host-memory"
    print(f"change    {' '.join(changes) or 'nothing helps'}: {held}, {verdict}")
    return False


def _print_work(config: Config, shapes: Shapes, work: Work, documents: Documents, seconds: float | None) -> None:
    if find_published(config.model.source) is not None:
        print(f"model     the shapes of {config.model.source} come with torchtrain; the hub was not asked")
    if config.model.fused == "compile":
        print(f"fused     activations are counted as without model.fused {config.model.fused}, which keeps fewer")
    trained = "" if config.model.lora is None else f", {work.trained:,} of them trained"
    how = documents.source if config.pack.base_variant.separates else "full attention"
    hours = "unknown: give --tokens-per-second, or --gpu and --mfu"
    print(f"weights   {work.weights:,}{trained}")
    print(f"tokens    {work.tokens:,} in {config.train.steps:,} steps")
    print(f"attention {work.live_share:.1%} of a row's pairs are live ({how})")
    print(f"FLOPs     {work.flops:.3g}")
    print(f"time      {hours if seconds is None else f'{seconds / 3600:,.1f} hours'}")
    print(describe_saves(config.save, config.train, work, shapes.model(config.model).dtype.itemsize))


def _memory_table(memory: Memory, machine: Machine) -> Table:
    what = "process" if machine.cpu else "GPU"
    table = Table(title=f"Memory of each {what} ({machine.processes} of {machine.each / GIB:g} GiB)")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for name in ("weights", "gradients", "optimizer", "activations"):
        table.add_row(name, f"{getattr(memory, name) / GIB:.2f}")
    beside = memory.host // machine.processes if machine.cpu else RESERVE
    reserve = "reserve: CUDA context, NCCL, fragments (none with --cpu)"
    table.add_row("copies to save and export" if machine.cpu else reserve, f"{beside / GIB:.2f}")
    table.add_section()
    table.add_row("all", f"{(memory.step + beside) / GIB:.2f}")
    table.add_row("while loading", f"{memory.load / GIB:.2f}")
    if machine.cpu:
        return table
    table.add_row("host memory, all processes, while loading", f"{memory.host_load / GIB:.2f}")
    if memory.host:
        table.add_row("host memory, all processes, while training", f"{memory.host / GIB:.2f}")
    return table
