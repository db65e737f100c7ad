"""A run of the gate: case after case, each kept as soon as it is finished, then the report in three forms."""

import difflib
import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError

from anchorline.environment import git_state, processor, versions
from anchorline.errors import UserError
from anchorline.files import replace_file
from parity_tests.gate.case import run_case
from parity_tests.gate.material import TINY, source
from parity_tests.gate.sources import ROOT, digest_of
from parity_tests.gate.spec import CaseSpec, GateConfig, expand
from parity_tests.gate.truth import forget
from parity_tests.report.html import render
from parity_tests.report.junit import to_junit
from parity_tests.report.schema import Case, Environment, Report, write_report

LIBRARIES = ("torch", "transformers", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "pydantic", "anchorline")

TellCase = Callable[[Case, int, int], None]  # the case, its number, how many there are


class _Kept(BaseModel):
    """A finished case on disk, and what its numbers depend on."""

    key: str
    case: Case


def run_gate(
    config: GateConfig,
    out: Path | None = None,
    only: str | None = None,
    progress: TellCase | None = None,
    command: str = "parity run",
) -> Report:
    """Judge every case of a gate.

    Args:
        config: the gate.
        out: where `report.json`, `report.html` and `junit.xml` go, and `cases/` with each finished case: a run that was
            interrupted goes on from there while the case, the sources that compute it and the libraries stay the same.
            None: nowhere.
        only: the id of the one case to run.
        progress: called after each case.
        command: how the run was started, for the report.

    Raises:
        UserError: no case of that id; a model that does not exist; `out` cannot be written.
    """
    started, created = time.perf_counter(), datetime.now(UTC)
    specs = expand(config)
    if only is not None:
        specs = [spec for spec in specs if spec.id == only] or _no_such_case(only, specs)
    if out is not None:
        _make_folder(out)
    cases = []
    for number, spec in enumerate(specs, start=1):
        cases.append(_kept_or_run(spec, out))
        last_of_seed = number == len(specs) or specs[number].seed != spec.seed
        if spec.model not in TINY or last_of_seed:
            forget()
        if progress:
            progress(cases[-1], number, len(specs))
    report = Report(
        title=config.title,
        created=created.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - started,
        command=command,
        environment=environment(),
        cases=cases,
    )
    if out is not None:
        write(report, out)
    return report


def write(report: Report, out: Path) -> None:
    """Leave the report in its three forms."""
    _make_folder(out)
    write_report(report, out / "report.json")
    replace_file(out / "report.html", render(report).encode())
    replace_file(out / "junit.xml", to_junit(report).encode())


def environment() -> Environment:
    """Where this process runs."""
    commit, dirty = git_state(ROOT)
    return Environment(
        versions=versions(LIBRARIES),
        hardware=_hardware(),
        threads=torch.get_num_threads(),
        git_commit=commit,
        git_dirty=dirty,
    )


def _kept_or_run(spec: CaseSpec, out: Path | None) -> Case:
    if out is None:
        return run_case(spec)
    path = out / "cases" / f"{spec.id}.json"
    models = [_fingerprint_of_model(model) for model in (spec.model, spec.against) if model not in (None, *TINY)]
    key = hashlib.sha256(f"{spec.model_dump_json()} {_fingerprint()} {models}".encode()).hexdigest()
    try:
        kept = _Kept.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError, UnicodeDecodeError):
        kept = None
    if kept is None or kept.key != key:
        kept = _Kept(key=key, case=run_case(spec))
        # What could not be judged may be, the next time: memory was short, a GPU was busy.
        if kept.case.problem is None and kept.case.skipped is None:
            replace_file(path, kept.model_dump_json().encode())
    return kept.case


def _fingerprint_of_model(model: str) -> str:
    """Of every file that a model is read from: a checkpoint is written anew under the same name."""
    digest = hashlib.sha256()
    for file in sorted(Path(source(model)).glob("*")):
        if file.suffix in (".json", ".safetensors"):
            with file.open("rb") as stream:
                digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


@cache
def _fingerprint() -> str:
    """Of all but the case that its numbers depend on: the sources that compute it, libraries, machine, threads."""
    digest = hashlib.sha256(f"{versions(LIBRARIES)} {_hardware()}".encode())
    digest.update(f"{torch.get_num_threads()} {digest_of(root=ROOT)}".encode())
    return digest.hexdigest()


@cache
def _hardware() -> str:
    cpu = processor()
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch.cuda.is_available() else cpu


def _make_folder(out: Path) -> None:
    """Before anything is computed, so that nothing is lost."""
    try:
        (out / "cases").mkdir(parents=True, exist_ok=True)
        (out / "cases" / ".probe").touch()
        (out / "cases" / ".probe").unlink()
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}; name a folder that can be written") from None


def _no_such_case(only: str, specs: list[CaseSpec]) -> list[CaseSpec]:
    ids = [spec.id for spec in specs]
    nearest = difflib.get_close_matches(only, ids, n=1, cutoff=0.0)[0]
    raise UserError(f"case {only!r}: none of the {len(ids)} of this configuration; the nearest is {nearest}")
