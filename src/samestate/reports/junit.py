"""A report as JUnit XML, for continuous integration: every required check and every case is one test case.

fail is a failure, unknown an error, not exercised and excluded are skipped. The run's own verdict is a test
case too, so that the file as a whole is green only where the verdict is pass.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from xml.etree import ElementTree as ET

from samestate.checks.base import CheckResult, Place, Verdict
from samestate.checks.table import CaseRow
from samestate.reports.model import Report
from samestate.reports.words import GridRow, plain

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ELEMENTS = {Verdict.FAIL: "failure", Verdict.UNKNOWN: "error"}
_COUNTED = ("failure", "error", "skipped")


class _Case(NamedTuple):
    name: str
    verdict: Verdict
    said: str
    """One line."""
    details: list[str]


def junit(report: Report) -> str:
    """The document, as text of an XML file in UTF-8."""
    judgement = report.judgement
    checks = [_check(result) for result in report.checks if result.check in judgement.required]
    cases = [_case(report, line) for line in report.cases.rows]
    run = [_Case("verdict", judgement.verdict, report.why, [])]
    root = ET.Element("testsuites", {"name": _text(f"samestate {report.plan}")})
    for name, tests in (("run", run), ("checks", checks), ("cases", cases)):
        if tests:
            _suite(root, report, name, tests)
    _count(root, list(root))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _check(result: CheckResult) -> _Case:
    details = [f"{finding.message} [{finding.code}] {' '.join(finding.evidence)}" for finding in result.findings]
    return _Case(result.check, result.verdict, result.summary, details)


def _case(report: Report, line: GridRow) -> _Case:
    told = ", ".join(f"{heading} {cell}" for heading, cell in zip(report.cases.headings, line.cells, strict=True))
    told += f"; by {', '.join(line.against)}" if line.against else ""
    found = [
        f"{result.check}: {finding.message} [{finding.code}]"
        for result in report.told
        for finding in result.findings
        if _concerns(finding.place, line.row)
    ]
    return _Case(line.name, line.row.verdict, told, found)


def _concerns(place: Place, row: CaseRow) -> bool:
    """Whether a finding is one of the row's case, and of its arm and operation if it names them."""
    same_arm = row.arm is None or place.arm in (None, row.arm)
    same_arm = same_arm and place.repetition in (None, row.repetition)
    return place.case == row.case and same_arm and (row.op is None or place.op in (None, row.op))


def _suite(root: ET.Element, report: Report, name: str, tests: list[_Case]) -> None:
    suite = ET.SubElement(root, "testsuite", {"name": _text(f"{report.plan}.{name}")})
    properties = ET.SubElement(suite, "properties")
    fault = [("fault", report.judgement.fault)] if report.judgement.fault is not None else []
    for key, value in [*report.facts, *fault]:
        ET.SubElement(properties, "property", {"name": _text(key), "value": _text(value)})
    for test in tests:
        case = ET.SubElement(suite, "testcase", {"classname": _text(f"{report.plan}.{name}"), "name": _text(test.name)})
        if test.verdict is not Verdict.PASS:
            tag = _ELEMENTS.get(test.verdict, "skipped")
            outcome = ET.SubElement(case, tag, {"message": _text(test.said)})
            if tag != "skipped":
                outcome.set("type", test.verdict.value)
            outcome.text = _text("\n".join([plain(test.verdict), *test.details]))
        else:
            ET.SubElement(case, "system-out").text = _text(test.said)
    _count(suite, [suite])


def _count(element: ET.Element, suites: list[ET.Element]) -> None:
    counts = {"tests": sum(len(suite.findall("testcase")) for suite in suites)}
    for tag in _COUNTED:
        plural = tag if tag == "skipped" else f"{tag}s"
        counts[plural] = sum(len(suite.findall(f"testcase/{tag}")) for suite in suites)
    if element.tag == "testsuites":
        del counts["skipped"]  # which the usual schema allows for a suite alone
    for name, count in counts.items():
        element.set(name, str(count))


def _text(text: str) -> str:
    """`text` without the characters that no XML may hold, written as escapes."""
    return _NOT_XML.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
