"""Two reports side by side: what moved.

A case is the same case in both reports if it has the same id, a measure if it has the same name in the same case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parity_tests.report.schema import CaseReport, Report

# A ratio counts as moved if it has changed by this factor; reruns of one computation do not move at all.
FACTOR = 1.5


@dataclass(frozen=True)
class Moved:
    """One measure whose error over allowance is another in `b`."""

    case: str
    measure: str
    before: float
    after: float

    @property
    def factor(self) -> float:
        """How many times larger the larger is; infinite where the smaller is 0."""
        low, high = sorted((self.before, self.after))
        return 1.0 if low == high else high / low if low else float("inf")


@dataclass(frozen=True)
class Changed:
    """One case whose verdict is another in `b`."""

    case: str
    before: str
    after: str
    words: str  # of the report in which it does not pass


@dataclass(frozen=True)
class Diff:
    """What moved from report `a` to report `b`."""

    worse: list[Changed]
    better: list[Changed]
    moved: list[Moved]  # the largest factor first
    gone: list[str]  # cases and arrays that were judged in `a` alone, but for those that were named
    only_b: list[str]
    failed_only_b: list[str]
    settings: list[str]  # what else differs: versions, hardware, commit
    same: int  # cases in both with the same verdict
    judged: int  # arrays that were judged in both

    @property
    def got_worse(self) -> bool:
        """Whether a case broke, a new one does not pass, something judged is gone, or nothing was judged in both."""
        return bool(self.worse or self.failed_only_b or self.gone) or not self.judged


def verdict(case: CaseReport) -> str:
    """`passed`, `broken`, `not judged` or `skipped`."""
    if case.skipped is not None:
        return "skipped"
    if case.problem is not None:
        return "not judged"
    return "passed" if case.passed else "broken"


_RANK = {"passed": 0, "skipped": 1, "broken": 2, "not judged": 2}


def diff(a: Report, b: Report, gone: Sequence[str] = ()) -> Diff:
    """Compare two reports.

    a, b: the earlier and the later one.
    gone: what `b` may lack without being worse: patterns (`*` is any text) of `case` or `case:array`.
    """
    first, second = ({case.id: case for case in report.cases} for report in (a, b))
    shared = [name for name in first if name in second]
    worse, better, moved, judged = [], [], [], 0
    missing = [name for name in first if name not in second]
    for name in shared:
        before, after = first[name], second[name]
        if verdict(before) != verdict(after):
            broken = after if _RANK[verdict(after)] >= _RANK[verdict(before)] else before
            change = Changed(name, verdict(before), verdict(after), _words(broken))
            (worse if broken is after else better).append(change)
        moved += _find_moved(before, after)
        names = {measure.name for measure in after.measures}
        judged += sum(measure.name in names for measure in before.measures)
        if verdict(after) in ("passed", "broken"):  # of the others the verdict says it
            missing += [f"{name}:{measure.name}" for measure in before.measures if measure.name not in names]
    return Diff(
        worse=worse,
        better=better,
        moved=sorted(moved, key=lambda move: move.factor, reverse=True),
        gone=[name for name in missing if not any(fnmatchcase(name, pattern) for pattern in gone)],
        only_b=[name for name in second if name not in first],
        failed_only_b=[
            name for name, case in second.items() if name not in first and verdict(case) in ("broken", "not judged")
        ],
        settings=_settings(a, b),
        same=len(shared) - len(worse) - len(better),
        judged=judged,
    )


def _find_moved(before: CaseReport, after: CaseReport) -> list[Moved]:
    earlier = {measure.name: measure for measure in before.measures}
    moves = [
        Moved(after.id, measure.name, earlier[measure.name].ratio, measure.ratio)
        for measure in after.measures
        if measure.name in earlier
    ]
    return [move for move in moves if move.factor >= FACTOR]


def _words(case: CaseReport) -> str:
    first = case.first_divergence
    return case.problem or case.skipped or (first.words if first else "")


def _settings(a: Report, b: Report) -> list[str]:
    before, after = a.environment, b.environment
    pairs = {"hardware": (before.hardware, after.hardware), "threads": (before.threads, after.threads)}
    pairs["commit"] = (before.git_commit, after.git_commit)
    for name in sorted(before.versions.keys() | after.versions.keys()):
        pairs[name] = (before.versions.get(name), after.versions.get(name))
    return [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]


def format_diff(found: Diff, limit: int = 20) -> str:
    """Say line by line what got worse, what got better, what moved most, what is gone and what is new."""
    lines = []
    for title, changes in (("worse", found.worse), ("better", found.better)):
        lines += [f"{title}: {change.case}: {change.before} -> {change.after}: {change.words}" for change in changes]
    for move in found.moved[:limit]:
        lines.append(f"moved: {move.case}: {move.measure}: ratio {move.before:.3g} -> {move.after:.3g}")
    if len(found.moved) > limit:
        lines.append(f"moved by {FACTOR} times or more: {len(found.moved) - limit} others")
    for title, names in (("gone", found.gone), ("new", found.only_b)):
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        lines += [f"{title}: {', '.join(names[:limit])}{more}"] if names else []
    return "\n".join(lines + [f"differs: {line}" for line in found.settings])
