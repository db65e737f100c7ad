"""What `torchtrain plan` answers: memory, tokens, FLOPs, time, what a run writes, and what to change if need be."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anchorline.errors import UserError, quoted
from torchtrain.config import Config
from torchtrain.distributed.layout import check_layout
from torchtrain.planning import budget
from torchtrain.planning.budget import GIB, Memory, Shapes, Work
from torchtrain.planning.saves import count_saves, describe_schedule


@dataclass(frozen=True)
class Machine:
    """What a run would have: processes, each with a GPU of its own; memory in bytes."""

    processes: int
    gpu: int  # of each
    hosts: int | None  # of all hosts together; None: not said


@dataclass(frozen=True)
class Pace:
    """How fast a run would be, said in one of three ways or not at all."""

    tokens_per_second: float | None = None  # of all processes together
    measured: Path | None = None  # a run's folder
    gpu: str | None = None
    mfu: float | None = None  # of the GPU's peak

    def __post_init__(self) -> None:
        """Raise UserError where it is said in more ways than one, or in half of one."""
        ways = sum(way is not None for way in (self.tokens_per_second, self.measured, self.mfu))
        if ways > 1:
            raise UserError("--tokens-per-second, --measured, --gpu with --mfu: give one of the three")
        if self.mfu is not None and self.gpu is None:
            raise UserError(f"--mfu {self.mfu:g}: give --gpu, too, whose peak it is a share of")
        if self.gpu is not None and self.mfu is None:
            raise UserError(f"--gpu {quoted(self.gpu)}: give --mfu, too, the share of its peak that a run reaches")
        if self.measured is not None and not self.measured.is_dir():
            raise UserError(f"--measured {quoted(self.measured)}: there is no such folder; give a run's")

    def seconds(self, work: Work, processes: int) -> float | None:
        """Return how long a run takes, or None where it is not said.

        Raises:
            UserError: of the folder, or of the GPU's name.
        """
        if self.tokens_per_second is not None:
            return work.tokens / self.tokens_per_second
        if self.measured is not None:
            return budget.seconds_like(work, self.measured, processes)
        if self.mfu is not None and self.gpu is not None:
            return budget.seconds_by_mfu(work, self.gpu, self.mfu, processes)
        return None


def tell_plan(config: Config, machine: Machine, pace: Pace, document_tokens: int | None) -> bool:
    """Print what a run needs; return whether it fits.

    Raises:
        UserError: as `set_up` of what config.json says, the layout, and `Pace.seconds`.
    """
    check_layout(config, machine.processes)
    shapes = Shapes(budget.model_config(config))
    memory = budget.memory(config, shapes, machine.processes)
    work = budget.work(config, shapes, document_tokens)
    seconds = pace.seconds(work, machine.processes)
    Console().print(_memory_table(memory, machine))
    _tell_work(config, shapes, work, seconds)
    over = machine.hosts is not None and memory.hosts > machine.hosts
    if over:
        when = "loads" if memory.host_load >= memory.host else "trains"
        print(f"hosts     hold {memory.hosts / GIB:.1f} GiB while it {when}, more than --host-memory")
    if memory.gpu > machine.gpu:
        _tell_remedies(config, shapes, memory, machine)
        return False
    if over:
        return False
    share = memory.gpu / machine.gpu
    print(f"fits      {share:.0%} of the memory; the CUDA context, NCCL and fragments come on top")
    found = budget.fastest(config, shapes, machine.processes, machine.gpu)
    assert found is not None, "the config as it is fits"
    changes, least = found
    print(f"fastest   {' '.join(changes)}: {least.gpu / GIB:.1f} GiB" if changes else "fastest   as it is")
    return True


def _tell_work(config: Config, shapes: Shapes, work: Work, seconds: float | None) -> None:
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
    print(f"time      {_time_line(seconds, bound)}")
    bytes_each = shapes.model(config.model).dtype.itemsize
    saves = count_saves(config.save, config.train, work.weights, work.trained, bytes_each)
    gib = f"{saves.checkpoint / GIB:,.1f} GiB each, {describe_schedule(config.save, config.train)}"
    print(f"saves     {saves.checkpoints:,} checkpoints of {gib}")
    print(f"models    {saves.models:,} of {saves.model / GIB:,.1f} GiB each")
    written, most = (f"{size / GIB:,.1f} GiB" for size in (saves.written, saves.most))
    print(f"disk      {written} written in all, up to {most} there at a time")


def _tell_remedies(config: Config, shapes: Shapes, memory: Memory, machine: Machine) -> None:
    changes, after = budget.remedies(config, shapes, machine.processes, machine.gpu)
    when = " while it loads" if memory.load > memory.step else ""
    print(f"too much  {(memory.gpu - machine.gpu) / GIB:.1f} GiB more than there is{when}")
    verdict = "fits" if after.gpu <= machine.gpu else "is still too much: take more or larger GPUs"
    if machine.hosts is not None and after.hosts > machine.hosts:
        verdict += f"; the hosts would hold {after.hosts / GIB:.1f} GiB, more than --host-memory"
    print(f"change    {' '.join(changes) or 'nothing helps'}: {after.gpu / GIB:.1f} GiB, {verdict}")


def _memory_table(memory: Memory, machine: Machine) -> Table:
    """Return what each GPU holds, and the host if it holds anything."""
    table = Table(title=f"Memory of each GPU ({machine.processes} of {machine.gpu / GIB:g} GiB)")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for name in ("weights", "gradients", "optimizer", "activations"):
        table.add_row(name, f"{getattr(memory, name) / GIB:.2f}")
    table.add_section()
    table.add_row("all", f"{memory.step / GIB:.2f}")
    table.add_row("while loading", f"{memory.load / GIB:.2f}")
    table.add_row("host memory, all processes, while loading", f"{memory.host_load / GIB:.2f}")
    if memory.host:
        table.add_row("host memory, all processes, while training", f"{memory.host / GIB:.2f}")
    return table


def _time_line(seconds: float | None, bound: str) -> str:
    """Return an expected time in hours, or how to get one."""
    if seconds is None:
        return "unknown: give --tokens-per-second, --measured RUN, or --gpu and --mfu"
    return f"{bound}{seconds / 3600:,.1f} hours"
