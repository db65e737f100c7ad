"""A run of the gate: case after case, each kept as soon as it is finished, then the report in four forms."""

import difflib
import hashlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions
from multiprocessing import get_context
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from transformers.utils import logging

from anchorline.command import Leave
from anchorline.environment import end_with_parent, processor
from anchorline.errors import UserError
from anchorline.files import replace_file
from parity_tests.gate.case import TINY, find_folder
from parity_tests.gate.judge import run_case
from parity_tests.gate.spec import CaseSpec, Gate, expand
from parity_tests.gate.truth import Oracle
from parity_tests.report.schema import CaseReport, Environment, Report
from parity_tests.report.write import make_folder, write

ROOT = Path(__file__).parents[2]
PACKAGES = ("anchorline", "jaxref", "torchtrain", "parity_tests")  # whose sources a finished case depends on

# Everything that computes, whether it is installed or not, and what reads a case.
LIBRARIES = (
    *("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel", "transformers"),
    *("safetensors", "tokenizers"),
    *("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "ml_dtypes", "pydantic", "anchorline"),
)

TellCase = Callable[[CaseReport, int, int], None]  # the case, its number, how many there are


class _Kept(BaseModel):
    """A finished case on disk, and what its numbers depend on."""

    key: str
    case: CaseReport


def run_gate(
    config: Gate,
    out: Path | None = None,
    only: str | None = None,
    progress: TellCase | None = None,
    command: str = "parity run",
    workers: int = 1,
) -> Report:
    """Judge every case of a gate: those that share the oracle's work one after another, and then it is forgotten.

    config: the gate.
    out: where `report.json`, `report.html`, `junit.xml` and `badge.json` go, and `cases/` with each finished case: a
        run that was interrupted goes on from there while the case, the sources that compute it and the libraries stay
        the same. None: nowhere.
    only: the id of the one case to run.
    progress: called after each case.
    command: how the run was started, for the report.
    workers: processes that share the cases, each with its part of the cores; 1: this process alone.
    Raises UserError: no case of that id; a model that does not exist; `out` cannot be written; a worker was killed.
    """
    started, created = time.perf_counter(), datetime.now(UTC)
    specs = expand(config)
    if only is not None:
        specs = [spec for spec in specs if spec.id == only] or _no_such_case(only, specs)
    if out is not None:
        make_folder(out / "cases")
    threads = torch.get_num_threads()
    groups: dict[CaseSpec, list[CaseSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.shared, []).append(spec)
    found: dict[str, CaseReport] = {}
    if workers == 1:
        run = _run_in_turn(list(groups.values()), out)
    else:
        threads = max(1, threads // workers)
        run = _run_in_processes(list(groups.values()), out, workers, threads)
    for case in run:
        found[case.id] = case
        if progress:
            progress(case, len(found), len(specs))
    report = Report(
        title=config.title,
        created=created.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
        command=command,
        environment=environment(threads),
        cases=[found[spec.id] for spec in specs],
    )
    if out is not None:
        write(report, out)
    return report


def silence_transformers() -> None:
    """Let transformers print mistakes alone: a gate prints a line a case."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def environment(threads: int | None = None) -> Environment:
    """Where this process runs; `threads` those of PyTorch, where they are not this process's."""
    return Environment.here(LIBRARIES, _hardware(), threads or torch.get_num_threads(), ROOT)


def _run_in_turn(groups: list[list[CaseSpec]], out: Path | None) -> Iterator[CaseReport]:
    for group in groups:
        oracle = Oracle()
        for spec in group:
            yield _kept_or_run(spec, oracle, out)


def _run_in_processes(
    groups: list[list[CaseSpec]], out: Path | None, workers: int, threads: int
) -> Iterator[CaseReport]:
    """Yield the cases of a group when all of them are done, groups in the order in which they end."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (threads,))
    try:
        for future in as_completed([pool.submit(_run_group, group, out) for group in groups]):
            yield from future.result()
    except BrokenProcessPool:
        raise Leave(f"--workers {workers}: a worker was killed, perhaps for want of memory; give fewer", 1) from None
    except BaseException:  # an interruption does not wait for the cases at work
        for process in pool._processes.values():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked is interrupted, and ends its workers
    end_with_parent()
    torch.set_num_threads(threads)
    silence_transformers()


def _run_group(group: list[CaseSpec], out: Path | None) -> list[CaseReport]:
    return list(_run_in_turn([group], out))


def _kept_or_run(spec: CaseSpec, oracle: Oracle, out: Path | None) -> CaseReport:
    if out is None:
        return run_case(spec, oracle)
    path = out / "cases" / f"{spec.id}.json"
    models = [_digest_of_model(model) for model in (spec.model, spec.against) if model not in (None, *TINY)]
    key = hashlib.sha256(f"{spec.model_dump_json()} {_digest_of_code()} {models}".encode()).hexdigest()
    try:
        kept = _Kept.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError, UnicodeDecodeError):
        kept = None
    if kept is None or kept.key != key:
        kept = _Kept(key=key, case=run_case(spec, oracle))
        # What could not be judged may be, the next time: memory was short, a GPU was busy.
        if kept.case.problem is None and kept.case.skipped is None:
            replace_file(path, kept.model_dump_json().encode())
    return kept.case


def _digest_of_model(model: str) -> str:
    """Of every file that a model is read from: a checkpoint is written anew under the same name."""
    digest = hashlib.sha256()
    for file in sorted(Path(find_folder(model)).glob("*")):
        if file.suffix in (".json", ".safetensors"):
            with file.open("rb") as stream:
                digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


@cache
def _digest_of_code() -> str:
    """Return a digest of what a case's numbers depend on besides the case: sources, packages, machine, threads."""
    packages = sorted((package.name, package.version) for package in distributions())
    digest = hashlib.sha256(f"{packages} {_hardware()} {torch.get_num_threads()}".encode())
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if "tests" not in path.relative_to(ROOT).parts:
            digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@cache
def _hardware() -> str:
    cpu = processor()
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch.cuda.is_available() else cpu


def _no_such_case(only: str, specs: list[CaseSpec]) -> list[CaseSpec]:
    ids = [spec.id for spec in specs]
    nearest = difflib.get_close_matches(only, ids, n=1, cutoff=0.0)[0]
    raise UserError(f"case {only!r}: none of the {len(ids)} of this configuration; the nearest is {nearest}")
