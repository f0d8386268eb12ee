"""``integrity``: the archive is whole, sealed, and holds one attempt that completed."""

from __future__ import annotations

from samestate.checks.base import CheckResult
from samestate.checks.history import History
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence.records import Outcome

CHECK = "integrity"


def integrity(history: History) -> CheckResult:
    """Every defect of the archive is one finding; any of them makes the run unknown."""
    findings = [unknown("defect", f"{where}: {what}", evidence=[where]) for where, what in history.defects]
    if len(history.attempts) > 1:
        wheres = [attempt.where for attempt in history.attempts]
        findings.append(unknown("many_attempts", f"{len(wheres)} attempts in one archive, expected 1", evidence=wheres))
    attempt = history.attempt
    if attempt.outcome is None:
        message = "the attempt has no end: the run was cut"
        findings.append(unknown("attempt_not_ended", message, evidence=[attempt.where]))
    elif attempt.outcome is not Outcome.COMPLETED:
        message = f"the attempt ended as {attempt.outcome.value}: {attempt.reason or 'no reason given'}"
        findings.append(unknown("attempt_not_completed", message, evidence=[attempt.where]))
    summary = f"{history.records} records, sealed, no defect" if not findings else f"{len(findings)} defects"
    return conclude(CHECK, findings, unit="records", examined=history.records, summary=summary)
