"""A report as `junit.xml`, which every CI server reads: a case is a test."""

from xml.etree import ElementTree

from parity_tests.report.schema import CaseReport, Report


def to_junit(report: Report) -> str:
    """One test suite: broken rules are failures, cases that could not be judged errors, skipped ones say why."""
    counts = {
        "tests": len(report.cases),
        "failures": sum(case.problem is None and case.first_divergence is not None for case in report.cases),
        "errors": sum(case.problem is not None for case in report.cases),
        "skipped": sum(case.skipped is not None for case in report.cases),
    }
    attributes = {name: str(count) for name, count in counts.items()} | {"time": f"{report.seconds:.3f}"}
    suites = ElementTree.Element("testsuites", attributes | {"name": "parity"})
    suite = ElementTree.SubElement(
        suites, "testsuite", attributes | {"name": _legal(report.title), "timestamp": report.created}
    )
    for case in report.cases:
        _add(suite, case)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: ElementTree.Element, case: CaseReport) -> None:
    test = ElementTree.SubElement(
        suite,
        "testcase",
        {
            "classname": _legal(f"parity.{case.settings.get('model', case.id)}"),
            "name": _legal(case.id),
            "time": f"{case.seconds:.3f}",
        },
    )
    if case.skipped is not None:
        ElementTree.SubElement(test, "skipped", {"message": _legal(case.skipped)})
    elif case.problem is not None:
        ElementTree.SubElement(test, "error", {"message": _legal(case.problem)}).text = _legal(case.command)
    elif case.first_divergence is not None:
        ElementTree.SubElement(test, "failure", {"message": _legal(case.first_divergence.words)}).text = _legal(
            "\n".join([*_broken(case), case.command])
        )


def _broken(case: CaseReport) -> list[str]:
    return [
        f"{measure.name}: error {measure.error:.3e}, allowance {measure.allowance:.3e}, ratio {measure.ratio:.3g}"
        for measure in case.measures
        if not measure.passed
    ]


def _legal(text: str) -> str:
    """Without the control characters that XML has no way to write: an exception's message may hold them."""
    return "".join(c if c in "\t\n" or (ord(c) >= 32 and not 0xD800 <= ord(c) <= 0xDFFF) else "?" for c in text)
