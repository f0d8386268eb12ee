"""``intervention`` and ``services``: what was done to a connector, and what ran beside its engine, is what was planned.

Neither comes up where no arm plans it and none records it: both are then not exercised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.controls import ENGINE_REPAIRS
from samestate.evidence.records import InterventionApplied, OperationEnded, OperationStarted, Scalar
from samestate.plans.model import ArmPlan

INTERVENTION = "intervention"
SERVICES = "services"
SERVED = ("lmcache", "samestate-disk", "samestate-valkey", "samestate-object")
"""Connectors whose external cache is a server's, or a place's that is kept like one."""

Functions = frozenset[tuple[str, str, str]]
"""Module, name and source hash of what a repair replaced."""


def intervention(history: History) -> CheckResult:
    """Repairs and releases of every arm against the plan; one repair replaces the same functions everywhere."""
    planned = {arm.name: arm for arm in history.plan.arms}
    asked = any(arm.repair or arm.release for arm in planned.values())
    if not asked and not any(arm.interventions for arm in history.arms.values()):
        return not_exercised(
            INTERVENTION, "not_planned", "no repair and no release is planned, and no repair is recorded", unit="arms"
        )
    findings: list[Finding] = []
    replaced: dict[str, tuple[Functions, str]] = {}
    findings += _in_some_arms(planned.values())
    for arm in history.arms.values():
        plan = planned.get(arm.name)
        findings += _repair(arm, plan.repair if plan else None)
        for seen in arm.interventions:
            findings += _functions(arm, seen, replaced)
        if plan and plan.release:
            findings += _release(arm, plan)
    repairs = sorted({seen.rec.name for arm in history.arms.values() for seen in arm.interventions})
    functions = sum(len(one) for one, _ in replaced.values())
    releases = sorted({f"{arm.connector} {arm.release}" for arm in planned.values() if arm.release})
    said = [f"{', '.join(repairs)} on {functions} functions" if repairs else "no repair", *releases]
    return conclude(
        INTERVENTION,
        findings,
        unit="arms",
        examined=len(history.arms),
        summary=f"{len(history.arms)} arms: {', '.join(said)}",
    )


def _repair(arm: ArmHistory, repair: str | None) -> Iterator[Finding]:
    place = Place(arm=arm.name)
    for seen in arm.interventions:
        if repair is None:
            message = f"arm {arm.name}: repair {seen.rec.name} was applied, and none is planned"
            yield fail("unplanned_intervention", message, place, [seen.where])
        elif seen.rec.name != repair:
            message = f"arm {arm.name}: repair {seen.rec.name} was applied, planned {repair}"
            yield fail("wrong_intervention", message, place, [seen.where])
    if repair is None:
        return
    if repair in ENGINE_REPAIRS:
        yield from _on_ranks(arm, repair)
        return
    processes = [process for process in arm.streams if process.startswith("scheduler")]
    if not processes:
        yield unknown("missing_intervention", f"arm {arm.name}: no scheduler's stream is recorded", place)
    for process in processes:
        there = [seen for seen in arm.interventions if seen.stream.endswith(f"/{process}.jsonl")]
        if not there:
            message = f"arm {arm.name}: {process} records no repair, planned {repair}"
            yield unknown("missing_intervention", message, place)
        elif len(there) > 1:
            message = f"arm {arm.name}: {process} records {len(there)} repairs, planned one"
            yield fail("repeated_intervention", message, place, [seen.where for seen in there])


def _on_ranks(arm: ArmHistory, repair: str) -> Iterator[Finding]:
    """A repair of the engine itself: every rank says once that it is in force."""
    for rank in range(arm.engine.rec.ranks):
        place = Place(arm=arm.name, rank=rank)
        there = [seen for seen in arm.interventions if seen.rec.rank == rank and seen.rec.name == repair]
        if not there:
            message = f"arm {arm.name}: rank {rank} records no repair, planned {repair}"
            yield unknown("missing_intervention", message, place)
        elif len(there) > 1:
            message = f"arm {arm.name}: rank {rank} records {len(there)} repairs, planned one"
            yield fail("repeated_intervention", message, place, [seen.where for seen in there])


def _in_some_arms(planned: Iterable[ArmPlan]) -> Iterator[Finding]:
    """A repair of the engine itself changes what is computed: all arms have it, or none."""
    named = {arm.repair if arm.repair in ENGINE_REPAIRS else None for arm in planned}
    if len(named) > 1:
        said = ", ".join(sorted(name for name in named if name))
        yield fail("uneven_intervention", f"repair {said} is planned in some arms and not in others")


def _functions(
    arm: ArmHistory, seen: Seen[InterventionApplied], replaced: dict[str, tuple[Functions, str]]
) -> Iterator[Finding]:
    mine = frozenset((one.module, one.qualname, one.source_sha256) for one in seen.rec.functions)
    place = Place(arm=arm.name)
    if not mine:
        message = f"arm {arm.name}: repair {seen.rec.name} replaced no function"
        yield fail("empty_intervention", message, place, [seen.where])
    theirs, where = replaced.setdefault(seen.rec.name, (mine, seen.where))
    if mine != theirs:
        names = ", ".join(sorted({f"{module}.{name}" for module, name, _ in mine ^ theirs}))
        message = f"arm {arm.name}: repair {seen.rec.name} replaced other functions than elsewhere: {names}"
        yield fail("interventions_differ", message, place, [where, seen.where])


def _release(arm: ArmHistory, plan: ArmPlan) -> Iterator[Finding]:
    place = Place(arm=arm.name)
    running: Mapping[str, str] = arm.engine.rec.versions
    version = running.get(plan.connector)
    if version is None:
        message = f"arm {arm.name}: the engine names no version of {plan.connector}, planned {plan.release}"
        yield unknown("missing_release", message, place, [arm.engine.where])
    elif version != plan.release:
        message = f"arm {arm.name}: the engine ran {plan.connector} {version}, planned {plan.release}"
        yield fail("wrong_release", message, place, [arm.engine.where])


def services(history: History) -> CheckResult:
    """The server beside every engine that needs one: there from beginning to end, and carried over as planned."""
    planned = {arm.name: arm for arm in history.plan.arms}
    served = [
        arm
        for arm in history.arms.values()
        if arm.services or arm.services_over or (arm.name in planned and planned[arm.name].connector in SERVED)
    ]
    if not served:
        return not_exercised(
            SERVICES, "not_planned", "no arm needs a server beside its engine, and none is recorded", unit="arms"
        )
    findings: list[Finding] = []
    for arm in served:
        findings += _service(arm, planned.get(arm.name))
        findings += _left_running(history, arm)
    over = [seen.rec for arm in served for seen in arm.services_over]
    named = sorted({f"{seen.rec.service} {seen.rec.version}".rstrip() for arm in served for seen in arm.services})
    leftovers = sum(rec.leftovers for rec in over)
    summary = (
        f"{sum(rec.alive for rec in over)}/{len(served)} arms with a server ({', '.join(named) or 'unnamed'}) that was "
        f"alive at the end; {leftovers or 'no'} shared-memory segments left behind"
    )
    return conclude(SERVICES, findings, unit="arms", examined=len(served), summary=summary)


def _service(arm: ArmHistory, plan: ArmPlan | None) -> Iterator[Finding]:
    place = Place(arm=arm.name)
    if plan is None or plan.connector not in SERVED:
        wheres = [seen.where for seen in arm.services] + [seen.where for seen in arm.services_over]
        yield fail("unplanned_service", f"arm {arm.name}: a server is recorded, and none is planned", place, wheres)
        return
    records = {"start": [seen.where for seen in arm.services], "end": [seen.where for seen in arm.services_over]}
    for what, wheres in records.items():
        if not wheres:
            yield unknown("missing_service", f"arm {arm.name}: the {what} of its server is not recorded", place)
        elif len(wheres) > 1:
            message = f"arm {arm.name}: its server has {len(wheres)} {what}s, planned 1"
            yield fail("service_restarted", message, place, wheres)
    for started in arm.services:
        kept = plan.follows is not None and plan.service == "kept"
        if started.rec.continues != kept:
            ran = "was running already" if started.rec.continues else "was started anew"
            wanted = f"kept from arm {plan.follows}" if kept else "started for this arm"
            message = f"arm {arm.name}: its server {ran}, planned: {wanted}"
            yield fail("wrong_service", message, place, [started.where])
        if plan.release and started.rec.version != plan.release:
            message = (
                f"arm {arm.name}: its server is {started.rec.service} {started.rec.version}, planned {plan.release}"
            )
            yield fail("wrong_release", message, place, [started.where])
        told = {name.replace("-", "_"): value for name, value in plan.options.items()}
        for name, value in sorted(told.items()):
            if name.startswith("lmcache."):  # the connector's, not the server's
                continue
            if name not in started.rec.options or _differ(started.rec.options[name], value):
                ran = repr(started.rec.options[name]) if name in started.rec.options else "not recorded"
                message = f"arm {arm.name}: its server's option {name} is {ran}, planned {value!r}"
                yield fail("wrong_option", message, place, [started.where])
    yield from _around(arm, place)
    for over in arm.services_over:
        if not over.rec.alive:
            message = f"arm {arm.name}: its server no longer answered when the last operation was over"
            yield unknown("service_died", message, place, [over.where])


def _left_running(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """A server is left running for the arm that follows, and for nobody else."""
    if any(history.follows(planned.name) == arm.name for planned in history.plan.arms):
        return
    for over in arm.services_over:
        if over.rec.kept:
            message = f"arm {arm.name}: its server was left running, and no planned arm follows"
            yield fail("service_left_running", message, Place(arm=arm.name), [over.where])


def _around(arm: ArmHistory, place: Place) -> Iterator[Finding]:
    """Start and end stand around the arm's operations, in the client's stream."""
    seens: list[Seen[OperationStarted] | Seen[OperationEnded]] = [*arm.started]
    seens += [seen for of_op in arm.ends.values() for seen in of_op]
    for started in arm.services:
        late = next((seen for seen in arm.started if seen.n < started.n), None)
        if late is not None:
            message = f"arm {arm.name}: its server is recorded as started after operation {late.rec.op} began"
            yield fail("service_misplaced", message, place, [started.where, late.where])
    for over in arm.services_over:
        early = next((seen for seen in seens if seen.n > over.n), None)
        if early is not None:
            message = f"arm {arm.name}: its server is recorded as over before operation {early.rec.op} was"
            yield fail("service_misplaced", message, place, [over.where, early.where])


def _differ(left: Scalar, right: Scalar) -> bool:
    """1, 1.0 and True are three values."""
    return type(left) is not type(right) or left != right
