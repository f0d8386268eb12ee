"""What every operation leaves behind: counters around it, records of each kind, all within its own time.

Times are the monotonic clock of one host, which all streams of an arm share. A record at another
time belongs to something else, or its clock is another: unknown either way.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import Finding, Place
from samestate.checks.ending import ending
from samestate.checks.history import ArmHistory, History
from samestate.checks.page_history import PAGE_LEVELS
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.records import BatchSource


def traces(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """Findings about an arm's operations; what was never started or answered is left to others."""
    yield from ending(history, arm)
    if arm.engines and not arm.schedulers:
        message = f"arm {arm.name}: no scheduler_configured record: what its scheduler had is not known"
        yield unknown("missing_scheduler", message, Place(arm=arm.name))
    yield from _counters(history, arm)
    starts: dict[str, list[int]] = {}
    for seen in arm.started:
        starts.setdefault(seen.rec.op, []).append(seen.t_ns)
    for case, op in history.generations(arm=arm.name):
        output = arm.output(op.op)
        if output is None:
            continue
        place = Place(arm=arm.name, case=case.id, op=op.op, request=output.rec.request)
        reason = output.rec.finish_reason
        if history.plan.ignore_eos and reason != "length":
            message = f"arm {arm.name}: {op.op} finished by {reason or 'nothing it names'}, planned by its length"
            yield (fail if reason else unknown)("wrong_finish", message, place, [output.where])
        if arm.connected:
            yield from _connector(arm, op.op, output.rec.request, place)
        yield from _times(arm, op.op, starts.get(op.op, []), output.rec.request, place)


def _counters(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """Read once before an operation starts and once after it ended, and before the next one's."""
    order = [seen.rec.op for seen in arm.started]
    planned = {op.op: (case.id, op.together) for case in history.cases(arm.name) for op in case.operations}
    reached, latest, unit = -1, -1, None
    for op in sorted({*order} & planned.keys(), key=order.index):
        case, together = planned[op]
        if together is None or together != unit:
            reached, unit = latest, together
        reads, ends = arm.counters.get(op, []), arm.ends.get(op, [])
        place, evidence = Place(arm=arm.name, case=case, op=op), arm.evidence(op)
        if [seen.rec.when for seen in reads] != ["before", "after"]:
            message = f"arm {arm.name}: {op}: counters were not read once before and once after"
            yield unknown("missing_counters", message, place, evidence)
        elif ends:
            before, after = reads
            lines = [reached, before.n, arm.started[order.index(op)].n, ends[-1].n, after.n]
            if lines != sorted(lines):
                message = f"arm {arm.name}: {op}: its counters were not read around it and it alone"
                yield fail("counters_misplaced", message, place, evidence)
            latest = after.n


def _connector(arm: ArmHistory, op: str, request: str, place: Place) -> Iterator[Finding]:
    """What the audit of a connector records of every request."""
    if not arm.schedule(op, BatchSource.CONNECTOR):
        message = f"arm {arm.name}: {op}: the connector records no step"
        yield unknown("missing_batches", message, place)
    if not arm.finished.get(request):
        message = f"arm {arm.name}: {op}: no request_finished record"
        yield unknown("missing_finish", message, place)
    if arm.engine.rec.audit_level in PAGE_LEVELS and request not in arm.pages.owners:
        message = f"arm {arm.name}: {op}: no blocks_assigned record"
        yield unknown("missing_assignment", message, place)


def _times(arm: ArmHistory, op: str, starts: list[int], request: str, place: Place) -> Iterator[Finding]:
    ends = [seen.t_ns for seen in arm.ends.get(op, ())]
    if len(starts) != 1 or len(ends) != 1:
        return
    for what, t_ns, where, may_follow in _dated(arm, request):
        if t_ns < starts[0] or (t_ns > ends[0] and not may_follow):
            late = t_ns > ends[0]
            off = (t_ns - ends[0] if late else starts[0] - t_ns) / 1e6
            message = (
                f"arm {arm.name}: {op}: {what} is dated {off:.1f} ms {'after its end' if late else 'before its start'}"
            )
            yield unknown("outside_operation", message, place, [where])
            return


def _dated(arm: ArmHistory, request: str) -> Iterator[tuple[str, int, str, bool]]:
    """What belongs to a request, when, where, and whether it may come after the answer, as a save may."""
    for seen in (*arm.lookups.get(request, ()), *arm.allocated.get(request, ()), *arm.finished.get(request, ())):
        yield type(seen.rec).__name__, seen.t_ns, seen.where, False
    for source in BatchSource:
        schedule = arm.schedules.get((request, source))
        for row, t_ns in zip((0, -1), schedule.times if schedule else (), strict=False):
            assert schedule is not None
            yield f"a step of the {source.value}", t_ns, schedule[row % len(schedule)].where, False
    for load in arm.loads.get(request, ()):
        for one in (load.submitted, load.completed):
            if one is not None:
                yield "a load", one.t_ns, one.where, False
    for rank in arm.ranks:
        for saved in arm.saves.done.get((rank, request), ()):
            yield "a save", saved.submitted_ns, saved.where, True
