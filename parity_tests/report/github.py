"""A report for others' pages: annotations of a GitHub workflow, and a badge for a README."""

import json

from parity_tests.report.schema import Report
from parity_tests.report.verdict import in_words


def annotations(report: Report) -> list[str]:
    """A workflow command for each case that does not pass: GitHub shows it at the commit."""
    lines = []
    for case in report.cases:
        if not case.passed:
            kind, start = ("error", "") if case.failed else ("notice", "not run: ")
            words = _escape(f"{start}{case.reasons[0]}")
            lines.append(f"::{kind} title={_escape(f'parity {case.id}', ':,')}::{words}")
    return lines


def to_badge(report: Report, kind: str = "reference") -> str:
    """`badge.json`, as shields.io's endpoint badge reads it. kind: what is allowed (`in_words`)."""
    judged = [case for case in report.cases if case.skipped is None]
    failed = sum(case.failed for case in judged)
    of = f"{len(judged)} case{'s' * (len(judged) != 1)}"
    message = f"{failed} of {of} differ" if failed else f"{of} the same"
    color = "red" if failed else "brightgreen"
    if kind != "reference":  # of one dump, and no proof
        message, color = (
            in_words(report, kind).partition(":")[0].lower(),
            "red" if failed and kind == "floor" else "blue",
        )
    if not judged:
        message, color = "not judged", "lightgrey"
    return json.dumps({"schemaVersion": 1, "label": "parity", "message": message, "color": color}) + "\n"


def _escape(text: str, more: str = "") -> str:
    """As GitHub's toolkit does: of a property, colons and commas too."""
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{more}" else c for c in text)
