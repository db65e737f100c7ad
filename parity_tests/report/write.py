"""Leave a report in its four forms: for programs, for people, for CI and for a README."""

from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import replace_file
from parity_tests.report.github import to_badge
from parity_tests.report.html import render
from parity_tests.report.junit import to_junit
from parity_tests.report.schema import Report, write_report


def write(report: Report, out: Path, kind: str = "reference") -> None:
    """Leave the report in its four forms. kind: what is allowed (`in_words`)."""
    make_folder(out)
    write_report(report, out / "report.json")
    replace_file(out / "report.html", render(report, kind).encode())
    replace_file(out / "junit.xml", to_junit(report, kind).encode())
    replace_file(out / "badge.json", to_badge(report, kind).encode())


def make_folder(out: Path) -> None:
    """Before anything is computed, so that nothing is lost. Raises UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".probe").touch()
        (out / ".probe").unlink()
        if taken := [
            name for name in ("report.json", "report.html", "junit.xml", "badge.json") if (out / name).is_dir()
        ]:
            raise UserError(f"--out {out}: {taken[0]} in it is a folder; name another folder")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}; name a folder that can be written") from None
