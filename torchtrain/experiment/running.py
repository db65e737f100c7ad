"""All runs of an experiment, stage after stage: trained to its step, stopped there, measured, gone on with later.

Every run is an ordinary run of `torchtrain train` in a process of its own. A stage takes all runs to its step before
any goes on, so that whenever an experiment is stopped, what it has is complete up to a stage.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from anchorline import settings
from anchorline.environment import usable_cores
from anchorline.errors import UserError, one_line, quoted
from anchorline.files import PARTIAL, replace_file
from torchtrain.checkpoint.folder import step_of
from torchtrain.config import dump_config
from torchtrain.errors import TERMINATED, TasksUnfinished
from torchtrain.experiment.corpus import read_corpus, write_corpus
from torchtrain.experiment.folder import Folder
from torchtrain.experiment.measuring import make_rows, read_measurement, read_rows
from torchtrain.experiment.records import Records, take_over
from torchtrain.experiment.spec import PairedRun, TrainingExperiment, other_setting
from torchtrain.modeling.source import open_tokenizer, resolve_source
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import claim
from torchtrain.run.termination import Termination

_SECONDS_BETWEEN_LOOKS = 1.0
_LINES = 2  # of a failed process' last words
_MEASURE = (sys.executable, "-m", "torchtrain.experiment.measuring")


@dataclass
class _Processes:
    """Those at work. Once `stopped`, none begins."""

    stopped: bool = False
    running: set["subprocess.Popen[bytes]"] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def start(self, command: Sequence[str], log: Path, threads: int | None) -> Iterator["subprocess.Popen[bytes]"]:
        environment = dict(os.environ)
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        with log.open("ab") as said:
            said.write(f"$ {shlex.join(command)}\n".encode())
            said.flush()
            with self.lock:
                if self.stopped:
                    raise _StoppedError
                # A group of its own: an interruption reaches it through us, once, as a wish to save.
                process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, process_group=0)
                self.running.add(process)
        try:
            yield process
        finally:
            with self.lock:
                self.running.discard(process)

    def stop(self) -> None:
        """Ask all to save and end, and wait for them."""
        with self.lock:
            self.stopped = True
            running = list(self.running)
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()


class _StoppedError(Exception):
    """The experiment ends."""


class _FailedError(Exception):
    """A run cannot go on; the message says why."""


def run_experiment(
    experiment: TrainingExperiment,
    path: Path,
    workers: int,
    launch: Sequence[str] = (),
    stages: int | None = None,
    say: Callable[[str], None] = print,
    records: Records | None = None,
) -> None:
    """Train and measure what is not yet.

    Args:
        experiment: what.
        path: its folder, new or one of the same experiment; seeds, arithmetics and variants may have changed.
        workers: runs at work at a time; each has its share of the cores, unless OMP_NUM_THREADS or `launch` is given.
        launch: what starts a training's processes, such as torchrun with its options; default: this Python.
        stages: stop after so many; default: all.
        say: takes a line about each run that comes to a stage.
        records: what was measured elsewhere and is taken over.

    Raises:
        UserError: the folder is of another experiment, it or the records have measured other documents, another process
            is at work in it, or too few documents are long enough to measure.
        TasksUnfinished: some runs failed; the others were taken as far as they go.
        Terminated: by SIGTERM or SIGHUP; all are stopped, saved.
    """
    folder = Folder(path)
    check_folder(experiment, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    with claim(folder.lock):
        _prepare(experiment, folder)
        if records is not None:
            take_over(experiment, folder, records, read_rows(folder.rows).digest)
        _check_measured(experiment, folder)
        cores = usable_cores()
        threads = None if launch else max(1, cores // workers)
        processes, failed = _Processes(), dict[PairedRun, str]()
        work = _Work(folder, experiment.stages[-1], threads, launch, processes)
        with Termination() as termination, _hangups_end(), ThreadPoolExecutor(workers) as pool:
            termination.advice = "what the runs have saved stays, and the same command goes on"
            try:
                for step in experiment.stages[:stages]:
                    left = [cell for cell in experiment.cells() if not folder.measurement(cell, step).is_file()]
                    left = [cell for cell in left if cell not in failed]
                    total = len(list(experiment.cells()))
                    say(f"step {step}: {total - len(left) - len(failed)} of {total} runs are measured")
                    begun = time.monotonic()
                    at_work = {pool.submit(_advance, work, cell, step): cell for cell in left}
                    for done, one in enumerate(as_completed(at_work), start=1):
                        try:
                            line = one.result()
                        except _FailedError as error:
                            failed[at_work[one]] = line = str(error)
                        hours = (time.monotonic() - begun) / done * (len(left) - done) / 3600
                        say(f"{line} · {done} of {len(left)} · about {hours:.1f} h left to step {step}")
            except BaseException:
                processes.stop()
                pool.shutdown(cancel_futures=True)
                raise
    if failed:
        raise TasksUnfinished(
            f"{len(failed)} runs failed, the first: {next(iter(failed.values()))}; the same command tries them again"
        )


def receive(experiment: TrainingExperiment, path: Path, records: Records) -> None:
    """Take over what was measured elsewhere, and train and measure nothing.

    Args:
        experiment: as `run_experiment`.
        path: as `run_experiment`.
        records: of it.

    Raises:
        UserError: as `run_experiment`.
    """
    folder = Folder(path)
    check_folder(experiment, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    with claim(folder.lock):
        folder.clear()
        take_over(experiment, folder, records, read_rows(folder.rows).digest if folder.rows.is_file() else None)


def check_folder(experiment: TrainingExperiment, folder: Folder) -> None:
    """Refuse a folder that is of something else.

    Raises:
        UserError: it holds another experiment, or other files.
    """
    if folder.experiment.is_file():
        found = settings.load(TrainingExperiment, folder.experiment, example="").model_dump(mode="json")
        if other := other_setting(experiment, found):
            raise UserError(
                f"--out {quoted(folder.path)}: holds an experiment with another {other}; choose another folder, or "
                "take the experiment.yaml that lies there"
            )
    elif folder.path.is_dir():
        ours = {folder.lock.name, folder.experiment.name + PARTIAL, folder.train.parent.name}
        if strange := sorted({path.name for path in folder.path.iterdir()} - ours):
            raise UserError(
                f"--out {quoted(folder.path)}: holds something else ({quoted(strange[0])}); choose a new folder"
            )


def _prepare(experiment: TrainingExperiment, folder: Folder) -> None:
    """Make the documents, what models are measured on, and every run's config; last, note what the folder is of.

    Raises:
        UserError: the model or the documents do not fit.
    """
    folder.clear()
    write_corpus(experiment.corpus, folder.train, folder.measured)
    configs = {cell: experiment.config(cell, folder.path, folder.train) for cell in experiment.cells()}
    if not folder.rows.is_file():
        run = next(iter(configs.values()))
        tokenizer = open_tokenizer(
            resolve_source(run.model.source, run.data.cache, trust_remote_code=run.model.trust_remote_code),
            run.model.trust_remote_code,
        )
        texts = [(document.domain, document.text) for document in read_corpus(folder.measured)]
        replace_file(folder.rows, make_rows(texts, tokenizer, run, experiment.measure).model_dump_json().encode())
    for cell, config in configs.items():
        folder.config(cell).parent.mkdir(exist_ok=True)
        folder.log(cell).parent.mkdir(exist_ok=True)
        replace_file(folder.config(cell), dump_config(config).encode())
    replace_file(folder.experiment, settings.dump(experiment.model_dump(mode="json")).encode())


def _check_measured(experiment: TrainingExperiment, folder: Folder) -> None:
    """Refuse measurements of documents that are not these, such as those of another machine with other demo texts."""
    documents = read_rows(folder.rows).digest
    for step in experiment.stages:
        for cell in experiment.cells():
            file = folder.measurement(cell, step)
            if file.is_file() and read_measurement(file).documents != documents:
                raise UserError(f"{quoted(file)}: is of other documents than corpus gives here; choose another --out")


@contextmanager
def _hangups_end() -> Iterator[None]:
    """Take a terminal that is closed as SIGTERM: the runs are no processes of the terminal's group."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@dataclass(frozen=True)
class _Work:
    """What all runs have in common."""

    folder: Folder
    last: int  # step of the last stage
    threads: int | None
    launch: Sequence[str]
    processes: _Processes


def _advance(work: _Work, cell: PairedRun, step: int) -> str:
    """Take a run to a step and measure it there; return a line about it.

    Raises:
        _FailedError: one of its processes failed.
    """
    model = _model_of(work.folder.run(cell), step, work.last)
    if model is None:
        model = _train(work, cell, step)
    out = work.folder.measurement(cell, step)
    asked = [*_MEASURE, *map(str, (work.folder.experiment, work.folder.rows, model, out))]
    with work.processes.start(asked, work.folder.log(cell), work.threads) as process:
        code = process.wait()
    if work.processes.stopped:
        raise _StoppedError
    if code or not out.is_file():
        raise _failure(work.folder, cell, f"measuring it ended with {code}")
    return f"{cell.name} measured after step {step}"


def _train(work: _Work, cell: PairedRun, step: int) -> Path:
    run = work.folder.run(cell)
    verb = ["resume", str(run)] if (run / "run.json").is_file() else ["train", str(work.folder.config(cell))]
    command = [*(work.launch or [sys.executable]), "-m", "torchtrain", *verb]
    with work.processes.start(command, work.folder.log(cell), work.threads) as process:
        code, stopped_by_us = None, False
        while code is None:
            try:
                code = process.wait(_SECONDS_BETWEEN_LOOKS)
            except subprocess.TimeoutExpired:
                # The last stage's model is the run's own, and its process ends by itself.
                if step < work.last and _model_of(run, step, work.last) is not None:
                    stopped_by_us = True
                    process.send_signal(signal.SIGTERM)
                    code = process.wait()
    if work.processes.stopped:
        raise _StoppedError
    model = _model_of(run, step, work.last)
    # torchrun ends with 1 when it is terminated, and Python by the signal when it is on its way out.
    if model is None or (code not in (0, TERMINATED) and not stopped_by_us):
        raise _failure(work.folder, cell, f"its training ended with {code}")
    return model


def _model_of(run: Path, step: int, last: int) -> Path | None:
    """Return the model that a run has left after a step, or None."""
    if not (run / "run.json").is_file():
        return None
    left = RunFolder(run)
    if step == last:
        return left.model if left.finished else None
    return next((path for path in left.exports_of_steps() if step_of(path.name) == step), None)


def _failure(folder: Folder, cell: PairedRun, what: str) -> _FailedError:
    log = folder.log(cell)
    lines = log.read_text(errors="replace").splitlines()
    return _FailedError(f"{cell.name}: {what}: {one_line(' / '.join(lines[-_LINES:]))} (all of it in {quoted(log)})")
