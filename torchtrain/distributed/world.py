"""The processes of a run, and the rank of this one, as torchrun's environment has it.

Consecutive ranks share a row: with 4 processes and a sequence-parallel degree of 2, ranks 0 and 1 work on one row,
ranks 2 and 3 on another (data parallelism). Without torchrun there is a process group only where DeepSpeed needs one.
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
from torch.distributed.rendezvous import rendezvous

from anchorline.errors import UserError, disk_fault, one_line, quoted, quoted_reason
from torchtrain.config import DistributedConfig
from torchtrain.distributed.heartbeat import heartbeat
from torchtrain.distributed.signals import exit_on_signal
from torchtrain.errors import OtherRankFailed, RankLost

_Value = TypeVar("_Value")
# Timeout of a collective: longer than an export or a save on a slow disk. `heartbeat` finds a lost process in a minute.
TIMEOUT = timedelta(minutes=120)


class _SharedError(UserError):
    """A mistake that all ranks know of: no other rank waits for a report of it."""


@dataclass(frozen=True)
class World:
    """The rank of this process and its process groups. `join` makes it; `ALONE` is a process without others."""

    rank: int = 0
    size: int = 1
    sequence_parallel: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # Process groups; None: the default group.
    cpu_group: dist.ProcessGroup | None = None  # for tensors in host memory
    object_group: dist.ProcessGroup | None = None  # for Python objects
    thread_group: dist.ProcessGroup | None = None  # for a background thread; None: there is none
    whole_documents: bool = False  # ranks that share a row take whole documents of it, where they can

    @property
    def data_parallel(self) -> int:
        """The number of groups of ranks that work on rows of their own."""
        return self.size // self.sequence_parallel

    @property
    def data_rank(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.sequence_parallel

    @property
    def sequence_rank(self) -> int:
        """The number of this rank in its group."""
        return self.rank % self.sequence_parallel

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all ranks in float64 on the host: counts below 2 ** 53 are exact."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.cpu_group)
        return total.tolist()

    def for_threads(self) -> "World":
        """Return the world for a background thread. Its messages never mix with those of the program."""
        assert self.size == 1 or self.thread_group is not None, "joined without a group for threads"
        group = self.thread_group
        return replace(self, object_group=group, cpu_group=group, device=torch.device("cpu"))

    def gather(self, own: _Value) -> list[_Value]:
        """Return the value of every rank, in the order of ranks."""
        if self.size == 1:
            return [own]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, own, group=self.object_group)
        return values

    def from_first(self, value: _Value) -> _Value:
        """Return rank 0's value. On a shared disk another node may see an older state."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.object_group, device=self.device)
        return box[0]

    def give(self, tensor: torch.Tensor, rank: int) -> None:
        """Broadcast a tensor from one rank into the same tensor of all ranks."""
        if self.size > 1:
            dist.broadcast(tensor, src=rank)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks, and stop all ranks if one of them finds a user's mistake or a fault of a disk.
        Raises UserError: on the lowest rank that found one. The message names the rank unless all ranks found the same.
        Raises OtherRankFailed: on the other ranks.
        """
        mistake = None
        try:
            yield
        except _SharedError:  # from a `together` within this one
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
        messages = self.gather(None if mistake is None else str(mistake))
        failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if not failed:
            return
        rank, message = failed[0]
        if rank != self.rank:
            raise OtherRankFailed(f"rank {rank} stopped")
        raise _SharedError(message if messages == [message] * self.size else f"rank {rank}: {message}")


ALONE = World()


def read_ranks() -> tuple[int, int, int]:
    """Return torchrun's (rank, world size, local rank), or (0, 1, 0). Raises UserError: a variable is wrong."""
    size = _read_variable("WORLD_SIZE", 1, 1, _MOST_PROCESSES)
    rank = _read_variable("RANK", 0, 0, size - 1)
    local_rank = _read_variable("LOCAL_RANK", 0, 0, size - 1)
    if size > 1:
        _read_variable("MASTER_PORT", None, 1, 65_535)
        address = os.environ.get("MASTER_ADDR", "")
        try:
            socket.getaddrinfo(address or None, os.environ["MASTER_PORT"], type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"MASTER_ADDR {quoted(address)}: {one_line(reason)}; {_ADVICE}") from None
        if not address:
            raise UserError(f"MASTER_ADDR: missing, and WORLD_SIZE is {size}; {_ADVICE}")
    return rank, size, local_rank


def read_local_size() -> int:
    """Return the number of the run's processes on this machine as torchrun sets it; without torchrun, one for each GPU.
    Raises UserError: the variable is not such a number.
    """
    default = max(1, min(read_ranks()[1], torch.cuda.device_count()))
    return _read_variable("LOCAL_WORLD_SIZE", default, 1, _MOST_PROCESSES)


_ADVICE = "start processes with torchrun, which sets it"
_MOST_PROCESSES = 2**16


def _read_variable(name: str, default: int | None, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 10) or not least <= int(text) <= most:
        raise UserError(f"{name} {quoted(text)}: no whole number from {least} to {most}; {_ADVICE}")
    return int(text)


@contextmanager
def join(distributed: DistributedConfig, for_threads: bool = False) -> Iterator[World]:
    """Connect to the other processes, if there are any, while the block runs.

    The backend is NCCL where there is CUDA (one GPU for each process), gloo anywhere else. On CUDA the allocator gets
    `expandable_segments`, which leaves fewer gaps, unless the environment already configures the allocator.

    for_threads: whether `World.for_threads` will be called.
    Raises UserError: more processes on this machine than GPUs, or the processes cannot connect.
    Raises RankLost: a collective failed because another process is gone.
    """
    rank, size, local_rank = read_ranks()
    cuda = torch.cuda.is_available()
    # transformers imports DeepSpeed where it is installed. DeepSpeed prints a warning unless this is set.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
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
    if size == 1 and distributed.zero_stage == 0:
        yield World(device=device)
        return
    backend, cpu_group, thread_group = "nccl" if cuda else "gloo", None, None
    if size > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            with exit_on_signal(rank, address):
                dist.init_process_group(
                    backend,
                    store=_connect_store(rank, size),
                    rank=rank,
                    world_size=size,
                    timeout=TIMEOUT,
                    device_id=device if cuda else None,
                )
                cpu_group = _make_cpu_group() if cuda else None
                thread_group = _make_cpu_group() if for_threads else None
        except dist.DistError as error:
            reason = quoted_reason(str(error).partition("\n")[0])
            raise UserError(
                f"MASTER_ADDR and MASTER_PORT, {quoted(address)[1:-1]}: the processes cannot connect there: {reason}; "
                "choose another port (torchrun --master_port)"
            ) from None
    else:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    world = World(
        rank,
        size,
        distributed.sequence_parallel,
        device,
        cpu_group,
        thread_group=thread_group,
        whole_documents=distributed.share == "documents",
    )
    succeeded = False
    try:
        with heartbeat(rank, size):
            try:
                yield world
            except RuntimeError as error:
                if not _is_lost_connection(error):
                    raise
                raise RankLost(f"rank {rank}: stopped, because another process of the run is gone") from error
        succeeded = True
    finally:
        # After an error the other ranks may still wait in a collective, and destroying the group would wait for them.
        if succeeded or size == 1:
            dist.destroy_process_group()


def _connect_store(rank: int, size: int) -> dist.Store:
    """Return the store through which the processes connect, with keys of its own for each restart by torchrun.

    torchrun's static rendezvous keeps one store over its restarts. Without a prefix the process that starts first would
    read the address of one that is dead. Every later group, DeepSpeed's too, takes its store from this one.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=TIMEOUT))
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def check_driver() -> None:
    """Refuse to train on a CPU beside NVIDIA GPUs. Raises UserError: no driver, or too old a one for torch's CUDA."""
    if torch.version.cuda is None or torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    if any(Path("/dev").glob("nvidia[0-9]*")):
        raise UserError(
            f"CUDA: this machine has NVIDIA GPUs, and torch {torch.__version__} cannot use them; install a driver for "
            f"CUDA {torch.version.cuda} (torch 2.13's wheels need r580), or set CUDA_VISIBLE_DEVICES= to train on the "
            "CPU"
        )


def _make_cpu_group() -> Any:  # torch's type: a group, or a number for a process that is not in it
    """Make a gloo group for tensors in host memory. NCCL takes none, and a thread must not use the program's group."""
    try:
        return dist.new_group(backend="gloo", timeout=TIMEOUT)
    except RuntimeError as error:  # from gloo, where a host's name leads to an address that other hosts cannot reach
        if isinstance(error, dist.DistError):
            raise
        raise UserError(
            f"GLOO_SOCKET_IFNAME {quoted(os.environ.get('GLOO_SOCKET_IFNAME'))}: the hosts cannot connect: "
            f"{quoted_reason(str(error).partition(chr(10))[0])}; set it to the network interface that they share"
        ) from None


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because a process is gone: NCCL raises a class of its own, gloo has only a text."""
    return isinstance(error, dist.DistError) or ("gloo" in str(error) and "onnection" in str(error))
