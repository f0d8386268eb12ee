"""The steps of a swap: all of them, in their order, each with what it had to see before the next one began."""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding
from samestate.checks.custody_history import CustodyHistory, Noted
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence import custody_records as c

STEPS = "custody-steps"
GATES = ("route", "incumbent-gone", "answers", "composition")
"""Gates that each probe must have behind it."""
_TOWARDS = (c.Step.CANDIDATE_START, c.Step.GATES, c.Step.PROBE)
_CANDIDATE = (*_TOWARDS, c.Step.CANDIDATE_STOP)


def steps(history: CustodyHistory) -> CheckResult:
    """All steps, in their order; nothing stopped before it was drained and idle, no candidate left, none admitted."""
    findings = [*_order(history), *_ends(history), *_gates(history), *_routes(history), *_probed(history)]
    if not history.all(c.SwapEnded):
        findings.append(unknown("not_ended", "the swap has not ended; resume it"))
    for one in history.all(c.StepEnded):
        if one.rec.outcome == "failed":
            findings.append(unknown("step_failed", f"{one.rec.step}: {one.rec.note}", None, [one.where]))
    if history.stopped:
        findings += _stops(history)
    began = history.began
    again = f", resumed {len(history.resumptions)} times" if history.resumptions else ""
    return conclude(
        STEPS, findings, unit="steps", examined=len(began), summary=f"{len(set(began))} of {len(c.Step)} steps{again}"
    )


def _order(history: CustodyHistory) -> Iterator[Finding]:
    order, reached, back = list(c.Step), -1, False
    last = order.index(c.Step.CANDIDATE_STOP)
    for one in history.noted:
        if isinstance(one.rec, c.Resumed):
            reached, back = -1, True  # the way back begins where it is needed
        if not isinstance(one.rec, c.StepBegan):
            continue
        step, at = one.rec.step, order.index(one.rec.step)
        again = step in _CANDIDATE and reached <= last  # a plan's next arm is a candidate once more
        if back and step in _TOWARDS:
            yield fail("forward", f"{step}: towards the candidate, on the way back", None, [one.where])
        elif at < reached and not again:
            yield fail("out_of_order", f"{step} after {order[reached]}", None, [one.where])
        back = back or step is c.Step.RESTORE
        reached = at
    if not history.resumptions and not any(one.rec.outcome == "failed" for one in history.all(c.StepEnded)):
        due = [step for step in order if history.started is None or history.started.probe or step not in _CANDIDATE]
        for step in due:
            if step not in history.began:
                yield unknown("step_missing", f"{step}: did not begin")


def _ends(history: CustodyHistory) -> Iterator[Finding]:
    """Each step that began has its end, unless the tool died in it."""
    running: Noted | None = None
    for one in history.noted:
        if isinstance(one.rec, c.StepBegan | c.SwapEnded):
            if running is not None:
                yield unknown("step_unended", f"{running.rec.step}: nobody says how it ended", None, [running.where])
            running = one if isinstance(one.rec, c.StepBegan) else None
        elif isinstance(one.rec, c.StepEnded):
            if running is None or running.rec.step is not one.rec.step:
                yield unknown("step_unbegun", f"{one.rec.step}: ended, and had not begun", None, [one.where])
            running = None
        elif isinstance(one.rec, c.Resumed):
            running = None


def _gates(history: CustodyHistory) -> Iterator[Finding]:
    """Before each probe every gate was seen open, for the candidate that it asked."""
    seen: dict[str, Noted] = {}
    for one in history.noted:
        if isinstance(one.rec, c.GateSeen):
            if one.rec.name not in seen or not one.rec.ok:
                seen[one.rec.name] = one
        elif isinstance(one.rec, c.StepBegan) and one.rec.step is c.Step.GATES:
            seen = {}
        elif isinstance(one.rec, c.StepBegan) and one.rec.step is c.Step.PROBE:
            for name in GATES:
                if name not in seen:
                    yield unknown("missing_gate", f"gate {name}: nobody saw it before the probe", None, [one.where])
            for name, gate in seen.items():
                if not gate.rec.ok:
                    message = f"gate {name}: was shut ({gate.rec.reason}), and the probe began"
                    yield fail("gate_shut", message, None, [gate.where, one.where])
            seen = {}


def _routes(history: CustodyHistory) -> Iterator[Finding]:
    """The route was seen beside each candidate, and closed; and once more before it was opened."""
    unseen: Noted | None = None
    for one in history.noted:
        if isinstance(one.rec, c.SnapshotTaken) and one.rec.when == "candidate":
            unseen = one
        elif isinstance(one.rec, c.RouterSeen) and one.rec.when == "candidate":
            unseen = None
            if one.rec.admitting:
                yield fail("candidate_admitted", "the route was open beside the candidate", None, [one.where])
        elif isinstance(one.rec, c.StepBegan) and unseen is not None:
            yield unknown("missing_route", "nobody saw the route beside the candidate", None, [unseen.where])
            unseen = None
    if c.Step.READMIT in history.began and history.last(c.RouterSeen, "restored") is None:
        yield unknown("missing_route", "nobody saw the route between the restoration and the readmission")


def _probed(history: CustodyHistory) -> Iterator[Finding]:
    """A probe that was asked for and began has left a record, of that very plan."""
    asked = history.started.probe if history.started else None
    ends = history.all(c.ProbeEnded)
    if asked is not None and c.Step.PROBE in history.began and not ends:
        yield unknown("missing_probe", f"probe {asked}: began, and nobody says what it came to")
    for one in ends:
        if one.rec.plan != asked:
            yield unknown("other_probe", f"probe {one.rec.plan}: {asked} was asked for", None, [one.where])


def _stops(history: CustodyHistory) -> Iterator[Finding]:
    at = next((one for one in history.all(c.StepBegan) if one.rec.step is c.Step.STOP), None)
    if at is not None:
        yield from _idle_before(history, at)
    else:
        yield unknown("ended_itself", "the incumbent ended before it was to be stopped")
    for role, when in (("incumbent", "before"), ("candidate", "candidate")):
        stops = [one for one in history.all(c.ProcessStopped) if one.rec.role == role]
        for one in stops:
            if one.rec.left:
                yield fail("left", f"{role}: processes {one.rec.left} outlived the stop", None, [one.where])
        taken = [one for one in history.all(c.SnapshotTaken) if one.rec.when == when]
        if role == "incumbent" and at is None:
            continue
        if not stops and (taken or role == "incumbent"):
            yield unknown("missing_stop", f"nobody says that the {role} ended")
        elif taken and all(one.rec.process is None for one in stops):
            message = f"{role}: was gone when it was to be stopped; nobody saw it end"
            yield unknown("missing_stop", message, None, [one.where for one in stops])


def _idle_before(history: CustodyHistory, at: Noted) -> Iterator[Finding]:
    drained = [one for one in history.all(c.RouterSeen) if one.rec.when == "drained" and _before(one, at)]
    if not drained:
        yield unknown("missing_drain", "nobody saw the route closed before the stop", None, [at.where])
    elif drained[-1].rec.admitting or drained[-1].rec.sessions:
        yield fail("not_drained", "the incumbent was stopped while its route was in use", None, [drained[-1].where])
    count = history.started.stable_samples if history.started else 1
    idle = [one for one in history.all(c.IdleSeen) if one.rec.when == "drained" and _before(one, at)][-count:]
    if len(idle) < count or any((one.rec.running, one.rec.waiting) != (0, 0) for one in idle):
        yield unknown("not_idle", f"not seen idle {count} times in a row before the stop", None, [at.where])


def _before(one: Noted, other: Noted) -> bool:
    return int(one.where.rpartition(":")[2]) < int(other.where.rpartition(":")[2])
