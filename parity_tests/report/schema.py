"""`report.json`, version 2: what a run of the judge found, all that the page, junit.xml, `parity diff` and the zoo
read.

A report holds cases; a case is one model under its settings, or one dump. A case holds measures: one
judged array each, in the order in which the computation makes them. Error and allowance are root mean squares in the
array's own units (`anchorline/tolerance.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anchorline.environment import git_state, versions
from anchorline.errors import UserError
from anchorline.files import replace_file
from anchorline.tolerance import Judged

VERSION = 2
Group = Literal["forward", "loss", "gradients", "step", "trajectory", "run"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Profile(_Part):
    """Error along the sequence: root mean squares over runs of tokens, both rows together."""

    starts: list[int] = Field(description="first token of each run")
    error: list[float]
    allowance: list[float] = Field(description="by the same rule, within the run")


class PartMeasure(_Part, Judged):
    """A part of an array, judged by itself."""

    name: str = Field(description="`token 12 of row 0`, `head 3`, `the mean`, `the scale`, `the angle of pair 7`")
    error: float
    allowance: float


class Measure(_Part, Judged):
    """One judged array."""

    name: str = Field(description="`layers.7.k_rope`, `loss`, `gradients.model.norm.weight`, `run.losses.4`")
    group: Group
    layer: int | None = Field(description="None outside the layers")
    tap: str = Field(description="what of the layer: `k_rope`; the parameter's name without its layer; ...")
    shape: list[int]
    error: float
    allowance: float
    worst: list[int] = Field(description="index of the element that errs most")
    part: PartMeasure | None = Field(default=None, description="the one with the largest ratio, where parts are judged")
    profile: Profile | None = Field(default=None, description="of forward arrays, where the sequence is an axis")


class Divergence(_Part):
    """The first measure that breaks the rule, and what a person would say of it."""

    name: str
    ratio: float
    words: str = Field(description="`layer 7, k after RoPE: 41 times the allowance, from token 512 on`")


class CaseReport(_Part):
    """One cell of a run."""

    id: str = Field(description="unique in the report; the same case has the same id in every report")
    settings: dict[str, str] = Field(description="what was run: model, variant, engine, dtype, ...; or which dumps")
    preset: str = Field(description="what gives the allowance: a rounding preset of the oracle, or in words")
    tokens: int | None = Field(default=None, description="of a row, where a profile ends")
    command: str = Field(description="reproduces this case alone")
    seconds: float
    problem: str | None = Field(
        default=None, description="why the case could not be judged (raised, NaN, shape), in words"
    )
    skipped: str | None = Field(default=None, description="why this machine cannot run the case, in words")
    first_divergence: Divergence | None = None
    notes: list[str] = Field(
        default=[], description="of a dump: whether the error starts there, what passed before, ..."
    )
    measures: list[Measure] = []

    @property
    def verdict(self) -> Literal["passed", "broken", "not judged", "skipped"]:
        """What came out, in a word or two."""
        if self.skipped is not None:
            return "skipped"
        if self.problem is not None:
            return "not judged"
        return "passed" if self.first_divergence is None else "broken"

    @property
    def passed(self) -> bool:
        """Whether the case was judged and every measure keeps the rule."""
        return self.verdict == "passed"

    @property
    def failed(self) -> bool:
        """Whether the case was run and does not pass."""
        return self.verdict in ("broken", "not judged")

    @property
    def reasons(self) -> list[str]:
        """Why it does not pass, the first reason first."""
        first = self.first_divergence
        return list(dict.fromkeys(filter(None, (self.problem, self.skipped, first and first.words))))


class Environment(_Part):
    """Where the run took place."""

    versions: dict[str, str] = Field(description="python, torch, transformers, jax, numpy, anchorline, ...")
    hardware: str
    threads: int
    git_commit: str | None
    git_dirty: bool | None

    @classmethod
    def here(cls, libraries: Sequence[str], hardware: str, threads: int, folder: Path) -> Self:
        """Of this process; the commit is that of the folder."""
        commit, dirty = git_state(folder)
        return cls(versions=versions(libraries), hardware=hardware, threads=threads, git_commit=commit, git_dirty=dirty)


class Report(_Part):
    """The whole of a run."""

    schema_version: Literal[2] = VERSION
    title: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    command: str
    environment: Environment
    cases: list[CaseReport]

    @property
    def passed(self) -> bool:
        """The verdict: some case was run, and every one that was has passed."""
        run = [case for case in self.cases if case.skipped is None]
        return bool(run) and all(case.passed for case in run)


def write_report(report: Report, path: Path) -> None:
    """Write `report.json`."""
    replace_file(path, (report.model_dump_json(indent=1) + "\n").encode())


def read_report(path: Path) -> Report:
    """Read a report. Raises UserError, one line: no file, not JSON, not this version of the schema."""
    if path.is_dir():
        raise UserError(f"report {path}: is a folder; give the report.json in it")
    if not path.is_file():
        raise UserError(f"report {path}: no such file")
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise UserError(
            f"report {path}: not a report of schema version {VERSION}: {' '.join(reason.split())}"
        ) from None
