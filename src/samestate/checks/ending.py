"""How an engine ended: in order or, where that is planned, by a kill from outside once all was over.

An engine that died by itself leaves neither record, and streams that nobody closed: unknown, whatever is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestate.checks.base import Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.records import EngineKilled


def ending(history: History, arm: ArmHistory) -> Iterator[Finding]:
    """Findings about an arm's end, against ``ended`` of the plan."""
    planned = next((plan.ended for plan in history.plan.arms if plan.name == arm.name), "stopped")
    place = Place(arm=arm.name)
    if planned == "stopped":
        for seen in arm.killed:
            yield fail("unplanned_kill", f"arm {arm.name}: the engine was killed, planned to stop", place, [seen.where])
        if arm.engines and not arm.stopped:
            message = f"arm {arm.name}: no engine_stopped record: the engine did not shut down in order"
            yield unknown("missing_engine_stop", message, place)
        return
    for stop in arm.stopped:
        message = f"arm {arm.name}: the engine stopped in order, planned to be killed"
        yield fail("not_killed", message, place, [stop.where])
    if arm.engines and not arm.killed:
        yield unknown("missing_kill", f"arm {arm.name}: no engine_killed record, planned to be killed", place)
    if len(arm.killed) > 1:
        wheres = [seen.where for seen in arm.killed]
        yield fail("many_kills", f"arm {arm.name}: the engine was killed {len(wheres)} times, planned 1", place, wheres)
    for kill in arm.killed:
        yield from _kill(history, arm, kill, place)


def _kill(history: History, arm: ArmHistory, kill: Seen[EngineKilled], place: Place) -> Iterator[Finding]:
    if not kill.stream.endswith("/client.jsonl"):
        message = f"arm {arm.name}: the kill is not recorded by the client, which alone knows of it"
        yield fail("kill_misplaced", message, place, [kill.where])
    if [seen.rec.process for seen in arm.engines] != [kill.rec.process]:
        message = f"arm {arm.name}: process {kill.rec.process or 'unnamed'} was killed, which is not the engine's"
        yield fail("wrong_process", message, place, [kill.where])
    before: list[Seen[Any]] = [*arm.engines, *arm.started, *(seen for of_op in arm.ends.values() for seen in of_op)]
    late = next((seen for seen in before if seen.t_ns > kill.t_ns), None)
    if late is not None:
        message = f"arm {arm.name}: the engine is recorded as killed before its operations were over"
        yield fail("killed_early", message, place, [kill.where, late.where])
    for other in history.arms.values():
        for seen in other.engines if history.follows(other.name) == arm.name else ():
            if seen.t_ns < kill.t_ns:
                message = f"arm {other.name} started before the engine that it follows was killed"
                yield fail("kill_too_late", message, Place(arm=other.name), [kill.where, seen.where])
