from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Verdict
from samestate.evidence.archive import Archive
from samestate.reports.junit import junit

from . import made

OUTCOMES = {"failure", "error", "skipped"}


def suites(archive: Archive, judgement: Judgement | None = None) -> ET.Element:
    text = junit(made.report_of(archive, judgement))
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>')
    return ET.fromstring(text.encode())


def outcomes(root: ET.Element) -> dict[str, str]:
    """What became of each test case, by class and name."""
    found = {}
    for case in root.iter("testcase"):
        tags = [child.tag for child in case if child.tag in OUTCOMES]
        assert len(tags) <= 1
        found[f"{case.get('classname')}/{case.get('name')}"] = tags[0] if tags else "passed"
    return found


def test_a_pass_is_green_and_has_every_required_check_and_case(clean: Archive) -> None:
    root = suites(clean)
    report = made.report_of(clean)
    names = [f"boundary.checks/{check}" for check in report.judgement.required]
    names += [f"boundary.cases/{case}" for case in ("N31", "N32", "N33")]
    assert outcomes(root) == dict.fromkeys(["boundary.run/verdict", *names], "passed")
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == (str(len(names) + 1), "0", "0")


def test_a_fault_is_red_where_it_is(faulted: Archive) -> None:
    root = suites(faulted)
    found = outcomes(root)
    assert (
        found["boundary.run/verdict"] == found["boundary.checks/boundary"] == found["boundary.cases/N32"] == "failure"
    )
    assert found["boundary.checks/integrity"] == found["boundary.cases/N33"] == "passed"
    failure = next(case for case in root.iter("testcase") if case.get("name") == "boundary").find("failure")
    assert failure is not None and failure.text is not None
    row = next(case for case in root.iter("testcase") if case.get("name") == "N32").find("failure")
    assert row is not None and "; by boundary, " in row.get("message", "")
    assert "retained_lookup_boundary" in failure.text and "arms/candidate/worker-0.jsonl:" in failure.text
    properties = {one.get("name"): one.get("value") for one in root.iter("property")}
    assert properties["fault"] == "full-lookup" and properties["C"] == "16 tokens"


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (Verdict.PASS, "passed"),
        (Verdict.FAIL, "failure"),
        (Verdict.UNKNOWN, "error"),
        (Verdict.NOT_EXERCISED, "skipped"),
        (Verdict.EXCLUDED, "skipped"),
    ],
)
def test_every_verdict_has_its_outcome(clean: Archive, verdict: Verdict, outcome: str) -> None:
    result = CheckResult(check="one", verdict=verdict, summary="s", unit="u", examined=1)
    run = Verdict.PASS if verdict is Verdict.PASS else Verdict.UNKNOWN
    found = outcomes(
        suites(
            clean,
            made.judgement(verdict=run, results=[result], required=["one"], table=[made.row(33, verdict=verdict)]),
        )
    )
    assert found["boundary.checks/one"] == found["boundary.cases/N33"] == outcome
    green = set(found.values()) <= {"passed", "skipped"}
    assert green is (verdict is Verdict.PASS)


def test_a_required_check_without_a_result_is_an_error(clean: Archive) -> None:
    found = outcomes(suites(clean, made.faulty()))
    assert found["boundary.checks/transfers"] == "error"


def test_counts_are_those_of_the_cases(faulted: Archive) -> None:
    root = suites(faulted)
    for suite in root.findall("testsuite"):
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert suite.get(name) == str(sum(case.find(tag) is not None for case in cases))


def test_what_no_xml_may_hold_is_an_escape(clean: Archive) -> None:
    root = suites(clean, made.evil())
    text = " ".join([*root.itertext(), *(value for one in root.iter() for value in one.attrib.values())])
    assert "<script>alert(1)</script>" in text
    assert "\\ufffe" in text and "\\x1b" in text
