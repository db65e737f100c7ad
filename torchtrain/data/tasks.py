"""`torchtrain prepare`: tasks tokenise a corpus, on this machine or on a cluster, and their shards become one store.

Until the store is whole, its files are in the folder `NAME.partial`: `plan.json` says what is made, `shards/` holds a
store for each finished task, `failures/` says why a task failed, and `logs/` is datatrove's. A task is finished when
its shard exists. No finished task is done again.

datatrove hands out tasks by Slurm or Ray. Its own pool of processes is not used, because it waits for ever for a worker
that was killed. Its readers are not used either: they drop empty documents without counting them, leave out a line that
is not JSON with a line in a log, and end a file at the first byte that is not UTF-8 (datatrove 0.10.1,
`readers/base.py`, `readers/jsonl.py`). `torchtrain.data.corpus` names and counts every bad record.
"""

import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline.environment import end_with_parent, usable_cores
from anchorline.errors import UserError, disk_fault, one_line, quoted, quoted_reason
from anchorline.files import PARTIAL, commit, read_json, replace_file
from torchtrain.config import DataConfig, Preparation, PrepareConfig, Source
from torchtrain.data.corpus import Record, Task, digest_tasks, list_tasks, read, source_name
from torchtrain.data.prepare import (
    Report,
    check_documents,
    check_shares,
    digest,
    fingerprint,
    identity,
    locked,
    name_disk_fault,
    sum_progress,
    tokenizer_identity,
)
from torchtrain.data.store import HEADER, SourceCount, TokenStore
from torchtrain.data.writer import PreparationProgress, Tokeniser, join_shards
from torchtrain.errors import TasksUnfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAN, SHARDS, LOGS, FAILURES = "plan.json", "shards", "logs", "failures"
_JOINED = "store"
_MOST_NAMED = 3  # failures


@dataclass(frozen=True)
class Submitted:
    """Tasks are in a cluster's queue: how many, or, of a dry run, the script."""

    tasks: int
    script: str | None = None


def prepare_store(
    preparation: Preparation,
    tokenizer: "PreTrainedTokenizerFast",
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    on_progress: Report = lambda progress: None,
    dry_run: bool = False,
) -> TokenStore | Submitted:
    """Make the store of a preparation, or continue an interrupted one. A finished store is opened.

    Tokens, their order and the fingerprint depend neither on who does the work nor on where it was interrupted.

    preparation: sources, settings, executor.
    out: the store's folder.
    say: takes one line at a time on what begins.
    on_progress: called when a task is done.
    dry_run: of Slurm, return the script and write nothing.
    Raises UserError: a source cannot be read or gives too many bad records; the folder holds something else, or cannot
        be written; the executor's package or program is missing.
    Raises TasksUnfinished: a worker was killed; the finished tasks are kept.
    """
    data, settings = preparation.data, preparation.prepare
    if dry_run and settings.executor != "slurm":
        raise UserError(f"--dry-run: prepare.executor is {settings.executor}; only Slurm's script is shown")
    work, shown = out.with_name(out.name + PARTIAL), f"--out {quoted(out)}"
    tasks = list_tasks(data.sources)
    made_of, encoding = identity(data, tokenizer), tokenizer_identity(tokenizer)
    name = digest([made_of, encoding, digest_tasks(tasks)])
    maker = MakeShard(work.absolute(), data, tasks, tokenizer, one_thread=settings.executor != "local")
    if dry_run:
        return Submitted(len(tasks), _slurm_script(settings, maker, out.name))
    with locked(out, shown, say):
        if os.path.lexists(out):
            return _open_finished(out, name, work, on_progress)
        # The places and times of change of files count until the store is whole.
        plan = {"fingerprint": name, "looks": fingerprint(data, tokenizer), "tasks": len(tasks)}
        with name_disk_fault(shown):
            _begin(work, plan)
        done = _FinishedTasks(work, len(tasks))
        done.look()
        if len(done.stores):
            say(f"going on  {len(done.stores):,} of {len(tasks):,} tasks are done")
        if done.missing():
            shutil.rmtree(work / FAILURES, ignore_errors=True)
            lost_worker = _run_tasks(settings, maker, done, out.name, lambda: on_progress(done.look()))
            if settings.executor == "slurm":
                return Submitted(len(done.missing()))
            done.look()
            if done.missing():
                raise _unfinished(done, work, lost_worker)
        shards = [done.stores[rank] for rank in range(len(tasks))]
        counts = _sum_counts(data.sources, tasks, shards)
        check_shares(counts, data)
        check_documents(counts, sum(map(len, shards)), data)
        say(f"joining   {len(shards):,} shards")
        for shard in shards:
            _verify(shard)
        with name_disk_fault(shown):
            joined = work / _JOINED
            shutil.rmtree(joined, ignore_errors=True)
            joined.mkdir()
            fields: dict[str, Any] = {"tokenizer": encoding, "made_of": made_of}
            join_shards(shards, joined, name, counts, data.mixture, data.remove_duplicates, **fields)
            commit(joined, out)
            _clear(work)
        return TokenStore.open(out)


def _open_finished(out: Path, name: str, work: Path, on_progress: Report) -> TokenStore:
    if not (out / HEADER).is_file():
        raise UserError(f"--out {quoted(out)}: is there, and no token store; give the name of a new folder")
    store = TokenStore.open(out)
    if store.header.fingerprint != name:
        raise UserError(
            f"--out {quoted(out)}: holds a store of other sources, settings or tokenizer; choose another folder, or "
            "remove it"
        )
    _clear(work)  # of a process that died after the store was whole
    on_progress(sum_progress("tokens reused", [store]))
    return store


def _begin(work: Path, plan: dict[str, Any]) -> None:
    """Keep the shards that are there if they are of this plan. Of another plan, remove shards without documents. Raises
    UserError: shards of another plan hold documents.
    """
    if not (work / PLAN).exists() or read_json(work / PLAN) != plan:
        if any(_holds_documents(shard) for shard in (work / SHARDS).glob("*")):
            raise UserError(
                f"{quoted(work)}: holds a preparation of something else (sources, their files, settings or tokenizer "
                "have changed); remove it, or choose another --out"
            )
        _clear(work)
    (work / SHARDS).mkdir(parents=True, exist_ok=True)
    replace_file(work / PLAN, json.dumps(plan, indent=1).encode() + b"\n")


def _holds_documents(shard: Path) -> bool:
    """Whether a task left documents; a shard that cannot be read may hold some."""
    try:
        return len(TokenStore.open(shard)) > 0
    except UserError:
        return True


def _clear(work: Path) -> None:
    """Remove what a preparation made, and its folder if nothing else is in it."""
    for name in (SHARDS, LOGS, _JOINED, FAILURES):
        shutil.rmtree(work / name, ignore_errors=True)
    with suppress(OSError):
        (work / PLAN).unlink()
    with suppress(OSError):
        work.rmdir()


class _FinishedTasks:
    """Which tasks are done: those whose shard exists, whatever datatrove's marks say."""

    def __init__(self, work: Path, tasks: int) -> None:
        self._work, self.tasks = work, tasks
        self.stores: dict[int, TokenStore] = {}

    def missing(self) -> list[int]:
        return [rank for rank in range(self.tasks) if rank not in self.stores]

    def look(self) -> PreparationProgress:
        """Open the new shards, and return how far the preparation is."""
        for rank in self.missing():
            path = self._work / SHARDS / f"{rank:05d}"
            if not path.exists():
                continue
            try:
                self.stores[rank] = TokenStore.open(path)
            except UserError:  # damaged: it is made again
                shutil.rmtree(path, ignore_errors=True)
        return sum_progress(f"task {len(self.stores):,} of {self.tasks:,}", self.stores.values())

    def update_marks(self) -> None:
        """Make datatrove's marks say which tasks are done."""
        marks = self._work / LOGS / "completions"
        marks.mkdir(parents=True, exist_ok=True)
        for rank in range(self.tasks):
            if rank in self.stores:
                (marks / f"{rank:05d}").touch()
            else:
                (marks / f"{rank:05d}").unlink(missing_ok=True)


def _unfinished(done: _FinishedTasks, work: Path, lost_worker: bool) -> Exception:
    """Return what to raise when tasks are not done: a UserError if they gave reasons."""
    reasons = []
    for rank in done.missing():
        with suppress(OSError):
            reasons.append((work / FAILURES / f"{rank:05d}").read_text(encoding="utf-8").strip())
    # A disk may be too full to take the reason, too: then the file is empty.
    named = list(dict.fromkeys(reason or f"{quoted(work)} cannot be written: the disk is full" for reason in reasons))
    left = f"{len(done.missing()):,} of {done.tasks:,} tasks are not done; the others are kept"
    if named:
        more = f" (and {len(named) - _MOST_NAMED} more reasons)" if len(named) > _MOST_NAMED else ""
        return UserError(f"{'; '.join(named[:_MOST_NAMED])}{more}: {left}: correct it and run the same command again")
    what = "a worker was killed (by the system, if memory ran out)" if lost_worker else "workers ended without a reason"
    return TasksUnfinished(f"{what}: {left}: run the same command again")


def _sum_counts(sources: Sequence[Source], tasks: Sequence[Task], shards: Sequence[TokenStore]) -> list[SourceCount]:
    """Return what was read of each source by all of its tasks."""
    counts = []
    for number, source in enumerate(sources):
        own = [shard.header.sources[0] for task, shard in zip(tasks, shards, strict=True) if task.source == number]
        records, bad, special = (
            sum(getattr(count, name) for count in own) for name in ("records", "bad_records", "special_records")
        )
        first = next((count.first_bad for count in own if count.first_bad), "")
        counts.append(SourceCount(source_name(source), records, bad, first, special))
    return counts


def _verify(shard: TokenStore) -> None:
    """Read a shard again before it counts. Remove a shard that has changed, so that its task is done again."""
    try:
        shard.verify()
    except UserError as error:
        shutil.rmtree(shard.folder, ignore_errors=True)
        raise TasksUnfinished(f"{error}: it was removed; run the same command again") from None


# --- one task ---------------------------------------------------------------------------------------------------------


class MakeShard:
    """Reads the records of a task and writes its shard. It can be called as a block of datatrove's pipelines.

    work: the preparation's folder.
    data: settings.
    tasks: all of them.
    one_thread: leave the other cores to other tasks.
    """

    def __init__(
        self,
        work: Path,
        data: DataConfig,
        tasks: Sequence[Task],
        tokenizer: "PreTrainedTokenizerFast",
        one_thread: bool,
    ) -> None:
        self.work, self.data, self.tasks, self.tokenizer = work, data, list(tasks), tokenizer
        self.one_thread = one_thread

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """What all tasks of a process share: making it reads the tokenizer's whole vocabulary."""
        return Tokeniser(self.data, self.tokenizer)

    def records(self, task: Task) -> Iterator[Record]:
        """Yield what a task reads."""
        for part in task.parts or (None,):
            yield from read(self.data.sources[task.source], part)

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of task `rank`, unless it exists. A failure leaves its reason in the folder `failures`.
        Raises UserError: the source breaks off, or the shard cannot be written.
        """
        final = self.work / SHARDS / f"{rank:05d}"
        if final.exists():
            return
        if self.one_thread:
            _use_one_thread()
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
        partial.mkdir(parents=True)
        try:
            with self.tokeniser.writer(partial) as writer:
                count = self.tokeniser.add(self.data.sources[task.source], self.records(task), writer)
                writer.finish("", [count])
            try:
                commit(partial, final)
            except OSError:
                if not final.exists():  # else another process was first, and its shard is the same
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _use_one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers has no other switch


# --- who runs the tasks -----------------------------------------------------------------------------------------------


def _run_tasks(
    settings: PrepareConfig, maker: MakeShard, done: _FinishedTasks, name: str, on_task: Callable[[], None]
) -> bool:
    """Run the tasks that are not done; of Slurm, submit them. Return whether a worker was killed. Raises UserError:
    Slurm or Ray is missing. Raises TasksUnfinished: Ray does not start.
    """
    if settings.executor == "local":
        workers = min(settings.workers or usable_cores(), len(done.missing()))
        return _run_locally(maker, done.missing(), workers, on_task)
    done.update_marks()
    if settings.executor == "ray":
        _run_by_ray(settings, maker)
        on_task()
        return False
    try:
        _slurm_executor(settings, maker, maker.work / LOGS, name).run()
    except FileNotFoundError:
        raise UserError("prepare.executor slurm: there is no sbatch here; run it where Slurm is") from None
    return False


def _run_locally(maker: MakeShard, ranks: Sequence[int], workers: int, on_task: Callable[[], None]) -> bool:
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
    _use_one_thread()
    end_with_parent()


def _run_in_worker(rank: int) -> None:
    _maker(rank=rank)


def _run_by_ray(settings: PrepareConfig, maker: MakeShard) -> None:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("prepare.executor ray needs the package ray: pip install ray") from None
    from datatrove.executor import RayPipelineExecutor

    own = not ray.is_initialized()
    if own:  # the cluster that RAY_ADDRESS names, or one of our own
        alone = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": settings.workers, "include_dashboard": False}
        try:
            ray.init(**alone, log_to_driver=False)
        except Exception as error:  # ray raises that itself, where a machine is too slow for it
            raise TasksUnfinished(
                f"Ray does not start: {quoted_reason(error)}; run the command again, or take prepare.executor local"
            ) from None
    try:
        spread = _executor_options(settings, maker, maker.work / LOGS)
        RayPipelineExecutor([maker], mem_per_cpu_gb=settings.memory, **spread).run()
    finally:
        if own:
            ray.shutdown()


def _executor_options(settings: PrepareConfig, maker: MakeShard, logs: Path) -> dict[str, Any]:
    from datatrove.utils.logging import logger

    logger.remove()  # this process says what it has to say through `say`
    return {"tasks": len(maker.tasks), "workers": settings.workers or -1, "logging_dir": str(logs)}


def _slurm_executor(settings: PrepareConfig, maker: MakeShard, logs: Path, name: str) -> Any:
    from datatrove.executor import SlurmPipelineExecutor

    class SlurmExecutor(SlurmPipelineExecutor):
        """datatrove's, without the options that are not set."""

        def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
            return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    slurm, activate = settings.slurm, Path(sys.prefix) / "bin" / "activate"
    unset: Any = None
    return SlurmExecutor(
        [maker],
        time="24:00:00",
        partition=unset,
        qos=unset,
        mem_per_cpu_gb=settings.memory,
        job_name=name,
        env_command=slurm.environment or (f"source {activate}" if activate.exists() else unset),
        sbatch_args=dict(slurm.sbatch),  # they win over those above
        **_executor_options(settings, maker, logs),
    )


def _slurm_script(settings: PrepareConfig, maker: MakeShard, name: str) -> str:
    """Return the script that is given to sbatch."""
    with tempfile.TemporaryDirectory() as scratch:  # for the folder of logs that datatrove makes
        executor = _slurm_executor(settings, maker, Path(scratch), name)
        pickled = executor.logging_dir.resolve_paths("executor.pik")
        script = executor.get_launch_file_contents(
            executor.get_sbatch_args(min(len(maker.tasks), executor.max_array_size)),
            f"srun  -l -n {executor.nodes_per_task} launch_pickled_pipeline {pickled}",
        )
        return script.replace(scratch, str(maker.work / LOGS))
