"""The verdict algebra, and the one place where checks are run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from samestate.checks.base import Check, CheckResult, Finding, Place, Verdict
from samestate.checks.history import History, MissingEvidence

_WORST_FIRST = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_EXERCISED, Verdict.EXCLUDED)


def fail(code: str, message: str, place: Place | None = None, evidence: Iterable[str] = ()) -> Finding:
    """A finding of positive contrary evidence."""
    return _finding(Verdict.FAIL, code, message, place, evidence)


def unknown(code: str, message: str, place: Place | None = None, evidence: Iterable[str] = ()) -> Finding:
    """A finding that evidence is missing, incomplete or vacuous."""
    return _finding(Verdict.UNKNOWN, code, message, place, evidence)


def conclude(check: str, findings: Sequence[Finding], *, unit: str, examined: int, summary: str) -> CheckResult:
    """A check's result: its worst finding decides; without findings it passes."""
    seen = {finding.verdict for finding in findings}
    verdict = next((v for v in _WORST_FIRST if v in seen), Verdict.PASS)
    return CheckResult(
        check=check, verdict=verdict, summary=summary, unit=unit, examined=examined, findings=list(findings)
    )


def not_exercised(check: str, code: str, message: str, *, unit: str) -> CheckResult:
    """The result of a check whose question did not come up."""
    finding = _finding(Verdict.NOT_EXERCISED, code, message, None, ())
    return conclude(check, [finding], unit=unit, examined=0, summary=message)


def run_check(check_id: str, check: Check, history: History) -> CheckResult:
    """Run a check. Never raises: missing evidence, a crash and a pass over nothing are unknown."""
    try:
        result = check(history)
    except MissingEvidence as missing:
        return _unknown(check_id, missing.code, str(missing))
    except Exception as error:  # a broken checker must not decide a run
        return _unknown(check_id, "checker_crashed", f"{check_id} crashed: {type(error).__name__}: {error}")
    if result.check != check_id:
        return _unknown(check_id, "checker_crashed", f"{check_id} answered as {result.check}")
    if result.verdict is Verdict.PASS and result.examined <= 0:
        nothing = unknown("nothing_examined", f"{check_id} found no {result.unit} to examine")
        return result.model_copy(update={"verdict": Verdict.UNKNOWN, "findings": [*result.findings, nothing]})
    return result


def run_verdict(required: Iterable[str], results: Iterable[CheckResult]) -> Verdict:
    """Any required fail: fail. Every required one passed, and there is one: pass. Else unknown.

    A required check without a result counts as unknown.
    """
    by_check = {result.check: result.verdict for result in results}
    verdicts = [by_check.get(check, Verdict.UNKNOWN) for check in required]
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if verdicts and all(verdict is Verdict.PASS for verdict in verdicts):
        return Verdict.PASS
    return Verdict.UNKNOWN


def _unknown(check_id: str, code: str, message: str) -> CheckResult:
    finding = unknown(code, " ".join(message.split()))
    return conclude(check_id, [finding], unit="evidence", examined=0, summary=finding.message)


def _finding(verdict: Verdict, code: str, message: str, place: Place | None, evidence: Iterable[str]) -> Finding:
    return Finding(code=code, verdict=verdict, message=message, place=place or Place(), evidence=list(evidence))
