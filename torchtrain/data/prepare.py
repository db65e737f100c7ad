"""Prepares the corpus of a run: a token store, made once and reused.

`prepare` tokenises in a run's own process and keeps the store under `<data.cache>/corpus/<fingerprint>`, or opens
`data.prepared`. `prepare_store` is `torchtrain prepare`: tasks tokenise, on this machine or a cluster's, and none is
done twice. While it works, `NAME.partial` is beside the store's place: `plan.json` says what is made, `shards/` holds a
store for each task that is done, `logs/` is datatrove's. When all shards are there, they are checked and joined.

Both write into a folder of another name and rename it when it is whole, so a store that exists is finished.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from anchorline import corpora
from anchorline.environment import usable_cores
from anchorline.errors import UserError, disk_fault, quoted, quoted_reason
from anchorline.files import PARTIAL, commit, expand, read_json, replace_file
from torchtrain.config import DataConfig, Preparation, Source
from torchtrain.data.corpus import FAILURES, Task, digest_of, list_tasks, read, source_files, source_name
from torchtrain.data.files import FileInfo, is_url
from torchtrain.data.store import HEADER, SourceCount, TokenStore
from torchtrain.data.writer import PreparationProgress, Tokeniser, join_shards
from torchtrain.errors import TasksUnfinished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Report = Callable[[PreparationProgress], None]

# Raise it when the same sources and settings would give other tokens or other files (reading, rendering, layout).
FORMAT = 3
PLAN, SHARDS, LOGS = "plan.json", "shards", "logs"
_JOINED = "store"
_MOST_FILES = 1_000_000  # of a data set's folder
_MOST_NAMED = 3  # of failures


# --- what a store is of -----------------------------------------------------------------------------------------------


def identity(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return what a store's tokens depend on besides the tokenizer, as JSON, wherever the store is.

    Files count by name and size. A demo counts by its package's or Python's version, a hub data set by its name,
    subset, split and revision, so that a finished store needs no network: pin `revision` to follow a set that changes.
    A prepared store counts as its sources (`prepare` compares them), or by its fingerprint if they are not given.

    Raises:
        UserError: a missing file or package.
    """
    if data.prepared is not None and not data.sources:
        return {"prepared": _open_prepared(data).header.fingerprint}
    content = {
        "format": FORMAT,
        "sources": [_identity_of_source(source) for source in data.sources],
        "eos": tokenizer.eos_token_id if data.append_eos else None,
        "min_tokens": data.min_tokens,
        "special_tokens": data.special_tokens,
        "near_duplicates": data.near_duplicates,
        "remove_duplicates": data.remove_duplicates,
        "mixture": None if data.mixture is None else data.mixture.model_dump(mode="json"),
    }
    return json.loads(json.dumps(content))


def _identity_of_source(source: Source) -> dict[str, Any]:
    content = source.model_dump(exclude={"streaming"})
    if source.demo is not None:
        content["version"] = corpora.identity(source.demo, f"data.sources: demo {source.demo!r}")
    content["contents"] = [(file.name, file.bytes) for file in _files_of(source)]
    return content


def fingerprint(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the name of a run's own store: 32 hex digits over identity, tokenizer, and its files' places and times.

    Raises:
        UserError: as `identity`; or the tokenizer is a slow one.
    """
    files = [
        [(f.place if is_url(f.place) else str(Path(f.place).resolve()), f.bytes, f.version) for f in _files_of(source)]
        for source in data.sources
    ]
    content = identity(data, tokenizer) | {"tokenizer": tokenizer_identity(tokenizer), "files": files}
    return _digest(content)


def tokenizer_identity(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a SHA-256, as hex, of how a tokenizer encodes.

    Raises:
        UserError: it is a slow one, which does not say.
    """
    if not tokenizer.is_fast:
        raise UserError(f"model.source: {type(tokenizer).__name__} is a slow tokenizer; convert it to a tokenizer.json")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # that calls leave behind and that encoding here does not use
        backend.pop(state, None)
    return hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _files_of(source: Source) -> list[FileInfo]:
    if source.files is not None or source.texts is not None:
        return source_files(source)
    if source.dataset is None or not os.path.isdir(source.dataset):
        return []
    found = list(itertools.islice(Path(source.dataset).rglob("*"), _MOST_FILES + 1))
    if len(found) > _MOST_FILES:
        raise UserError(
            f"data.sources: dataset {quoted(source.dataset)}: holds more than {_MOST_FILES:,} files; narrow it"
        )
    files = [path for path in sorted(found) if path.is_file()]
    return [FileInfo(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in files]


def _check_shares(counts: Iterable[SourceCount], data: DataConfig) -> None:
    """Refuse a source of which too many records are bad."""
    for count in counts:
        if count.bad_records > data.bad_record_share * count.records:
            raise UserError(
                f"data.sources: {count.source}: {count.bad_records} of {count.records} records are bad, a share above "
                f"data.bad_record_share {data.bad_record_share}; the first: {count.first_bad}"
            )


def _check_documents(counts: Sequence[SourceCount], documents: int, data: DataConfig) -> None:
    """Refuse a corpus without documents."""
    if documents:
        return
    records, bad = (sum(getattr(count, name) for count in counts) for name in ("records", "bad_records"))
    found = f"{records} records: {bad} bad, {records - bad} shorter than data.min_tokens {data.min_tokens}"
    raise UserError(f"data.sources: the corpus is empty: {found if records else 'no records'}; check the sources")


@contextmanager
def _names_disk_fault(shown: str) -> Iterator[None]:
    """Raise that a disk does not take what is written as a UserError that names the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{shown} cannot be written: {disk_fault(error)}; choose another folder") from None


@contextmanager
def _locked(folder: Path, shown: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Wait until no other process makes the same store."""
    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path)
    with _names_disk_fault(shown):
        folder.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # filelock waits for ever for a lock that cannot be made
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting   another process prepares {folder}")
            lock.acquire()
        except NotImplementedError as error:
            raise OSError(0, str(error)) from None
    try:
        yield
    finally:
        lock.release()


# --- in a run ---------------------------------------------------------------------------------------------------------


def prepare(data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Report | None = None) -> TokenStore:
    """Return the tokenised corpus of a config: `data.prepared`, or from the cache if it is there, else made now.

    Several processes may call this at once: one works, the others wait and reuse.

    Args:
        data: sources and settings.
        tokenizer: a fast tokenizer (one with a `tokenizers` backend).
        on_progress: called with the state so far when a source begins, after each full batch, and once at the end.

    Raises:
        UserError: a source cannot be read, gives no document, or has more bad records than `data.bad_record_share`; the
            tokenizer is a slow one; `data.cache` cannot be written; `data.prepared` is of something else.
    """
    on_progress = on_progress or (lambda progress: None)
    if data.prepared is not None:
        store = _open_prepared(data)
        _check_prepared(store, data, tokenizer)
        return _reuse(store, data, on_progress)
    final = expand(data.cache) / "corpus" / fingerprint(data, tokenizer)
    if not final.exists():
        shown = f"data.cache {quoted(data.cache)}"
        with _locked(final, shown):
            if not final.exists():
                with _names_disk_fault(shown):
                    return _tokenise(final, data, tokenizer, on_progress)
    return _reuse(TokenStore.open(final), data, on_progress)


def _reuse(store: TokenStore, data: DataConfig, on_progress: Report) -> TokenStore:
    _check_shares(store.header.sources, data)
    on_progress(_progress("tokens reused", [store]))
    return store


def _progress(state: str, stores: Iterable[TokenStore]) -> PreparationProgress:
    stores = list(stores)
    bad = sum(count.bad_records for store in stores for count in store.header.sources)
    return PreparationProgress(state, sum(map(len, stores)), sum(store.token_count for store in stores), bad)


def _open_prepared(data: DataConfig) -> TokenStore:
    shown = f"data.prepared {quoted(data.prepared)}"
    folder = expand(data.prepared or "")
    if not (folder / HEADER).is_file():
        missing = f"holds no finished token store ({HEADER} is missing)" if folder.exists() else "is not there"
        raise UserError(f"{shown}: {missing}; make one: torchtrain prepare CONFIG --out FOLDER")
    store = TokenStore.open(folder)
    if store.header.made_of is None:
        raise UserError(f"{shown}: was not made by torchtrain prepare; give such a store, or data.sources alone")
    return store


def _check_prepared(store: TokenStore, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> None:
    shown = f"data.prepared {quoted(data.prepared)}"
    if store.header.tokenizer != tokenizer_identity(tokenizer):
        raise UserError(f"{shown}: was tokenised by another tokenizer; prepare it with that of model.source")
    if data.sources and store.header.made_of != identity(data.model_copy(update={"prepared": None}), tokenizer):
        raise UserError(
            f"{shown}: is of other sources or settings than this config's; prepare it again, or remove data.sources"
        )


def _tokenise(final: Path, data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Report) -> TokenStore:
    """Make a store in this process. Nothing is left of one that fails."""
    tokeniser = Tokeniser(data, tokenizer)
    partial = final.with_name(final.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    partial.mkdir()
    try:
        with tokeniser.writer(partial) as writer:
            counts = []
            for source in data.sources:
                counts.append(tokeniser.add(source, read(source), writer, on_progress))
                _check_shares(counts[-1:], data)
            _check_documents(counts, writer.documents, data)
            writer.finish(final.name, counts, data.mixture, data.remove_duplicates)
        commit(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    on_progress(PreparationProgress("tokenised", writer.documents, writer.tokens, writer.bad_records))
    return TokenStore.open(final)


# --- by tasks ---------------------------------------------------------------------------------------------------------


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
    """Make the store of a preparation, or go on making it; a finished one is opened.

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
    data, executor = preparation.data, preparation.prepare.executor
    if dry_run and executor != "slurm":
        raise UserError(f"--dry-run: prepare.executor is {executor}; only Slurm's script is shown")
    work, shown = out.with_name(out.name + PARTIAL), f"--out {quoted(out)}"
    tasks = list_tasks(data.sources)
    made_of, encoding = identity(data, tokenizer), tokenizer_identity(tokenizer)
    name = _digest([made_of, encoding, digest_of(tasks)])
    if dry_run:
        return _show_script(preparation, tokenizer, tasks, work, out.name)
    with _locked(out, shown, say):
        if os.path.lexists(out):
            return _open_finished(out, name, work, on_progress)
        # The places and times of change of files count until the store is whole.
        plan = {"fingerprint": name, "looks": fingerprint(data, tokenizer), "tasks": len(tasks)}
        with _names_disk_fault(shown):
            _begin(work, plan)
        done = _FinishedTasks(work, len(tasks))
        done.update_marks()
        if len(done.stores):
            say(f"going on  {len(done.stores):,} of {len(tasks):,} tasks are done")
        if done.missing():
            lost_worker = _run_tasks(preparation, tokenizer, tasks, work, out.name, lambda: on_progress(done.look()))
            if executor == "slurm":
                return Submitted(len(done.missing()))
            done.update_marks()
            if done.missing():
                raise _unfinished(done, work, lost_worker)
        shards = [done.stores[rank] for rank in range(len(tasks))]
        counts = _sum_counts(data.sources, tasks, shards)
        _check_shares(counts, data)
        _check_documents(counts, sum(map(len, shards)), data)
        say(f"joining   {len(shards):,} shards")
        for shard in shards:
            _verify(shard)
        with _names_disk_fault(shown):
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
    on_progress(_progress("tokens reused", [store]))
    return store


def _begin(work: Path, plan: dict[str, Any]) -> None:
    """Go on with what is there if it is of this plan. Of another plan, remove what holds no documents.

    Raises:
        UserError: documents of another plan are done there.
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


def _make_executor(
    preparation: Preparation, tokenizer: "PreTrainedTokenizerFast", tasks: Sequence[Task], work: Path, name: str
) -> Any:
    from datatrove.utils.logging import logger

    from torchtrain.data import blocks

    logger.remove()  # what this process has to say goes through `say`
    settings, folder = preparation.prepare, work.absolute()
    workers = min(settings.workers or usable_cores(), len(tasks))
    one_thread = settings.executor != "local"
    pipeline = [
        blocks.ReadRecords(preparation.data.sources, tasks),
        blocks.WriteShard(folder / SHARDS, preparation.data, tasks, tokenizer, one_thread),
    ]
    return blocks.make_executor(settings, pipeline, len(tasks), workers, folder / LOGS, name)


def _show_script(
    preparation: Preparation, tokenizer: "PreTrainedTokenizerFast", tasks: Sequence[Task], work: Path, name: str
) -> Submitted:
    """Return Slurm's script. The folder of logs that datatrove makes for it does not stay."""
    logs = work / LOGS / "slurm_logs"
    missing = [folder for folder in (logs, *logs.parents) if not folder.exists()]
    try:
        return Submitted(len(tasks), _make_executor(preparation, tokenizer, tasks, work, name).script())
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _run_tasks(
    preparation: Preparation,
    tokenizer: "PreTrainedTokenizerFast",
    tasks: Sequence[Task],
    work: Path,
    name: str,
    on_task: Callable[[], None],
) -> bool:
    """Run what is not done; of Slurm, submit it. Return whether a worker was killed.

    Raises:
        UserError: Slurm or Ray is not here.
        TasksUnfinished: Ray does not start.
    """
    executor = _make_executor(preparation, tokenizer, tasks, work, name)
    shutil.rmtree(work / FAILURES, ignore_errors=True)
    if preparation.prepare.executor == "local":
        executor.run(on_task)
        return executor.lost_worker
    if preparation.prepare.executor == "ray":
        _run_by_ray(executor, preparation.prepare.workers)
        on_task()
    else:
        try:
            executor.run()
        except FileNotFoundError:
            raise UserError("prepare.executor slurm: there is no sbatch here; run it where Slurm is") from None
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
        except Exception as error:  # ray raises that itself, where a machine is too slow for it
            raise TasksUnfinished(
                f"Ray does not start: {quoted_reason(error)}; run the command again, or take prepare.executor local"
            ) from None
    try:
        executor.run()
    finally:
        if own:
            ray.shutdown()


def _unfinished(done: "_FinishedTasks", work: Path, lost_worker: bool) -> Exception:
    """Return what to raise of tasks that are not done: the user's mistakes, if they failed of these."""
    reasons = []
    for rank in done.missing():
        with suppress(OSError):
            reasons.append((work / FAILURES / f"{rank:05d}").read_text(encoding="utf-8").strip())
    # A disk may be too full to take the reason, too: the file is there and empty.
    named = list(dict.fromkeys(reason or f"{quoted(work)} cannot be written: the disk is full" for reason in reasons))
    left = f"{len(done.missing()):,} of {done.tasks:,} tasks are not done; the others are kept"
    if named:
        more = f" (and {len(named) - _MOST_NAMED} more reasons)" if len(named) > _MOST_NAMED else ""
        return UserError(f"{'; '.join(named[:_MOST_NAMED])}{more}: {left}: correct it and run the same command again")
    what = "a worker was killed (by the system, if memory ran out)" if lost_worker else "workers ended without a reason"
    return TasksUnfinished(f"{what}: {left}: run the same command again ({work / LOGS})")


class _FinishedTasks:
    """Which tasks are done: those whose shard is there, whatever a mark says."""

    def __init__(self, work: Path, tasks: int) -> None:
        self._work, self.tasks = work, tasks
        self.stores: dict[int, TokenStore] = {}

    def missing(self) -> list[int]:
        return [rank for rank in range(self.tasks) if rank not in self.stores]

    def look(self) -> PreparationProgress:
        """Look at what is there now, and return how far that is."""
        for rank in self.missing():
            path = self._work / SHARDS / f"{rank:05d}"
            if not path.exists():
                continue
            try:
                self.stores[rank] = TokenStore.open(path)
            except UserError:  # damaged: it is made again
                shutil.rmtree(path, ignore_errors=True)
        return _progress(f"task {len(self.stores):,} of {self.tasks:,}", self.stores.values())

    def update_marks(self) -> None:
        """Let datatrove's marks say what is there: a task without a shard is to be done, one with a shard is not."""
        self.look()
        marks = self._work / LOGS / "completions"
        marks.mkdir(parents=True, exist_ok=True)
        for rank in range(self.tasks):
            if rank in self.stores:
                (marks / f"{rank:05d}").touch()
            else:
                (marks / f"{rank:05d}").unlink(missing_ok=True)


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
    """Read a shard again before it counts; one that has changed is removed, so that its task is done again."""
    try:
        shard.verify()
    except UserError as error:
        shutil.rmtree(shard.folder, ignore_errors=True)
        raise TasksUnfinished(f"{error}: it was removed; run the same command again") from None
