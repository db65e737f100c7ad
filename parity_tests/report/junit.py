"""A report as `junit.xml`, which every CI server reads: a case is a test."""

from collections import Counter
from xml.etree import ElementTree

from anchorline.page import printable
from parity_tests.report.schema import CaseReport, Report
from parity_tests.report.verdict import in_words


def to_junit(report: Report, kind: str = "reference") -> str:
    """One test suite: broken rules are failures, cases that could not be judged errors, skipped ones say why. kind:
    what is allowed (`in_words`).
    """
    found = Counter(case.verdict for case in report.cases)
    counts = {"tests": len(report.cases), "failures": found["broken"], "errors": found["not judged"]}
    counts |= {"skipped": found["skipped"]}
    attributes = {name: str(count) for name, count in counts.items()} | {"time": f"{report.seconds:.3f}"}
    suites = ElementTree.Element("testsuites", attributes | {"name": "parity"})
    suite = ElementTree.SubElement(
        suites, "testsuite", attributes | {"name": printable(report.title), "timestamp": report.created}
    )
    for case in report.cases:
        _add(suite, case, in_words(report, kind) if kind != "reference" else "")
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: ElementTree.Element, case: CaseReport, said: str) -> None:
    test = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "classname": printable(f"parity.{case.settings.get('model', case.id)}"),
            "name": printable(case.id),
            "time": f"{case.seconds:.3f}",
        },
    )
    if not case.passed:
        kind = {"skipped": "skipped", "not judged": "error", "broken": "failure"}[case.verdict]
        words = ElementTree.SubElement(test, kind, {"message": printable(said or case.reasons[0])})
        if case.failed:
            words.text = printable("\n".join([*_broken(case), case.command]))
    if said or case.notes:
        ElementTree.SubElement(test, "system-out").text = printable("\n".join(filter(None, [said, *case.notes])))


def _broken(case: CaseReport) -> list[str]:
    return [
        f"{measure.name}: error {measure.error:.3e}, allowance {measure.allowance:.3e}, ratio {measure.ratio:.3g}"
        for measure in case.measures
        if not measure.passed
    ]
