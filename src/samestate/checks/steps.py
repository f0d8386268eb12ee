"""``steps``: the steps of every request adjoin, so that no token is fed to the recurrence twice.

An attention page does not mind a token that comes again; a recurrent state has then seen it twice. A step may begin
before the last one ended only where drafts were rejected, after a preemption, or where a load failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History, Schedule
from samestate.checks.verdicts import conclude, fail
from samestate.evidence.records import BatchSource

CHECK = "steps"


def steps(history: History) -> CheckResult:
    """Every two steps of every request of every arm, as the scheduler recorded them."""
    findings: list[Finding] = []
    examined = 0
    for arm in history.arms.values():
        ops = {seen.rec.request: op for op, outputs in arm.outputs.items() for seen in outputs}
        cases = {seen.rec.op: seen.rec.case for seen in arm.started}
        for (request, source), schedule in arm.schedules.items():
            if source is not BatchSource.SCHEDULER:
                continue
            examined += len(schedule)
            op = ops.get(request)
            place = Place(arm=arm.name, case=cases.get(op or ""), op=op, request=request)
            if request not in arm.preempted and not _load_failed(arm, request):
                findings += _overlaps(schedule, f"arm {arm.name}: {op or request}", place)
    again = len({finding.place.request for finding in findings})
    summary = f"{examined} steps adjoin" if not findings else f"{again} requests took up tokens again"
    return conclude(CHECK, findings, unit="steps", examined=examined, summary=summary)


def _load_failed(arm: ArmHistory, request: str) -> bool:
    return any(load.completed is not None and not load.completed.rec.ok for load in arm.loads.get(request, ()))


def _overlaps(schedule: Schedule, name: str, place: Place) -> Iterator[Finding]:
    """The first step that takes up what the one before had computed for good."""
    for before, row in pairwise(schedule):
        if row.start < before.end - before.drafted:
            message = (
                f"{name}: a step over [{row.start}, {row.end}) follows one that had computed up to "
                f"{before.end - before.drafted}: {before.end - before.drafted - row.start} tokens are fed twice"
            )
            at = place.model_copy(update={"boundary": row.start})
            yield fail("tokens_fed_twice", message, at, [before.where, row.where])
            return
