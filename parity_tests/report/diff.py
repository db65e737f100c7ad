"""Two reports side by side: what moved.

A case is the same case in both reports if it has the same id, a measure if it has the same name in the same case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from anchorline.errors import some
from parity_tests.report.schema import Report

# A ratio counts as moved if it has changed by this factor; reruns of one computation do not move at all.
FACTOR = 1.5
SHOWN = 20
_RANK = {"passed": 0, "skipped": 1, "broken": 2, "not judged": 2}


@dataclass(frozen=True)
class Diff:
    """What moved from report `a` to report `b`, a line each."""

    worse: list[str]  # cases with another verdict: `ID: passed -> broken: why`
    better: list[str]
    moved: list[str]  # measures whose error over allowance is another in `b`, the largest factor first
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

    def explain(self) -> str:
        """Line by line what got worse, what got better, what moved most, what is gone and new; and the verdict."""
        lines = [f"worse: {line}" for line in self.worse] + [f"better: {line}" for line in self.better]
        lines += [f"moved: {line}" for line in self.moved[:SHOWN]]
        if len(self.moved) > SHOWN:
            lines.append(f"moved by {FACTOR} times or more: {len(self.moved) - SHOWN} others")
        for title, names in (("gone", self.gone), ("new", self.only_b)):
            lines += [f"{title}: {some(names, SHOWN)}"] if names else []
        lines += [f"differs: {line}" for line in self.settings]
        counts = [f"{self.same} with the same verdict", f"{len(self.better)} better", f"{len(self.worse)} worse"]
        counts += [f"{len(self.gone)} gone"] * bool(self.gone) + ["nothing was judged in both"] * (not self.judged)
        counts += [f"{len(self.only_b)} new"] * bool(self.only_b)
        return "\n".join([*lines, f"{'WORSE' if self.got_worse else 'NO WORSE'}: {', '.join(counts)}"])


def diff(a: Report, b: Report, gone: Sequence[str] = ()) -> Diff:
    """Compare two reports.

    a, b: the earlier and the later one.
    gone: what `b` may lack without being worse: patterns (`*` is any text) of `case` or `case:array`.
    """
    first, second = ({case.id: case for case in report.cases} for report in (a, b))
    shared = [name for name in first if name in second]
    worse, better, judged = [], [], 0
    moved: list[tuple[float, str]] = []
    missing = [name for name in first if name not in second]
    for name in shared:
        before, after = first[name], second[name]
        if before.verdict != after.verdict:
            got_worse = _RANK[after.verdict] >= _RANK[before.verdict]
            why = (after if got_worse else before).reasons[0]
            (worse if got_worse else better).append(f"{name}: {before.verdict} -> {after.verdict}: {why}")
        earlier, later = ({m.name: m.ratio for m in case.measures} for case in (before, after))
        both = [array for array in later if array in earlier]
        judged += len(both)
        for array in both:
            low, high = sorted((earlier[array], later[array]))
            factor = 1.0 if low == high else high / low if low else float("inf")
            if factor >= FACTOR:
                moved.append((factor, f"{name}: {array}: ratio {earlier[array]:.3g} -> {later[array]:.3g}"))
        if after.verdict in ("passed", "broken"):  # of the others the verdict says it
            missing += [f"{name}:{array}" for array in earlier if array not in later]
    only_b = [name for name in second if name not in first]
    return Diff(
        worse=worse,
        better=better,
        moved=[line for _, line in sorted(moved, key=lambda move: move[0], reverse=True)],
        gone=[name for name in missing if not any(fnmatchcase(name, pattern) for pattern in gone)],
        only_b=only_b,
        failed_only_b=[name for name in only_b if second[name].failed],
        settings=_settings(a, b),
        same=len(shared) - len(worse) - len(better),
        judged=judged,
    )


def _settings(a: Report, b: Report) -> list[str]:
    before, after = a.environment, b.environment
    pairs = {"hardware": (before.hardware, after.hardware), "threads": (before.threads, after.threads)}
    pairs["commit"] = (before.git_commit, after.git_commit)
    for name in sorted(before.versions.keys() | after.versions.keys()):
        pairs[name] = (before.versions.get(name), after.versions.get(name))
    return [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
