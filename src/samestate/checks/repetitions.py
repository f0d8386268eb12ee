"""``repetitions``: every one ran in fresh engines, alike, and the arms one after another in the planned order.

Not exercised where all arms run once, as the plan lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.seen import Seen
from samestate.checks.settings import effective_settings
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.plans.repetitions import repeated_arms

CHECK = "repetitions"


def repetitions(history: History) -> CheckResult:
    """Hold arms of all repetitions against the planned order, and against the same arm of the first."""
    planned = history.plan.repetitions
    if planned in ([], ["forward"]):
        message = "every arm runs once, in the plan's order"
        return not_exercised(CHECK, "not_planned", message, unit="arms")
    order = [one.name for one in repeated_arms(history.plan)]
    live = [history.arms[name] for name in order if name in history.arms and history.arms[name].imported_from is None]
    findings = [
        *_missing(history, order),
        *_attempted(history, order),
        *_in_time(live),
        *_fresh(live),
        *_alike(history),
    ]
    summary = f"{len(live)} arms in fresh engines, in order: {', '.join(arm.name for arm in live)}"
    if findings:
        summary = findings[0].message
    return conclude(CHECK, findings, unit="arms", examined=len(live), summary=summary)


def _missing(history: History, order: list[str]) -> Iterator[Finding]:
    for name in order:
        if name not in history.arms:
            yield unknown("missing_arm", f"arm {name} is planned and not in the archive", Place(arm=name))


def _attempted(history: History, order: list[str]) -> Iterator[Finding]:
    """The attempt said the order before it began."""
    attempt = history.attempt
    expected = [name for name in order if name in attempt.arms]
    said = [name for name in attempt.arms if name in order]
    if said != expected:
        message = f"the attempt ran arms in order {', '.join(said)}, planned {', '.join(expected)}"
        yield fail("wrong_order", message, evidence=[attempt.where])


def _in_time(live: list[ArmHistory]) -> Iterator[Finding]:
    """No arm began before the one that it comes after was over, by the clock that all share."""
    for before, after in pairwise(live):
        begins, over = _begins(after), _over(before)
        place = Place(arm=after.name)
        if begins is None or over is None:
            undated = after.name if begins is None else before.name
            yield unknown("not_dated", f"arm {undated}: no start or no end of its engine is recorded", place)
        elif begins[0] < over[0]:
            early = (over[0] - begins[0]) / 1e6
            message = f"arm {after.name} began {early:.1f} ms before arm {before.name}, which it comes after, was over"
            yield fail("wrong_order", message, place, [begins[1], over[1]])


def _begins(arm: ArmHistory) -> tuple[int, str] | None:
    """When its engine, its server or its first operation started, and where that stands."""
    seens = [_dated(seen) for of_kind in (arm.engines, arm.services, arm.started) for seen in of_kind]
    return min(seens) if arm.engines else None


def _over(arm: ArmHistory) -> tuple[int, str] | None:
    """When its last operation, its engine and its server were over, and where that stands."""
    ends = [_dated(seen) for of_op in arm.ends.values() for seen in of_op]
    ends += [_dated(seen) for of_kind in (arm.engines, arm.stopped, arm.services_over) for seen in of_kind]
    return max(ends) if arm.stopped else None


def _dated(seen: Seen[Any]) -> tuple[int, str]:
    return seen.t_ns, seen.where


def _fresh(live: list[ArmHistory]) -> Iterator[Finding]:
    """No two arms ran in one engine process."""
    seen_in: dict[str, ArmHistory] = {}
    for arm in live:
        for seen in arm.engines[:1]:
            process, place = seen.rec.process, Place(arm=arm.name)
            other = seen_in.setdefault(process, arm)
            if not process:
                yield unknown("unnamed_process", f"arm {arm.name}: its engine does not name its process", place)
            elif other is not arm:
                message = f"arm {arm.name} ran in the engine process of arm {other.name} ({process})"
                yield fail("same_process", message, place, [other.engine.where, seen.where])


def _alike(history: History) -> Iterator[Finding]:
    """Settings, versions and streams of an arm are those of the same arm in the first repetition."""
    declared = history.plan.differing_settings
    for one in repeated_arms(history.plan):
        first, again = history.arms.get(one.arm.name), history.arms.get(one.name)
        if one.repetition == 1 or first is None or again is None:
            continue
        place, evidence = Place(arm=again.name), [first.engine.where, again.engine.where]
        was, now = effective_settings(first.engine.rec), effective_settings(again.engine.rec)
        for name in sorted(was.keys() | now.keys()):
            if any(name == prefix or name.startswith(f"{prefix}.") for prefix in declared):
                continue
            if name not in was or name not in now or (type(was[name]), was[name]) != (type(now[name]), now[name]):
                ours, theirs = (repr(side[name]) if name in side else "absent" for side in (was, now))
                message = f"{name} is {ours} in arm {first.name} and {theirs} in arm {again.name}"
                yield fail("repetition_differs", message, place, evidence)
        if first.streams != again.streams:
            message = f"arm {again.name} left {len(again.streams)} streams, arm {first.name} {len(first.streams)}"
            names = ", ".join(sorted({*first.streams} ^ {*again.streams}))
            yield unknown("streams_differ", f"{message}: {names}", place)
