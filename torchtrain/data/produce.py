"""`torchtrain prepare`: a store at corpus scale, made by tasks that may run anywhere and are never done twice.

Beside the store's place stands `NAME.partial` while it is made: `plan.json` says of what, `shards/` holds a store for
each task that is done, `logs/` what datatrove keeps. Whoever calls again goes on from there. When all shards are there
they are checked and joined, the store takes its name, and the rest is removed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from anchorline.environment import usable_cores
from anchorline.errors import UserError, disk_fault, quoted, quoted_reason
from anchorline.files import PARTIAL, commit, read_json, replace_file
from torchtrain.config import Preparation
from torchtrain.data.corpus import source_name
from torchtrain.data.prepare import check_documents, check_shares, fingerprint, identity, tokenizer_identity
from torchtrain.data.store import HEADER, SourceCount, TokenStore
from torchtrain.data.tasks import FAILURES, Task, digest_of, list_tasks
from torchtrain.data.tokenise import PreparationProgress
from torchtrain.data.writer import join_shards
from torchtrain.errors import TasksUnfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAN, SHARDS, LOGS, STORE = "plan.json", "shards", "logs", "store"
_MOST_NAMED = 3  # of failures


@dataclass(frozen=True)
class Submitted:
    """Tasks are with a cluster's queue: how many, or, of a dry run, the script."""

    tasks: int
    script: str | None = None


def produce(
    preparation: Preparation,
    tokenizer: "PreTrainedTokenizerFast",
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    on_progress: Callable[[PreparationProgress], None] = lambda progress: None,
    dry_run: bool = False,
) -> TokenStore | Submitted:
    """Make the store of a preparation, or go on making it; one that is finished is opened.

    Tokens, their order and the fingerprint depend neither on who does the work nor on where it was interrupted.

    Args:
        preparation: sources, settings, executor.
        tokenizer: a fast tokenizer.
        out: the store's folder.
        say: takes one line at a time on what begins.
        on_progress: called when a task is done.
        dry_run: of Slurm, return the script and write nothing.

    Raises:
        UserError: a source cannot be read or gives too many bad records; the folder holds something else, or cannot be
            written; the executor's package or program is not there.
        TasksUnfinished: a worker was killed; what is done is kept.
    """
    data = preparation.data
    if dry_run and preparation.prepare.executor != "slurm":
        raise UserError(f"--dry-run: prepare.executor is {preparation.prepare.executor}; only Slurm's script is shown")
    tasks = list_tasks(preparation)
    made_of = identity(data, tokenizer)
    encoding = tokenizer_identity(tokenizer)
    content = json.dumps([made_of, encoding, digest_of(tasks)], sort_keys=True)
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    # The place and the time of change of files count until the store is whole: then it is what it is.
    plan = {"fingerprint": name, "looks": fingerprint(data, tokenizer), "tasks": len(tasks)}
    work = out.with_name(out.name + PARTIAL)
    if dry_run:
        return _show(preparation, tokenizer, tasks, work, out.name)
    with _locked(out, say):
        if os.path.lexists(out):
            if not (out / HEADER).is_file():
                raise UserError(f"--out {quoted(out)}: is there, and no token store; give the name of a new folder")
            store = _finished(out, name)
            _clear(work)  # of a process that died after the store was whole
            bad = sum(count.bad_records for count in store.header.sources)
            on_progress(PreparationProgress("tokens reused", len(store), store.token_count, bad))
            return store
        if work.exists():
            _take_over(work, plan)
        with _named(out):
            (work / SHARDS).mkdir(parents=True, exist_ok=True)
            replace_file(work / PLAN, json.dumps(plan, indent=1).encode() + b"\n")
        done = _Done(work, len(tasks))
        done.mark()
        if done.number:
            say(f"going on  {done.number:,} of {len(tasks):,} tasks are done")
        if done.number < len(tasks):
            executor = _executor(preparation, tokenizer, tasks, work, out.name)
            if _run(executor, preparation, lambda: on_progress(done.look()), work, done):
                return Submitted(len(tasks) - done.number)
        shards = done.shards()
        counts = _sum_counts(preparation, tasks, shards)
        check_shares(counts, data)
        check_documents(counts, sum(map(len, shards)), data)
        say(f"joining   {len(shards):,} shards")
        for shard in shards:
            _verify(shard)
        with _named(out):
            shutil.rmtree(work / STORE, ignore_errors=True)
            (work / STORE).mkdir()
            told: dict[str, Any] = {"tokenizer": encoding, "made_of": made_of}
            join_shards(shards, work / STORE, name, counts, data.mixture, data.remove_duplicates, **told)
            commit(work / STORE, out)
            _clear(work)
        return TokenStore.open(out)


@contextmanager
def _named(out: Path) -> Iterator[None]:
    """Tell of a disk that does not take what is written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {quoted(out)} cannot be written: {disk_fault(error)}; choose another folder") from None


@contextmanager
def _locked(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process prepares the same folder."""
    name = out.with_name(f".{out.name}.lock")
    lock = FileLock(name)
    with _named(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(name, os.O_CREAT | os.O_RDWR, 0o666))  # a lock that cannot be made is waited for for ever
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting   another process prepares {out}")
            lock.acquire()
        except NotImplementedError as error:
            raise OSError(0, str(error)) from None
    try:
        yield
    finally:
        lock.release()


def _finished(out: Path, name: str) -> TokenStore:
    store = TokenStore.open(out)
    if store.header.fingerprint != name:
        raise UserError(
            f"--out {quoted(out)}: holds a store of other sources, settings or tokenizer; choose another folder, or "
            "remove it"
        )
    return store


def _show(
    preparation: Preparation, tokenizer: "PreTrainedTokenizerFast", tasks: Sequence[Task], work: Path, name: str
) -> Submitted:
    """Return Slurm's script. datatrove makes the folder of its logs for it, which does not stay."""
    logs = work / LOGS / "slurm_logs"
    missing = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    try:
        return Submitted(len(tasks), _executor(preparation, tokenizer, tasks, work, name).script())
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _clear(work: Path) -> None:
    """Remove what a preparation made, and its folder if nothing else lies in it."""
    for name in (SHARDS, LOGS, STORE, FAILURES):
        shutil.rmtree(work / name, ignore_errors=True)
    with suppress(OSError):
        (work / PLAN).unlink()
    with suppress(OSError):
        work.rmdir()


def _take_over(work: Path, plan: dict[str, Any]) -> None:
    """Go on with what is there, if it is of this plan; where nothing of another is worth keeping, remove it.

    Raises:
        UserError: documents of something else are done there.
    """
    if (work / PLAN).exists() and read_json(work / PLAN) == plan:
        return
    if not (work / PLAN).exists() and not [path for path in work.rglob("*") if path != work / SHARDS]:
        return  # of a process that died at once
    if (work / PLAN).exists() and not any(_documents(path) for path in (work / SHARDS).glob("*")):
        _clear(work)
        return
    raise UserError(
        f"{quoted(work)}: holds a preparation of something else (sources, their files, settings or tokenizer have "
        "changed); remove it, or choose another --out"
    )


def _documents(shard: Path) -> int:
    """How many documents a task left; one whose shard cannot be read may have left some."""
    try:
        return len(TokenStore.open(shard))
    except UserError:
        return 1


def _executor(
    preparation: Preparation, tokenizer: "PreTrainedTokenizerFast", tasks: Sequence[Task], work: Path, name: str
) -> Any:
    try:
        from torchtrain.data import blocks
    except ImportError as error:
        raise UserError(
            f"torchtrain prepare needs the package {error.name or 'datatrove'}: pip install 'anchorline[torch]'"
        ) from None
    from datatrove.utils.logging import logger

    logger.remove()  # what is said on this side, we say
    settings = preparation.prepare
    workers = min(settings.workers or usable_cores(), len(tasks))
    pipeline = [
        blocks.ReadRecords(preparation.data.sources, tasks),
        blocks.WriteShard(
            work.absolute() / SHARDS, preparation.data, tasks, tokenizer, one_thread=settings.executor != "local"
        ),
    ]
    return blocks.make_executor(settings, pipeline, len(tasks), workers, work.absolute() / LOGS, name)


def _run(executor: Any, preparation: Preparation, tell: Callable[[], None], work: Path, done: "_Done") -> bool:
    """Run what is not done. Returns whether it is only submitted."""
    kind = preparation.prepare.executor
    shutil.rmtree(work / FAILURES, ignore_errors=True)
    if kind == "slurm":
        try:
            executor.run()
        except FileNotFoundError:
            raise UserError("prepare.executor slurm: there is no sbatch here; run it where Slurm is") from None
        return True
    if kind == "ray":
        _run_by_ray(executor, preparation.prepare.workers)
        tell()
    else:
        executor._on_task = tell
        executor.run()
    done.mark()
    if done.number < done.of:
        raise _unfinished(work, done, getattr(executor, "lost_worker", False))
    return False


def _run_by_ray(executor: Any, workers: int | None) -> None:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("prepare.executor ray needs the package ray: pip install ray") from None
    own = not ray.is_initialized()
    if own:  # the cluster that RAY_ADDRESS names, or one of our own
        alone = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
        try:
            ray.init(**alone, log_to_driver=False)
        except Exception as error:  # it raises that itself, where a machine is too slow for it
            raise TasksUnfinished(
                f"Ray does not start: {quoted_reason(error)}; run the command again, or take prepare.executor local"
            ) from None
    try:
        executor.run()
    finally:
        if own:
            ray.shutdown()


def _unfinished(work: Path, done: "_Done", lost_worker: bool) -> Exception:
    """Return what to raise of tasks that are not done: the user's mistakes, if that is what they failed of."""
    reasons = []
    for rank in done.missing():
        with suppress(OSError):
            path = work / FAILURES / f"{rank:05d}"
            reasons.append(path.read_text(encoding="utf-8").strip())
    # A disk may be too full to take the reason, too: the file is there and empty.
    named = list(dict.fromkeys(reason or f"{quoted(work)} cannot be written: the disk is full" for reason in reasons))
    left = f"{done.of - done.number:,} of {done.of:,} tasks are not done"
    if named:
        more = f" (and {len(named) - _MOST_NAMED} more reasons)" if len(named) > _MOST_NAMED else ""
        return UserError(
            f"{'; '.join(named[:_MOST_NAMED])}{more}: {left}; the others are kept: mend "
            "it and run the same command again"
        )
    what = "a worker was killed (by the system, if memory ran out)" if lost_worker else "workers ended without a word"
    return TasksUnfinished(f"{what}: {left}; the others are kept: run the same command again ({work / LOGS})")


class _Done:
    """Which tasks are done: those whose shard is there, whatever a mark says."""

    def __init__(self, work: Path, of: int) -> None:
        self._work, self.of = work, of
        self._found: dict[int, TokenStore] = {}

    @property
    def number(self) -> int:
        return len(self._found)

    def missing(self) -> list[int]:
        return [rank for rank in range(self.of) if rank not in self._found]

    def look(self) -> PreparationProgress:
        """Look at what is there now, and return how far that is."""
        for rank in self.missing():
            path = self._work / SHARDS / f"{rank:05d}"
            if not path.exists():
                continue
            try:
                self._found[rank] = TokenStore.open(path)
            except UserError:  # damaged: it is made anew
                shutil.rmtree(path, ignore_errors=True)
        stores = self._found.values()
        bad = sum(count.bad_records for store in stores for count in store.header.sources)
        state = f"task {self.number:,} of {self.of:,}"
        return PreparationProgress(state, sum(map(len, stores)), sum(store.token_count for store in stores), bad)

    def mark(self) -> None:
        """Let datatrove's marks say what is there: a task without a shard is to be done, one with it is not."""
        self.look()
        marks = self._work / LOGS / "completions"
        for rank in range(self.of):
            mark = marks / f"{rank:05d}"
            if rank in self._found and not mark.exists():
                marks.mkdir(parents=True, exist_ok=True)
                mark.touch()
            elif rank not in self._found:
                mark.unlink(missing_ok=True)

    def shards(self) -> list[TokenStore]:
        return [self._found[rank] for rank in range(self.of)]


def _sum_counts(preparation: Preparation, tasks: Sequence[Task], shards: Sequence[TokenStore]) -> list[SourceCount]:
    """Return what was read of each source by all of its tasks."""
    counts = []
    for number, source in enumerate(preparation.data.sources):
        own = [shard.header.sources[0] for task, shard in zip(tasks, shards, strict=True) if task.source == number]
        records, bad, special = (
            sum(getattr(count, name) or 0 for count in own) for name in ("records", "bad_records", "special_records")
        )
        first = next((count.first_bad for count in own if count.first_bad), "")
        counts.append(SourceCount(source_name(source), records, bad, first, special))
    return counts


def _verify(shard: TokenStore) -> None:
    """Read a shard again before it counts; one that has changed is removed, so that its task is done anew."""
    try:
        shard.verify()
    except UserError as error:
        shutil.rmtree(shard.folder, ignore_errors=True)
        raise TasksUnfinished(f"{error}: it was removed; run the same command again") from None
