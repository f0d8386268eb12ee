"""``preemptions``: none, by counters that could be read and by the scheduler's own rows."""

from __future__ import annotations

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import History
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import PREEMPTIONS

CHECK = "preemptions"


def preemptions(history: History) -> CheckResult:
    """The counter around every operation of every planned arm, and the requests named as preempted."""
    findings, examined, readable = _counted(history)
    preempted = sum(finding.code == "preempted" for finding in findings)
    summary = f"{readable}/{examined} operations readable, {preempted or 'none'} preempted"
    return conclude(CHECK, findings, unit="operations", examined=examined, summary=summary)


def preemptions_shown(history: History) -> CheckResult:
    """The same, where a preemption is no fault: counted for the reader, and unknown only where it cannot be counted."""
    findings, examined, readable = _counted(history)
    unclear = [finding for finding in findings if finding.code != "preempted"]
    preempted = len(findings) - len(unclear)
    summary = f"{readable}/{examined} operations readable, {preempted or 'none'} preempted (counted, not judged)"
    return conclude(CHECK, unclear, unit="operations", examined=examined, summary=summary)


def preemptions_needed(history: History) -> CheckResult:
    """The same, where preemptions are what is tested: one of a candidate at least, by counter and by rows."""
    findings, examined, readable = _counted(history)
    kept = [finding for finding in findings if finding.code != "preempted"]
    requests = {(arm.name, request) for arm in history.candidates for request in arm.preempted}
    counted = sum(_grown(history, arm.name) for arm in history.candidates)
    if not requests and not counted:
        kept.append(unknown("never_preempted", "no request of a candidate was preempted: nothing was tested"))
    elif not requests or not counted:
        message = (
            f"{PREEMPTIONS} counts {counted:.0f} of candidates, the scheduler's rows name {len(requests)} requests"
        )
        kept.append(unknown("counter_disagrees", message))
    summary = (
        f"{readable}/{examined} operations readable; candidates: {counted:.0f} preemptions of {len(requests)} requests"
    )
    return conclude(CHECK, kept, unit="operations", examined=examined, summary=summary)


def _grown(history: History, name: str) -> float:
    """What the counter grew by over an arm's operations; those that were handed in together count once."""
    arm, units = history.arm(name), {}
    for case in history.cases(name):
        for op in case.operations:
            units[op.together or op.op] = arm.counter(op.op, PREEMPTIONS) or 0.0
    return sum(units.values())


def _counted(history: History) -> tuple[list[Finding], int, int]:
    """Findings, operations, and how many of them could be read."""
    findings: list[Finding] = []
    examined = readable = 0
    for name in [arm.name for arm in history.plan.arms]:
        arm = history.arm(name)
        for case in history.cases(name):
            for op in case.operations:
                examined += 1
                delta, place = arm.counter(op.op, PREEMPTIONS), Place(arm=name, case=case.id, op=op.op)
                readable += delta is not None
                if delta is None:
                    message = f"arm {name}: {op.op}: {PREEMPTIONS} cannot be read"
                    findings.append(unknown("counter_unreadable", message, place, arm.evidence(op.op)))
                elif delta:
                    message = f"arm {name}: {op.op}: {delta:.0f} preemptions"
                    findings.append(fail("preempted", message, place, arm.evidence(op.op)))
        for request, wheres in arm.preempted.items():
            message = f"arm {name}: request {request} was preempted {len(wheres)} times"
            findings.append(fail("preempted", message, Place(arm=name, request=request), wheres))
    return findings, examined, readable
