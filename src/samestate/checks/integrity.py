"""``integrity``: the archive is whole, sealed, and holds one attempt that completed."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import Attempt, History
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence.records import ContactLevel, Outcome

CHECK = "integrity"
CONTACTS = [ContactLevel.HOST, ContactLevel.MODEL, ContactLevel.REQUEST]
"""Levels that every run reaches, in this order."""


def integrity(history: History) -> CheckResult:
    """Every defect of the archive is one finding; any of them makes the run unknown."""
    findings = [unknown("defect", f"{where}: {what}", evidence=[where]) for where, what in history.defects]
    if len(history.attempts) > 1:
        wheres = [attempt.where for attempt in history.attempts]
        findings.append(unknown("many_attempts", f"{len(wheres)} attempts in one archive, expected 1", evidence=wheres))
    findings += _attempt(history.attempt)
    summary = f"{history.records} records, sealed, no defect" if not findings else f"{len(findings)} defects"
    return conclude(CHECK, findings, unit="records", examined=history.records, summary=summary)


def _attempt(attempt: Attempt) -> Iterator[Finding]:
    """It reached every level, ended once, completed, and did nothing more."""
    reached = [level for level in attempt.contacts if level in CONTACTS]
    if reached != CONTACTS:
        said = ", ".join(level.value for level in reached) or "none"
        message = f"the attempt reached these levels of contact: {said}; expected host, model, request"
        yield unknown("missing_contact", message, evidence=[attempt.where])
    if not attempt.ends:
        yield unknown("attempt_not_ended", "the attempt has no end: the run was cut", evidence=[attempt.where])
    for end in attempt.ends:
        if end.rec.outcome is not Outcome.COMPLETED or end.rec.reason is not None:
            message = f"the attempt ended as {end.rec.outcome.value}: {end.rec.reason or 'no reason given'}"
            yield unknown("attempt_not_completed", message, evidence=[attempt.where, end.where])
    if len(attempt.ends) > 1:
        message = f"the attempt ended {len(attempt.ends)} times"
        yield unknown("many_ends", message, evidence=[end.where for end in attempt.ends])
    if attempt.strays:
        message = f"{len(attempt.strays)} records follow the end of the attempt"
        yield unknown("after_the_end", message, evidence=attempt.strays)
