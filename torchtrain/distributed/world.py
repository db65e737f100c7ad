"""The processes of a run and this one's place among them.

Consecutive ranks share a row: with 4 processes and a sequence-parallel degree of 2, ranks 0 and 1 work on one row, 2
and 3 on another. `size // sequence_parallel` rows are in work at a time (data parallelism).

torchrun tells each process its place in the environment. Without it there is one process, and a process group only
where DeepSpeed's engine asks for one.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from anchorline.errors import UserError, disk_fault, one_line, quoted, quoted_reason
from torchtrain.config import Config
from torchtrain.distributed.heartbeat import heartbeat
from torchtrain.distributed.meeting import obey_signals
from torchtrain.errors import OtherRankFailed, RankLost

_Value = TypeVar("_Value")
# How long processes wait for one another: longer than an export or a save on a slow disk. `heartbeat` finds a process
# that is gone within a minute.
PATIENCE = timedelta(minutes=120)


class _Agreed(UserError):  # noqa: N818
    """A mistake that all ranks know of: the others have left, and wait for no word of it."""


@dataclass(frozen=True)
class World:
    """This process's place. Made by `join`; `ALONE` is a process that has no other."""

    rank: int = 0
    size: int = 1
    sequence_parallel: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: dist.ProcessGroup | None = None  # process group of numbers on the host; None: the default one takes them
    group: dist.ProcessGroup | None = None  # of what ranks tell one another; None: the default one
    aside: dist.ProcessGroup | None = None  # of a thread that works while the program goes on; None: there is none
    whole_documents: bool = False  # ranks that share a row have whole documents of it, where they can

    @property
    def data_parallel(self) -> int:
        """How many groups of ranks work on rows of their own."""
        return self.size // self.sequence_parallel

    @property
    def data_rank(self) -> int:
        """Which of these groups this rank belongs to."""
        return self.rank // self.sequence_parallel

    @property
    def sequence_rank(self) -> int:
        """Which part of the row is this rank's."""
        return self.rank % self.sequence_parallel

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up each value over all ranks, in float64: counts below 2 ** 53 stay exact.

        They go from host to host: no rank waits for its device.
        """
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.host)
        return total.tolist()

    def for_threads(self) -> "World":
        """Return the place of a thread that works while the program goes on: what it tells other ranks' threads of its
        kind never meets what the program tells them.
        """
        assert self.size == 1 or self.aside is not None, "joined without a group for it"
        return replace(self, group=self.aside, host=self.aside, device=torch.device("cpu"))

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def gather(self, own: _Value) -> list[_Value]:
        """Return what every rank has, by rank."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def from_first(self, value: _Value) -> _Value:
        """Return what rank 0 gives: of a disk that is shared, another node may see what was there a while ago."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a tensor on all ranks with that of one."""
        if self.size > 1:
            dist.broadcast(tensor, src=rank)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; a mistake or a fault of a disk that any of them finds stops all of them.

        Raises:
            UserError: on the lowest rank that found one; its rank is named unless all found the same.
            OtherRankFailed: on the others, which have nothing to say.
        """
        mistake = None
        try:
            yield
        except _Agreed:  # in a block like this within this one
            raise
        except UserError as error:
            mistake = error
        except OSError as error:
            mistake = UserError(disk_fault(error))
            mistake.__cause__ = error
        if self.size == 1:
            if mistake is not None:
                raise mistake
            return
        told = self.gather(None if mistake is None else str(mistake))
        speaker = next((rank for rank, text in enumerate(told) if text is not None), None)
        if speaker is None:
            return
        if speaker != self.rank:
            raise OtherRankFailed(f"rank {speaker} stopped")
        text = told[speaker]
        assert text is not None
        raise _Agreed(text if all(other == text for other in told) else f"rank {speaker}: {text}")


ALONE = World()


def here() -> tuple[int, int, int]:
    """Return (rank, size, local rank) as torchrun gives them; (0, 1, 0) without it.

    Raises:
        UserError: one of the variables is not such a number, or where the processes meet is not said or cannot be
            found.
    """
    size = _number("WORLD_SIZE", 1, 1, _MOST_PROCESSES)
    rank = _number("RANK", 0, 0, size - 1)
    local_rank = _number("LOCAL_RANK", 0, 0, size - 1)
    if size > 1:
        _number("MASTER_PORT", None, 1, 65_535)
        address = os.environ.get("MASTER_ADDR", "")
        try:
            socket.getaddrinfo(address or None, os.environ["MASTER_PORT"], type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # a name that is too long for a network is none
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"MASTER_ADDR {quoted(address)}: {one_line(reason)}; {_ADVICE}") from None
        if not address:
            raise UserError(f"MASTER_ADDR: missing, and WORLD_SIZE is {size}; {_ADVICE}")
    return rank, size, local_rank


def here_beside() -> int:
    """Return how many processes of the run are on this machine, as torchrun gives it; without it, one for each GPU.

    Raises:
        UserError: the variable is not such a number.
    """
    most = max(1, min(here()[1], torch.cuda.device_count()))
    return _number("LOCAL_WORLD_SIZE", most, 1, _MOST_PROCESSES)


_ADVICE = "start processes with torchrun, which sets it"
_MOST_PROCESSES = 2**16


def _number(name: str, default: int | None, least: int, most: int) -> int:
    """Return what a variable of the environment says, or the default where it is not set."""
    said = os.environ.get(name)
    if said is None and default is not None:
        return default
    if said is None or not (said.isascii() and said.isdecimal() and len(said) < 10) or not least <= int(said) <= most:
        raise UserError(f"{name} {quoted(said)}: no whole number from {least} to {most}; {_ADVICE}")
    return int(said)


@contextmanager
def join(config: Config) -> Iterator[World]:
    """Join the other processes, if there are any, for as long as the block lasts.

    NCCL where there is CUDA (each process its own GPU), gloo anywhere else. On CUDA the allocator may grow its segments
    (`expandable_segments`), which leaves fewer gaps, unless the environment already configures it.

    Raises:
        UserError: more processes on this machine than GPUs; or they cannot meet.
        RankLost: a process is gone, found when this one waited for it.
    """
    rank, size, local_rank = here()
    # transformers imports DeepSpeed where it is installed, and without this it warns of what it found.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    cuda = torch.cuda.is_available()
    check_driver()
    if cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; "
            f"give torchrun --nproc_per_node {torch.cuda.device_count()}"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    if size == 1 and config.distributed.zero_stage == 0:
        yield World(device=device)
        return
    backend, host, aside = "nccl" if cuda else "gloo", None, None
    patience = PATIENCE
    if size > 1:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            with obey_signals(rank, place):
                dist.init_process_group(backend, timeout=patience, device_id=device if cuda else None)
                host = _join_hosts(patience) if cuda else None
                aside = _join_hosts(patience) if config.save.asynchronous else None
        except dist.DistError as error:
            reason = quoted_reason(str(error).partition("\n")[0])
            raise UserError(
                f"MASTER_ADDR and MASTER_PORT, {quoted(place)[1:-1]}: the processes cannot meet there: {reason}; "
                "choose another port (torchrun --master_port)"
            ) from None
    else:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    shared, whole = config.distributed.sequence_parallel, config.distributed.share == "documents"
    world = World(rank, size, shared, device, host, aside=aside, whole_documents=whole)
    ended = False
    try:
        with heartbeat(rank, size):
            try:
                yield world
            except RuntimeError as error:
                if not _is_lost(error):
                    raise
                raise RankLost(f"rank {rank}: stopped, because another process of the run is gone") from error
        ended = True
    finally:
        # Where something is wrong the others may still wait in a collective, and this would wait for them.
        if ended or size == 1:
            dist.destroy_process_group()


def check_driver() -> None:
    """Refuse to train on the CPU where this machine has NVIDIA GPUs that torch's build cannot use.

    Raises:
        UserError: the driver is older than torch's CUDA wheels need, or does not answer.
    """
    if torch.version.cuda is None or torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    if any(Path("/dev").glob("nvidia[0-9]*")):
        raise UserError(
            f"CUDA: this machine has NVIDIA GPUs, and torch {torch.__version__} cannot use them; install a driver for "
            f"CUDA {torch.version.cuda} (torch 2.13's wheels need r580), or set CUDA_VISIBLE_DEVICES= to train on the "
            "CPU"
        )


def _join_hosts(patience: timedelta) -> Any:  # torch: a group, or a number for who is not in it
    """Make a group for what lies on the host: NCCL does not take it, and a thread must not use the program's group."""
    try:
        return dist.new_group(backend="gloo", timeout=patience)
    except RuntimeError as error:  # of gloo, where a host's name leads to an address that others cannot reach
        if isinstance(error, dist.DistError):
            raise
        raise UserError(
            f"GLOO_SOCKET_IFNAME {quoted(os.environ.get('GLOO_SOCKET_IFNAME'))}: the hosts cannot connect: "
            f"{quoted_reason(str(error).partition(chr(10))[0])}; set it to the network interface that they share"
        ) from None


def _is_lost(error: RuntimeError) -> bool:
    """Whether a collective failed because a process did not take part: NCCL has a class of its own, gloo a text."""
    return isinstance(error, dist.DistError) or ("gloo" in str(error) and "onnection" in str(error))
