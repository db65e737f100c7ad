"""One task of a preparation: it reads its parts of the corpus and writes a shard, in this process or in others here."""

import multiprocessing
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline.environment import end_with_parent
from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import PARTIAL, commit
from torchtrain.config import DataConfig
from torchtrain.data.corpus import Record, Task, read
from torchtrain.data.writer import StoreWriter, Tokeniser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARDS, FAILURES = "shards", "failures"  # folders of `MakeShard.work`


@dataclass(eq=False)
class MakeShard:
    """Reads a task's records and writes its shard, also as a block of datatrove's."""

    work: Path
    data: DataConfig
    tasks: Sequence[Task]
    tokenizer: "PreTrainedTokenizerFast"
    one_thread: bool  # of the tokenizer

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """What all tasks of a process share: making it reads the tokenizer's whole vocabulary."""
        return Tokeniser(self.data, self.tokenizer)

    def records(self, task: Task) -> Iterator[Record]:
        """Yield what a task reads."""
        for part in task.parts or (None,):
            yield from read(self.data.sources[task.source], part)

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of task `rank` unless it exists, or why not into `failures`. Raises UserError: the same."""
        final = self.work / SHARDS / f"{rank:05d}"
        if final.exists():
            return
        if self.one_thread:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers has no other switch
        try:
            self._write(self.tasks[rank], final)
        except Exception as error:
            if isinstance(error, OSError):
                error = UserError(f"{quoted(self.work)} cannot be written: {disk_fault(error)}")
            with suppress(OSError):  # the missing shard says enough
                failures = self.work / FAILURES
                failures.mkdir(exist_ok=True)
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                (failures / final.name).write_text(kind + one_line(error) + "\n", encoding="utf-8")
            raise error from None

    def _write(self, task: Task, final: Path) -> None:
        """Write into a folder of this process alone, then rename it: another process may do the same task."""
        partial = final.with_name(f"{final.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{PARTIAL}")
        try:
            with written(partial, final, self.tokeniser) as writer:
                count = self.tokeniser.add(self.data.sources[task.source], self.records(task), writer)
                writer.finish("", [count])
        except OSError:
            if not final.exists():  # else another process was first, and its shard is the same
                raise


@contextmanager
def written(partial: Path, final: Path, tokeniser: Tokeniser) -> Iterator[StoreWriter]:
    """Yield a writer of a store, which gets its final name when the block has finished it. A failure leaves nothing."""
    partial.mkdir(parents=True)
    try:
        with tokeniser.writer(partial) as writer:
            yield writer
        commit(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run_locally(maker: MakeShard, ranks: Sequence[int], workers: int, on_task: Callable[[], None]) -> bool:
    """Run tasks by processes of this machine. A task that fails leaves the others alone."""
    if workers == 1:
        for rank in ranks:
            with suppress(UserError):
                maker(rank=rank)
            on_task()
        return False
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers"])
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(maker,)) as pool:
        try:
            for future in as_completed([pool.submit(_run_in_worker, rank) for rank in ranks]):
                with suppress(UserError):
                    future.result()
                on_task()
        except BrokenProcessPool:
            return True
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return False


_maker: MakeShard  # of a worker process, sent once


def _begin_worker(maker: MakeShard) -> None:
    global _maker
    _maker = maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()


def _run_in_worker(rank: int) -> None:
    _maker(rank=rank)
