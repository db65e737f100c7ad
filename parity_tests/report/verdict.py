"""The verdict of a report in words, as `parity run` and `parity compare` print it."""

from parity_tests.report.names import whole
from parity_tests.report.schema import Report


def in_words(report: Report, kind: str = "reference") -> str:
    """The verdict. kind: what is allowed: `reference`, `floor` (the truth's own rounding) or `difference` (nothing)."""
    cases = [case for case in report.cases if case.skipped is None]
    if not cases:
        return f"NOT JUDGED: no case can run here: {report.cases[0].skipped}"
    failed, several = [case for case in cases if case.failed], len(report.cases) > 1
    measures = [(m.ratio, m.name, case.id) for case in cases for m in case.measures]
    count = len({(whole(m.name), case.id) for case in cases for m in case.measures})  # ranks are one
    floor = "; noise floor only, not a proof" if kind == "floor" else ""
    if kind == "difference":
        if not failed:
            return f"IDENTICAL: {count} arrays are the same, number for number"
        broken = len({whole(m.name) for case in cases for m in case.measures if not m.passed})
        return f"A DIFFERENCE, not judged: {broken} of {count} arrays differ; the first: {failed[0].reasons[-1]}"
    if failed:
        said = "BEYOND THE NOISE FLOOR" if floor and failed[0].first_divergence else "DIFFERENT"
        which = f" [{failed[0].id}]; {len(failed)} of {len(cases)} cases fail" if several else ""
        return f"{said}: {'; '.join(reversed(failed[0].reasons))}{which}{floor}"
    ratio, name, where = max(measures)
    said, of = "WITHIN THE NOISE FLOOR" if floor else "SAME", f" of {len(cases)} cases" if several else ""
    skipped = len(report.cases) - len(cases)
    also = f", {skipped} cases cannot run here" if skipped else ""
    worst = f"at worst {ratio:.2f} of it ({name}{f' in {where}' if several else ''})"
    return f"{said}: {count} arrays{of} within their allowance{also}, {worst}{floor}"
