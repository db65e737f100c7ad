"""Try every known bug on a gate. The correct code runs first, on all cases. Then each bug runs on its likeliest cases.

The oracle's side of a case is computed once. A bug runs only the candidate's side, until one case catches it.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anchorline.errors import UserError
from parity_tests.gate.candidate import candidate_side, why_not_here
from parity_tests.gate.case import TINY, GateCase, resolve
from parity_tests.gate.judge import judge_case, report_of, run_case
from parity_tests.gate.spec import CaseSpec, Gate, expand
from parity_tests.gate.truth import Oracle, OracleArrays
from parity_tests.report.schema import CaseReport
from parity_tests.zoo import Bug, discover

Progress = Callable[[str, int, int], None]  # what was done, how many steps are done, of how many

NEAR = 5  # a bug whose largest ratio is below needs a sharper case
_DTYPES_BY_POWER = ("float32", "float16", "bfloat16")  # the finer, the more it shows


@dataclass(frozen=True)
class Kill:
    """What became of one bug."""

    bug: Bug
    case: CaseReport | None  # what caught it; None: nothing did
    cases_tried: int
    reversible: bool  # the candidate without the bug is bitwise what it was before
    seconds: float
    broken: str | None = None  # the error of a patch that no longer fits the candidate; no case ran

    @property
    def caught(self) -> bool:
        """Whether some case caught the bug."""
        return self.case is not None

    @property
    def margin(self) -> float:
        """The largest error over allowance of the case that caught it; infinite where it raises or an array is gone."""
        if self.case is None:
            return 0.0
        return max((m.ratio for m in self.case.measures), default=0.0) if self.case.problem is None else float("inf")


@dataclass(frozen=True)
class ZooReport:
    """Which bugs a gate catches, and what it says of the correct code."""

    title: str
    correct: list[CaseReport]
    kills: list[Kill]
    seconds: float
    elsewhere: list[Bug] = field(default_factory=list)  # caught by a configuration of their own, not tried here

    @property
    def false_alarms(self) -> list[CaseReport]:
        """Cases that fail on the correct code."""
        return [case for case in self.correct if not case.passed]

    @property
    def survivors(self) -> list[Kill]:
        """Bugs that no case caught, those with a broken patch among them."""
        return [kill for kill in self.kills if not kill.caught]

    @property
    def passed(self) -> bool:
        """No false alarm, every bug that was tried is caught, and each left the candidate as it found it."""
        sound = all(kill.caught and kill.reversible for kill in self.kills)
        return any(case.passed for case in self.correct) and not self.false_alarms and sound


def run_zoo(config: Gate, names: Sequence[str] | None = None, progress: Progress | None = None) -> ZooReport:
    """Run the cases of a gate that this machine can run against the zoo.

    config: the gate.
    names: bugs to try; None tries all but those that only another configuration catches.
    progress: called with a line on what was done, how many steps are done and how many there are.
    Raises UserError: a name that no bug has; no case runs here; or a model of which the oracle has no decoder.
    """
    started = time.perf_counter()
    chosen = choose(names)
    elsewhere = [] if names is not None else [bug for bug in chosen if bug.caught_by]
    chosen = [bug for bug in chosen if bug not in elsewhere]
    reasons = {spec: why_not_here(spec) for spec in expand(config)}
    specs = [spec for spec, reason in reasons.items() if reason is None]
    if not specs:
        raise UserError(f"no case of the gate runs on this machine; the first: {next(iter(reasons.values()))}")
    for spec in {(spec.model, spec.against): spec for spec in specs}.values():
        if (family := resolve(spec).unknown_family) is not None:
            raise UserError(
                f"model {spec.model}: the oracle has no decoder of {family}, which the zoo needs; leave the model out"
            )
    steps = len(specs) + len(chosen)
    tries, correct, kills = Tries(), [], []
    for spec in specs:
        correct.append(run_case(spec, tries.oracle))
        if progress:
            word = "passes" if correct[-1].passed else "FALSE ALARM"
            progress(f"correct code on {spec.id}: {word}", len(correct), steps)
    for bug in chosen:
        kills.append(tries.try_bug(bug, order(bug, specs)))
        what = f"{bug.name}: {'caught' if kills[-1].caught else kills[-1].broken or 'SURVIVES'}"
        if progress:
            progress(what, len(correct) + len(kills), steps)
    return ZooReport(config.title, correct, kills, time.perf_counter() - started, elsewhere)


def choose(names: Sequence[str] | None) -> list[Bug]:
    """The bugs of these names, in the order given; None is all. Raises UserError for a name that no bug has."""
    known = discover()
    for name in names or ():
        if name not in known:
            raise UserError(f"bug {name!r}: not in the zoo; choose from {', '.join(known)}")
    return list(known.values()) if names is None else [known[name] for name in names]


def order(bug: Bug, specs: Iterable[CaseSpec]) -> list[CaseSpec]:
    """The cases that run the bug's stage: those it likely shows in first, then the finer dtype, then the cheaper ones.

    The plainest come before those far out, where even float32 errs much and allows much.
    """

    def unlikely(spec: CaseSpec) -> tuple[int, int, bool, int, int]:
        wanted = {name: (values,) if isinstance(values, str) else values for name, values in bug.likely.items()}
        missed = sum(str(getattr(spec, name)) not in values for name, values in wanted.items())
        real = spec.model not in TINY
        return missed, _DTYPES_BY_POWER.index(spec.dtype), real, spec.tokens, spec.position_offset

    return sorted((spec for spec in specs if bug.stage in spec.stages), key=unlikely)


class Tries:
    """Tries bugs; keeps what they share: the oracle's arrays, and a digest of each case's candidate without a bug."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self._clean: dict[CaseSpec, str | None] = {}  # None where the case fails without a bug, and says nothing of one

    def try_bug(self, bug: Bug, specs: Iterable[CaseSpec]) -> Kill:
        """Run the candidate with the bug on case after case, until one catches it.

        A patch that raises anything but a UserError no longer fits, and catches nothing.
        """
        started, tried = time.perf_counter(), 0

        def kill(report: CaseReport | None, reversible: bool = True, broken: str | None = None) -> Kill:
            return Kill(bug, report, tried, reversible, time.perf_counter() - started, broken)

        for spec in (only(spec, bug.stage) for spec in specs):
            case = resolve(spec)
            arrays = self.oracle.side(case)
            if spec not in self._clean:
                candidate = candidate_side(case)
                self._clean[spec] = digest_of(candidate) if judge_case(case, candidate, arrays).passed else None
            if self._clean[spec] is None:
                continue
            try:
                report = _judge_with(bug, case, arrays)
            except (Exception, SystemExit) as error:
                return kill(None, broken=f"{type(error).__name__}: {' '.join(str(error).split())}")
            tried += 1
            if not report.passed:
                return kill(report, digest_of(candidate_side(case)) == self._clean[spec])
        return kill(None)


def _judge_with(bug: Bug, case: GateCase, oracle: OracleArrays) -> CaseReport:
    """Judge the candidate with the bug, after the bug is gone. What the trainer refuses is caught."""
    try:
        with bug.apply():
            candidate = candidate_side(case)
    except UserError as error:
        return report_of(case.spec, problem=f"the trainer refuses: {error}")
    return judge_case(case, candidate, oracle)


def only(spec: CaseSpec, stage: str) -> CaseSpec:
    """The same case with this stage alone: what a bug does to the others costs time and says nothing new."""
    return spec.model_copy(update={"stages": (stage,)})


def digest_of(candidate: Mapping[str, np.ndarray]) -> str:
    """A digest of every bit of a candidate's arrays, their names, shapes and dtypes."""
    digest = hashlib.sha256()
    for name in sorted(candidate):
        array = np.ascontiguousarray(candidate[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def show(report: ZooReport) -> Any:
    """The kill table, for rich."""
    from rich.markup import escape
    from rich.table import Table

    survivors, alarms = len(report.survivors), len(report.false_alarms)
    caption = (
        f"{len(report.kills) - survivors} of {len(report.kills)} bugs caught, {alarms} false alarms in "
        f"{len(report.correct)} cases of the correct code, {report.seconds:.0f} s"
    )
    near = [f"{kill.bug.name} {kill.margin:.2g}" for kill in report.kills if kill.caught and kill.margin < NEAR]
    caption += f"; largest error below {NEAR} times its allowance: {', '.join(near) or 'of no bug'}"
    table = Table(title=f"Kill table · {escape(report.title)}", caption=caption)
    for column in ("bug", "where it happened", "caught by"):
        table.add_column(column, overflow="fold")
    table.add_column("largest error / allowance", justify="right")
    table.add_column("s", justify="right")
    for kill in report.kills:
        first = kill.case.first_divergence if kill.case else None
        if kill.case:
            by = f"{escape(kill.case.id)}\n[bold]{escape(first.name if first else kill.case.problem or '')}[/]"
        elif kill.broken:
            by = f"[bold red]PATCH BROKEN[/] {escape(kill.broken)}"
        else:
            by = f"[bold red]SURVIVES[/] {kill.cases_tried} cases"
        if not kill.reversible:
            by += "\n[bold red]NOT REVERSIBLE[/]"
        ratio = f"{kill.margin:.3g}" if first else ""
        table.add_row(_name(kill.bug), escape(kill.bug.where), by, ratio, f"{kill.seconds:.1f}")
    for bug in report.elsewhere:
        table.add_row(_name(bug), escape(bug.where), f"[dim]not tried here: {bug.caught_by}[/]")
    return table


def _name(bug: Bug) -> str:
    return f"[bold]{bug.name}[/]\n{bug.what}"
