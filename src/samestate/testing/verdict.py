"""What the judged run says of one length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import pytest

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.table import CaseRow
from samestate.plans.lengths import evaluate
from samestate.reports.words import first_place, plain, shown
from samestate.testing.session import Judged

AGAINST = (Verdict.FAIL, Verdict.UNKNOWN)


class ColdReload:
    """Cold against reload at one length."""

    def __init__(self, judged: Judged, length: str) -> None:
        self._judged = judged
        self.length = length
        """As the mark says it."""

    def __call__(self) -> CaseRow:
        """The row of this length: N, B, p, what was scheduled. Fails the test, with the findings, unless it passed.

        What is found of the run as a whole (a damaged archive, other settings) fails every test of it.
        """
        judgement = shown(self._judged.judgement)
        case = f"N{evaluate(self.length, self._judged.interval)}"
        if lines := [*_findings(judgement, case), *_unexplained(judgement)]:
            self._fail(lines)
        rows = [row for row in judgement.table if row.case == case]
        if len(rows) != 1 or rows[0].verdict is not Verdict.PASS:
            word = plain(rows[0].verdict) if rows else "no row in the table"
            self._fail([f"{case}: {word}, and no required check says why"])
        return rows[0]

    def _fail(self, lines: list[str]) -> NoReturn:
        pytest.fail("\n".join([*lines, f"archive: {self._judged.archive}"]), pytrace=False)


def _findings(judgement: Judgement, case: str) -> Iterator[str]:
    """What required checks hold against a case or against the whole run: what lied first, then what follows from it."""
    found = [
        (result, finding)
        for result in judgement.results
        if result.check in judgement.required
        for finding in result.findings
        if finding.verdict in AGAINST and finding.place.case in (None, case)
    ]
    found.sort(key=lambda one: (one[1].verdict is not Verdict.FAIL, one[1].code == "tokens_differ"))
    return (_words(result, finding) for result, finding in found)


def _unexplained(judgement: Judgement) -> Iterator[str]:
    """Required checks that did not pass and hold it against no case: nothing passes for lack of evidence."""
    results = {result.check: result for result in judgement.results}
    for check in judgement.required:
        result = results.get(check)
        if result is None:
            yield f"{check}: unknown: it did not run"
        elif result.verdict is not Verdict.PASS and not any(one.verdict in AGAINST for one in result.findings):
            yield f"{check}: {plain(result.verdict)}: {result.summary}"


def _words(result: CheckResult, finding: Finding) -> str:
    where = f" at {first_place(finding)}" if finding.evidence else ""
    return f"{result.check}: {plain(finding.verdict)}: {finding.message} [{finding.code}{where}]"
