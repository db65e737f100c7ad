"""What datatrove runs for `torchtrain prepare`: a block that reads a task's records, one that writes its shard, and who
runs them.

datatrove hands out tasks, on this machine, by Slurm or by Ray, keeps a log of each and marks those that are done. Its
readers are not used: they drop empty documents without counting them, leave out a line that is not JSON with a line in
a log, and end a file at the first byte that is not UTF-8 (datatrove 0.10.1, `readers/base.py`, `readers/jsonl.py`).
Here a bad record is named and counted (`torchtrain.data.corpus`).
"""

import io
import multiprocessing
import os
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datatrove.data import Document as PipelineDocument
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import PARTIAL, commit
from torchtrain.config import DataConfig, PrepareConfig, Source
from torchtrain.data.corpus import FAILURES, BadRecord, Document, Task, read
from torchtrain.data.writer import Tokeniser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BAD, _DOMAIN = "bad_record", "domain"  # in the metadata of a document


class ReadRecords(PipelineStep):
    """Yields the records of a task's part of a source; a bad one as a document without text, with its reason."""

    name = "records"
    type = "reader"

    def __init__(self, sources: Sequence[Source], tasks: Sequence[Task]) -> None:
        super().__init__()
        self.sources, self.tasks = list(sources), list(tasks)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        """Yield them in their order."""
        task = self.tasks[rank]
        for part in task.parts or (None,):
            for record in read(self.sources[task.source], part):
                if isinstance(record, BadRecord):
                    self.stat_update("bad records")
                    metadata = {_DOMAIN: record.domain, _BAD: record.reason}
                    yield PipelineDocument(text="", id=record.where, metadata=metadata)
                else:
                    yield PipelineDocument(text=record.text, id=record.where, metadata={_DOMAIN: record.domain})


class WriteShard(PipelineStep):
    """Tokenises documents into `FOLDER/NUMBER`, which exists only when it is whole, whoever else does the same task.

    Args:
        folder: of the shards.
        data: settings.
        tasks: all of them.
        tokenizer: a fast tokenizer.
        one_thread: leave the other cores to other tasks.
    """

    name = "shard"
    type = "writer"

    def __init__(
        self,
        folder: Path,
        data: DataConfig,
        tasks: Sequence[Task],
        tokenizer: "PreTrainedTokenizerFast",
        one_thread: bool,
    ) -> None:
        super().__init__()
        self.folder, self.data, self.tasks, self.tokenizer = folder, data, list(tasks), tokenizer
        self.one_thread = one_thread

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """What all tasks of a process share: making it reads the tokenizer's whole vocabulary."""
        return Tokeniser(self.data, self.tokenizer)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of a task, unless it is there.

        Raises:
            UserError: the source breaks off, or the shard cannot be written.
        """
        final = self.folder / f"{rank:05d}"
        if final.exists():
            return
        if self.one_thread:
            _use_one_thread()
        try:
            self._write(data, rank, final)
        except Exception as error:
            if isinstance(error, OSError):
                error = UserError(f"{quoted(self.folder.parent)} cannot be written: {disk_fault(error)}")
            with suppress(OSError):  # the missing shard says enough
                failures = self.folder.parent / FAILURES
                failures.mkdir(exist_ok=True)
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                (failures / f"{rank:05d}").write_text(kind + one_line(error) + "\n", encoding="utf-8")
            raise error from None

    def _write(self, documents: Iterator[PipelineDocument], rank: int, final: Path) -> None:
        partial = final.with_name(f"{final.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{PARTIAL}")
        partial.mkdir(parents=True)
        try:
            with self.tokeniser.writer(partial) as writer:
                source = self.data.sources[self.tasks[rank].source]
                count = self.tokeniser.add(source, map(_record_of, documents), writer)
                self.stat_update("tokens", value=writer.tokens)
                writer.finish("", [count])
            try:
                commit(partial, final)
            except OSError:
                if not final.exists():  # else another process was first, and its shard is the same
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _record_of(document: PipelineDocument) -> Document | BadRecord:
    """Return what `ReadRecords` made a document of."""
    domain = document.metadata[_DOMAIN]
    if _BAD in document.metadata:
        return BadRecord(document.id, document.metadata[_BAD], domain)
    return Document(document.text, domain, document.id)


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's, but it notices a process that dies: datatrove's own pool waits for ever for one that was killed."""

    lost_worker = False

    def run(self, on_task: Callable[[], None] = lambda: None) -> None:
        """Run every task that is not done; one that fails leaves the others alone. `on_task` is called after each."""
        ranks = self.get_incomplete_ranks()
        if self.workers == 1 or len(ranks) == 1:
            for rank in ranks:
                with suppress(UserError):
                    _run_quietly(self, rank)
                on_task()
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "transformers"])
        workers = min(self.workers, len(ranks))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(self,)) as pool:
            try:
                for future in as_completed([pool.submit(_run_in_worker, rank) for rank in ranks]):
                    with suppress(UserError):
                        future.result()
                    on_task()
            except BrokenProcessPool:
                self.lost_worker = True
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


_executor: PipelineExecutor  # of a worker process, sent once


def _begin_worker(executor: PipelineExecutor) -> None:
    global _executor
    _executor = executor
    _use_one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _run_in_worker(rank: int) -> None:
    _run_quietly(_executor, rank)


def _end_with_parent() -> None:
    """End this worker when the process that started it is gone, even by SIGKILL. The fork server ends last."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers has no other switch


def _run_quietly(executor: PipelineExecutor, rank: int) -> None:
    """Run a task. What datatrove says of it is in its log alone."""
    with redirect_stderr(io.StringIO()):
        executor._run_for_rank(rank, local_rank=1)


class SlurmExecutor(SlurmPipelineExecutor):
    """datatrove's, without the options that were not set."""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """Return the options of sbatch."""
        return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    def script(self) -> str:
        """Return the script that `run` gives to sbatch. Makes the folder for Slurm's logs."""
        jobs = len(self.get_incomplete_ranks())
        most = jobs if self.max_array_size == -1 else min(jobs, self.max_array_size)
        pickled = self.logging_dir.resolve_paths("executor.pik")
        return self.get_launch_file_contents(
            self.get_sbatch_args(most), f"srun  -l -n {self.nodes_per_task} launch_pickled_pipeline {pickled}"
        )


def make_executor(
    settings: PrepareConfig, pipeline: list[PipelineStep], tasks: int, workers: int, logs: Path, name: str
) -> PipelineExecutor:
    """Return what runs a pipeline, as `prepare.executor` says.

    Args:
        settings: the section `prepare`.
        pipeline: the blocks.
        tasks: how many there are.
        workers: at work at a time, on this machine.
        logs: where datatrove keeps its marks and logs: a folder that all workers see.
        name: of Slurm's job.
    """
    if settings.executor == "local":
        return LocalExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=str(logs))
    spread = {"tasks": tasks, "workers": settings.workers or -1, "logging_dir": str(logs)}
    if settings.executor == "ray":
        return RayPipelineExecutor(pipeline, mem_per_cpu_gb=settings.memory, **spread)
    slurm = settings.slurm
    activate = Path(sys.prefix) / "bin" / "activate"
    return SlurmExecutor(
        pipeline,
        time=slurm.time,
        partition=slurm.partition,  # type: ignore[arg-type] - None is taken out again
        qos=slurm.qos,  # type: ignore[arg-type]
        mem_per_cpu_gb=settings.memory,
        job_name=name,
        env_command=slurm.environment or (f"source {activate}" if activate.exists() else None),  # type: ignore[arg-type]
        sbatch_args=dict(slurm.sbatch),
        **spread,
    )
