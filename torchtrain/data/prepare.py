"""Makes token stores: tasks read parts of a corpus, each writes a shard, and the shards become one store.

A run makes its store, `<data.cache>/corpus/<fingerprint>`, by a single task. `torchtrain prepare` runs many, here or on
a cluster (`torchtrain.data.clusters`). Until its store is whole, `NAME.partial` has `plan.json` (what is made),
`shards/` (finished tasks, never done again), `failures/` (why one failed) and datatrove's `logs/`. Shards and stores
get their names when all of them is there.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from anchorline.environment import usable_cores
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import PARTIAL, commit, expand, read_json, replace_file
from torchtrain.config import DataConfig, Preparation, Source
from torchtrain.data.clusters import LOGS, run_by_ray, slurm_script, submit_to_slurm
from torchtrain.data.corpus import Task, digest_tasks, list_tasks, read, source_name
from torchtrain.data.identity import check_prepared, digest, fingerprint, identity, open_prepared, tokenizer_digest
from torchtrain.data.shards import FAILURES, SHARDS, MakeShard, run_locally, written
from torchtrain.data.store import HEADER, SourceCount, TokenStore
from torchtrain.data.writer import PreparationProgress, Tokeniser, join_shards
from torchtrain.errors import TasksUnfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Report = Callable[[PreparationProgress], None]

PLAN = "plan.json"
_JOINED = "store"
_MOST_NAMED = 3  # failures


@dataclass(frozen=True)
class Submitted:
    """Tasks are in a cluster's queue: how many, or, of a dry run, the script."""

    tasks: int
    script: str | None = None


def prepare(
    data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Report = lambda progress: None
) -> TokenStore:
    """Return the tokenised corpus of a config: `data.prepared`, or from the cache if it is there, else made now.

    Several processes may call this at once: one works, the others wait and reuse.

    tokenizer: a fast tokenizer (one with a `tokenizers` backend).
    on_progress: called with the state so far when a source begins, after each full batch, and once at the end.
    Raises UserError: a source cannot be read, gives no document, or has more bad records than `data.bad_record_share`;
        the tokenizer is a slow one; `data.cache` cannot be written; `data.prepared` is of something else.
    """
    if data.prepared is not None:
        store = open_prepared(data)
        check_prepared(store, data, tokenizer)
        return _reuse(store, data, on_progress)
    final = expand(data.cache) / "corpus" / fingerprint(data, tokenizer)
    shown = f"data.cache {quoted(data.cache)}"
    if not final.exists():
        with _locked(final, shown):
            if not final.exists():
                with _name_disk_fault(shown):
                    return _make_alone(final, data, tokenizer, on_progress)
    return _reuse(TokenStore.open(final), data, on_progress)


def _reuse(store: TokenStore, data: DataConfig, on_progress: Report) -> TokenStore:
    _check_shares(store.header.sources, data)
    on_progress(_sum_progress("tokens reused", [store]))
    return store


def _make_alone(final: Path, data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Report) -> TokenStore:
    """Make a store by one task. A failure leaves nothing behind."""
    tokeniser = Tokeniser(data, tokenizer)
    partial = final.with_name(final.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    with written(partial, final, tokeniser) as writer:
        counts = []
        for source in data.sources:
            counts.append(tokeniser.add(source, read(source), writer, on_progress))
            _check_shares(counts[-1:], data)
        _check_documents(counts, writer.documents, data)
        writer.finish(final.name, counts, data.mixture, data.remove_duplicates)
    on_progress(PreparationProgress("tokenised", writer.documents, writer.tokens, writer.bad_records))
    return TokenStore.open(final)


def prepare_store(
    preparation: Preparation,
    tokenizer: "PreTrainedTokenizerFast",
    out: Path,
    log: Callable[[str], None] = lambda line: None,
    on_progress: Report = lambda progress: None,
    dry_run: bool = False,
) -> TokenStore | Submitted:
    """Make the store of a preparation, or continue an interrupted one. A finished store is opened.

    Tokens, their order and the fingerprint depend neither on who does the work nor on where it was interrupted.

    log: takes one line at a time on what begins.
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
    made_of, encoding = identity(data, tokenizer), tokenizer_digest(tokenizer)
    name = digest([made_of, encoding, digest_tasks(tasks)])
    maker = MakeShard(work.absolute(), data, tasks, tokenizer, one_thread=settings.executor != "local")
    if dry_run:
        return Submitted(len(tasks), slurm_script(settings, maker, out.name))
    with _locked(out, shown, log):
        if os.path.lexists(out):
            return _open_finished(out, name, work, on_progress)
        # The places and times of change of files count until the store is whole.
        plan = {"fingerprint": name, "looks": fingerprint(data, tokenizer), "tasks": len(tasks)}
        with _name_disk_fault(shown):
            _begin(work, plan)
        done = _FinishedTasks(work, len(tasks))
        done.look()
        if len(done.stores):
            log(f"going on  {len(done.stores):,} of {len(tasks):,} tasks are done")
        if done.missing():
            shutil.rmtree(work / FAILURES, ignore_errors=True)
            lost_worker = False
            if settings.executor == "slurm":
                submit_to_slurm(settings, maker, out.name, done.stores)
                return Submitted(len(done.missing()))
            if settings.executor == "ray":
                run_by_ray(settings, maker, done.stores)
                on_progress(done.look())
            else:
                workers = min(settings.workers or usable_cores(), len(done.missing()))
                lost_worker = run_locally(maker, done.missing(), workers, lambda: on_progress(done.look()))
            done.look()
            if done.missing():
                raise _unfinished(done, work, lost_worker)
        shards = [done.stores[rank] for rank in range(len(tasks))]
        counts = _sum_counts(data.sources, tasks, shards)
        _check_shares(counts, data)
        _check_documents(counts, sum(map(len, shards)), data)
        log(f"joining   {len(shards):,} shards")
        for shard in shards:
            _verify(shard)
        with _name_disk_fault(shown):
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
    on_progress(_sum_progress("tokens reused", [store]))
    return store


def _begin(work: Path, plan: dict[str, Any]) -> None:
    """Keep shards of this plan; of another, remove those without documents, and refuse those that hold some."""
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
        (work / PLAN).unlink(missing_ok=True)
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
        return _sum_progress(f"task {len(self.stores):,} of {self.tasks:,}", self.stores.values())


def _unfinished(done: _FinishedTasks, work: Path, lost_worker: bool) -> Exception:
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


def _check_shares(counts: Iterable[SourceCount], data: DataConfig) -> None:
    for count in counts:
        if count.bad_records > data.bad_record_share * count.records:
            raise UserError(
                f"data.sources: {count.source}: {count.bad_records} of {count.records} records are bad, a share above "
                f"data.bad_record_share {data.bad_record_share}; the first: {count.first_bad}"
            )


def _check_documents(counts: Sequence[SourceCount], documents: int, data: DataConfig) -> None:
    if documents:
        return
    records, bad = (sum(getattr(count, name) for count in counts) for name in ("records", "bad_records"))
    why = f"{records} records: {bad} bad, {records - bad} filtered or shorter than data.min_tokens {data.min_tokens}"
    raise UserError(f"data.sources: the corpus is empty: {why if records else 'no records'}; check the sources")


@contextmanager
def _name_disk_fault(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{shown} cannot be written: {disk_fault(error)}; choose another folder") from None


@contextmanager
def _locked(folder: Path, shown: str, log: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path)
    with _name_disk_fault(shown):
        folder.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # filelock waits for ever for a lock that cannot be made
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log(f"waiting   another process prepares {folder}")
            lock.acquire()
        except NotImplementedError as error:
            raise OSError(0, str(error)) from None
    try:
        yield
    finally:
        lock.release()


def _sum_progress(state: str, stores: Collection[TokenStore]) -> PreparationProgress:
    bad = sum(count.bad_records for store in stores for count in store.header.sources)
    return PreparationProgress(state, sum(map(len, stores)), sum(store.token_count for store in stores), bad)
