"""``geometry``: the arms computed the same tokens in the same steps.

Batches of another shape may change bits without any fault, so unequal outputs are only
attributed to reuse where the batches agree (requirements 45, 46).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import chain, dropwhile, zip_longest
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History, Row, Schedule
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import BatchSource, EntryKind, OperationName
from samestate.plans.operations import Case, PlannedOperation
from samestate.plans.scenarios import CANDIDATE, CONTROL

CHECK = "geometry"


class Mismatch(NamedTuple):
    """How two schedules part."""

    message: str
    evidence: list[str]


def mismatch(reference: Schedule | list[Row] | None, subject: Schedule | None, *, whole: bool) -> Mismatch | None:
    """Compare (start, scheduled, drafted) step by step; None: they agree.

    Not `whole`: the reference counts only from the row that starts where the subject
    starts, which is what is left to compute after a reload.
    """
    if not reference or not subject:
        return Mismatch("the steps of one side are not recorded", [])
    rows, others = list(reference), list(subject)
    if not whole:
        rows = list(dropwhile(lambda row: row.start != others[0].start, rows))
        if not rows:
            message = f"no step of the reference starts at {others[0].start}, where the reload starts"
            return Mismatch(message, [reference[0].where, others[0].where])
    for step, (row, other) in enumerate(zip_longest(rows, others)):
        if row is None or other is None or row.shape != other.shape:
            evidence = [side.where for side in (row, other) if side]
            return Mismatch(f"step {step}: {_shape(row)} against {_shape(other)}", evidence)
    return None


def unattributable(
    reference: Schedule | None, subject: Schedule | None, checkpoint_interval: int, *, complete: bool
) -> Mismatch | None:
    """Why unequal outputs of two requests cannot be laid to reuse; None: they can.

    A subject that starts where no checkpoint can end is at fault whatever its steps, where
    its record is `complete`: else its first step may be missing.
    """
    if complete and subject and subject[0].start % checkpoint_interval != 0:
        return None
    return mismatch(reference, subject, whole=False)


def only_step_ends(arm: ArmHistory) -> bool:
    """Whether recurrent state lies where a step ended, and nowhere else; raises MissingEvidence without an engine."""
    return arm.engine.rec.settings.get("cache_config.mamba_cache_mode") == "align" and any(
        group.entry_kind is EntryKind.RECURRENT
        for seen in arm.schedulers
        if not seen.rec.saves_within_steps
        for group in seen.rec.engine_groups
    )


def geometry(history: History) -> CheckResult:
    """Candidate against control: reloads over [B, N) and decode, all else whole."""
    findings = list(sources_agree(history))
    examined = equal = 0
    for case, op in history.generations():
        examined += 1
        found = list(_operation(history, case, op))
        equal += not found
        findings += found
    summary = f"{equal}/{examined} generations scheduled alike"
    return conclude(CHECK, findings, unit="generations", examined=examined, summary=summary)


def _operation(history: History, case: Case, op: PlannedOperation) -> Iterator[Finding]:
    control, candidate = history.arm(CONTROL), history.arm(CANDIDATE)
    place = Place(arm=CANDIDATE, case=case.id, op=op.op)
    for arm in (control, candidate):
        output, schedule = arm.output(op.op), arm.schedule(op.op)
        gap = missing_steps(schedule, case.tokens + len(output.rec.token_ids) - 1 if output else 0)
        if gap is not None:
            yield unknown(
                "missing_batches", f"arm {arm.name}: {op.op}: {gap}", place.model_copy(update={"arm": arm.name})
            )
            return
    reload = op.name is OperationName.RELOAD
    reference, subject = control.schedule(op.op), candidate.schedule(op.op)
    for arm, schedule in ((control, reference), (candidate, subject)):
        computed_whole = arm is control or not reload
        if schedule and computed_whole and schedule[0].start != 0:
            message = f"arm {arm.name}: {op.op} should compute everything and starts at {schedule[0].start}"
            yield unknown("not_cold", message, place.model_copy(update={"arm": arm.name}), [schedule[0].where])
    parted = mismatch(reference, subject, whole=not reload)
    if parted is not None:
        message = f"{op.op}: {parted.message} (control against candidate)"
        c, complete = history.resolved.checkpoint_interval, history.whole(CANDIDATE)
        if unattributable(reference, subject, c, complete=complete):
            message += ": unequal outputs could not be laid to reuse"
        yield unknown("geometry_mismatch", message, place, parted.evidence)


def missing_steps(schedule: Schedule | None, end: int) -> str | None:
    """What is missing from rows that should reach from the first start to `end`."""
    if not schedule:
        return "no step is recorded"
    reached = schedule[0].start
    for row in schedule:
        if row.start > reached:
            return f"no step is recorded for tokens {reached} to {row.start}"
        reached = max(reached, row.end)
    return f"no step is recorded beyond token {reached}, expected {end}" if reached < end else None


def sources_agree(history: History) -> Iterator[Finding]:
    """Scheduler and connector saw the same rows, wherever both were there to see them.

    A contradiction is two rows that start alike and go on differently. A row of one source
    alone is missing from the other.
    """
    for arm in history.arms.values():
        ops = {seen.rec.request: op for op, outputs in arm.outputs.items() for seen in outputs}
        for (request, source), schedule in arm.schedules.items():
            other = arm.schedules.get((request, BatchSource.CONNECTOR))
            if source is not BatchSource.SCHEDULER or other is None:
                continue
            op = ops.get(request)
            name = f"arm {arm.name}: {op or request}"
            place = Place(arm=arm.name, case=_case(op), op=op, request=request)
            differing, lone = _pair_up(schedule, other)
            if differing:
                row, twin = differing[0]
                message = f"{name}: {_shape(row)} against {_shape(twin)} (scheduler against connector)"
                yield fail("sources_disagree", message, place, [row.where, twin.where])
            elif lone:
                message = f"{name}: {len(lone)} steps are recorded by one source alone, the first is {_shape(lone[0])}"
                yield unknown("missing_batches", message, place, [lone[0].where])


def _pair_up(schedule: Schedule, other: Schedule) -> tuple[list[tuple[Row, Row]], list[Row]]:
    """Rows that start alike and differ, and rows that the other side lacks."""
    waiting: defaultdict[int, deque[Row]] = defaultdict(deque)
    for row in other:
        waiting[row.start].append(row)
    differing, lone = [], []
    for row in schedule:
        if not waiting[row.start]:
            lone.append(row)
        elif (twin := waiting[row.start].popleft()).shape != row.shape:
            differing.append((row, twin))
    return differing, [*lone, *chain.from_iterable(waiting.values())]


def _case(op: str | None) -> str | None:
    return op.partition(".")[0] if op else None


def _shape(row: Row | None) -> str:
    if row is None:
        return "no step"
    drafts = f" with {row.drafted} drafts" if row.drafted else ""
    return f"[{row.start}, {row.end}){drafts}"
