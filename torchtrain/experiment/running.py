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
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anchorline import settings
from anchorline.errors import UserError, quoted
from anchorline.files import replace_file
from torchtrain.checkpoint.folder import step_of
from torchtrain.config import dump_config
from torchtrain.errors import TERMINATED
from torchtrain.experiment.corpus import write_corpus
from torchtrain.experiment.spec import PairedRun, TrainingExperiment
from torchtrain.run.folder import RunFolder
from torchtrain.run.termination import Termination

_SECONDS_BETWEEN_LOOKS = 1.0
_EXTENDABLE = ("seeds", "arithmetics", "variants", "title")  # what may change under runs that exist
_LINES = 2  # of a failed process' last words


@dataclass(frozen=True)
class Folder:
    """Where an experiment lies."""

    path: Path

    @property
    def experiment(self) -> Path:
        """What is run, every default written out."""
        return self.path / "experiment.yaml"

    @property
    def train(self) -> Path:
        """The pieces that are trained on."""
        return self.path / "corpus" / "train.jsonl"

    @property
    def measured(self) -> Path:
        """The documents that are measured on."""
        return self.path / "corpus" / "measured.jsonl"

    def run(self, cell: PairedRun) -> Path:
        """The folder of a run."""
        return self.path / "runs" / cell.name

    def log(self, cell: PairedRun) -> Path:
        """What a run's processes say."""
        return self.path / "logs" / f"{cell.name}.log"

    def config(self, cell: PairedRun) -> Path:
        """The config of a run."""
        return self.path / "configs" / f"{cell.name}.yaml"

    def measurement(self, cell: PairedRun, step: int) -> Path:
        """What was measured of a run after a step."""
        return self.path / "measured" / f"{cell.name}-step-{step}.json"


@dataclass
class _Processes:
    """Those at work. Once `stopped`, none begins."""

    stopped: bool = False
    running: set["subprocess.Popen[bytes]"] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def start(self, command: Sequence[str], log: Path, threads: int) -> Iterator["subprocess.Popen[bytes]"]:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
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


def run_experiment(
    experiment: TrainingExperiment,
    path: Path,
    workers: int,
    launch: Sequence[str] = (),
    stages: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Train and measure what is not yet.

    Args:
        experiment: what.
        path: its folder, new or one of the same experiment; seeds, arithmetics and variants may have changed.
        workers: runs at work at a time; each has its share of the cores.
        launch: what starts a training's processes, such as torchrun with its options; default: this Python.
        stages: stop after so many; default: all.
        say: takes a line about each run that comes to a stage.

    Raises:
        UserError: the folder is of another experiment, or a run fails; the others are stopped, saved.
        Terminated: by SIGTERM; all are stopped, saved.
    """
    folder = Folder(path)
    _claim(experiment, folder)
    write_corpus(experiment.corpus, folder.train, folder.measured)
    for cell in experiment.cells():
        config = experiment.config(cell, path, folder.train)
        folder.config(cell).parent.mkdir(exist_ok=True)
        folder.log(cell).parent.mkdir(exist_ok=True)
        replace_file(folder.config(cell), dump_config(config).encode())
    threads = max(1, (os.cpu_count() or 1) // workers)
    work = [
        (step, cell)
        for step in experiment.stages[:stages]
        for cell in experiment.cells()
        if not folder.measurement(cell, step).is_file()
    ]
    say(f"{len(work)} of {len(experiment.stages[:stages]) * len(list(experiment.cells()))} measurements are left")
    processes = _Processes()
    started, done = time.monotonic(), 0
    with Termination() as termination, ThreadPoolExecutor(workers) as pool:
        termination.advice = "every run is saved, and the same command goes on"
        waiting = iter(work)
        at_work: set[Future[str]] = set()
        try:
            while True:
                for step, cell in waiting:
                    at_work.add(pool.submit(_advance, experiment, folder, cell, step, threads, launch, processes))
                    if len(at_work) == workers:
                        break
                if not at_work:
                    return
                finished, at_work = wait(at_work, return_when=FIRST_COMPLETED)
                for one in finished:
                    line, done = one.result(), done + 1
                    left = (time.monotonic() - started) / done * (len(work) - done)
                    say(f"{line} · {done}/{len(work)} · about {left / 3600:.1f} h left")
        except BaseException:
            processes.stop()
            raise


def _claim(experiment: TrainingExperiment, folder: Folder) -> None:
    """Note what a folder is of.

    Raises:
        UserError: it is of another experiment.
    """
    wanted = experiment.model_dump(mode="json")
    if folder.experiment.is_file():
        found = settings.load(TrainingExperiment, folder.experiment, example="").model_dump(mode="json")
        if other := [name for name in wanted if name not in _EXTENDABLE and wanted[name] != found[name]]:
            raise UserError(
                f"--out {quoted(folder.path)}: holds an experiment with another {other[0]}; choose another folder, or "
                "take the experiment.yaml that lies there"
            )
    elif folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(f"--out {quoted(folder.path)}: holds something else; choose a new folder")
    folder.path.mkdir(parents=True, exist_ok=True)
    replace_file(folder.experiment, settings.dump(wanted).encode())


def _advance(
    experiment: TrainingExperiment,
    folder: Folder,
    cell: PairedRun,
    step: int,
    threads: int,
    launch: Sequence[str],
    processes: _Processes,
) -> str:
    """Take a run to a step and measure it there; return a line about it."""
    model = _model_of(folder.run(cell), step, experiment.stages[-1])
    if model is None:
        model = _train(experiment, folder, cell, step, threads, launch, processes)
    out = folder.measurement(cell, step)
    asked = [sys.executable, "-m", "torchtrain.experiment.measuring"]
    asked += map(str, (folder.experiment, model, folder.measured, out))
    with processes.start(asked, folder.log(cell), threads) as process:
        code = process.wait()
    if processes.stopped:
        raise _StoppedError
    if code or not out.is_file():
        raise _failure(folder, cell, f"measuring it ended with {code}")
    return f"{cell.name} measured after step {step}"


def _train(
    experiment: TrainingExperiment,
    folder: Folder,
    cell: PairedRun,
    step: int,
    threads: int,
    launch: Sequence[str],
    processes: _Processes,
) -> Path:
    run = folder.run(cell)
    verb = ["resume", str(run)] if (run / "run.json").is_file() else ["train", str(folder.config(cell))]
    command = [*(launch or [sys.executable]), "-m", "torchtrain", *verb]
    with processes.start(command, folder.log(cell), threads) as process:
        code = None
        while code is None:
            try:
                code = process.wait(_SECONDS_BETWEEN_LOOKS)
            except subprocess.TimeoutExpired:
                # The last stage's model is the run's own, and its process ends by itself.
                if step < experiment.stages[-1] and _model_of(run, step, experiment.stages[-1]) is not None:
                    process.send_signal(signal.SIGTERM)
                    code = process.wait()
    if processes.stopped:
        raise _StoppedError
    model = _model_of(run, step, experiment.stages[-1])
    if code not in (0, TERMINATED) or model is None:
        raise _failure(folder, cell, f"its training ended with {code}")
    return model


def _model_of(run: Path, step: int, last: int) -> Path | None:
    """Return the model that a run has left after a step, or None."""
    if not (run / "run.json").is_file():
        return None
    left = RunFolder(run)
    if step == last:
        return left.model if left.finished else None
    return next((path for path in left.exports_of_steps() if step_of(path.name) == step), None)


def _failure(folder: Folder, cell: PairedRun, what: str) -> UserError:
    log = folder.log(cell)
    lines: list[Any] = log.read_text(errors="replace").splitlines()
    return UserError(f"{cell.name}: {what}: {' / '.join(lines[-_LINES:])} (all of it in {quoted(log)})")
