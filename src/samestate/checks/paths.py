"""``paths``, and ``non-vacuity`` of a scenario: where reused tokens came from, and whether that is what was planned.

What the lookup says was local and what the first step credits divide p; counters, answer and allocation are
other sources of the same numbers. A generation that took another path than planned shows nothing of the planned one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.continuation import control_reused, with_varied_outputs
from samestate.checks.credit import Credit
from samestate.checks.history import ArmHistory, History
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations, holds_local
from samestate.checks.transfers import confirmed, rank_bytes
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import EXTERNAL_HITS, LOCAL_HITS, OperationName
from samestate.plans.scenarios import CONTROL, RESET

CHECK = "paths"
FROM_OUTSIDE = ("external", "mixed")


def paths(history: History) -> CheckResult:
    """Hold the path of every generation of every arm against the planned one, and its sources against each other."""
    arms = [history.arm(CONTROL), *history.candidates]
    checked = generations(history, arms)
    findings = [finding for arm in arms for finding in _resets(history, arm)]
    other = [found for one in checked for found in _path(one)]
    findings += other
    for one in checked:
        findings += _sources(history, one)
    for arm in history.candidates:
        findings += _left_over(history, arm, [one for one in checked if one.arm.name == arm.name])
    for _, unit in groupby(checked, key=lambda one: (one.arm.name, one.op.together or one.op.op)):
        findings += _counters(history, list(unit))
    taken = [one.path for one in checked if one.arm.name != CONTROL]
    counts = ", ".join(f"{path} {taken.count(path)}" for path in ("cold", "local", "external", "mixed"))
    summary = f"{len(checked) - len(other)}/{len(checked)} generations took the planned path; candidates: {counts}"
    return conclude(CHECK, findings, unit="generations", examined=len(checked), summary=summary)


def _path(one: Generation) -> Iterator[Finding]:
    if one.path is None:
        missing = "step" if one.first is None else "answered lookup"
        message = f"{one.name}: no {missing} is recorded: where its reused tokens came from is not known"
        yield unknown("path_unknown", message, one.place)
    elif one.op.path not in ("any", one.path):
        assert one.first is not None
        message = (
            f"{one.name}: planned {one.op.path}, and it was {one.path} ({one.local} tokens local, {one.external} "
            f"external): the {one.op.path} path was not exercised"
        )
        yield unknown("path_not_taken", message, one.place, [one.first.where])


def _left_over(history: History, arm: ArmHistory, checked: list[Generation]) -> Iterator[Finding]:
    """What is local was computed or loaded since the engine's start or the last reset: a reset may leave state behind.

    And whoever took nothing from outside loads nothing.
    """
    prefixes = Prefixes(history, arm)
    planned = {one.op.op: one for one in checked}
    since: list[Generation] = []
    for op in [op for case in history.cases(arm.name) for op in case.operations]:
        if op.name is OperationName.RESET:
            since = []
            continue
        one = planned[op.op]
        company = [other for other in checked if op.together and other.op.together == op.together and other != one]
        if one.local and not any(holds_local(prefixes, one, other) for other in [*since, *company]):
            message = (
                f"{one.name}: {one.local} tokens local, and no request since the last reset or the engine's start "
                "that begins so had reached them: the local cache was not empty"
            )
            yield unknown("stale_local", message, one.place, [one.first.where] if one.first else [])
        loads = [load for of_rank in one.loads.values() for load in of_rank]
        if loads and one.external == 0 and one.request not in arm.preempted:
            message = f"{one.name}: it was {one.path}, no token external, and {len(loads)} loads of it are recorded"
            yield unknown("load_not_credited", message, one.place, [load.submitted.where for load in loads])
        since.append(one)


def _sources(history: History, one: Generation) -> Iterator[Finding]:
    """Answer, lookup and allocation name p; of a request that was preempted they name what it resumed from."""
    if one.output is None or one.first is None or one.request is None or one.request in one.arm.preempted:
        return
    credit = Credit(one.arm, one.first, one.place, whole=history.whole(one.arm.name))
    yield from credit.cached(one.output.rec.cached_tokens, one.output.where)
    if one.arm.connected:
        yield from credit.looked_up(one.request, one.tokens)
        if one.external:
            yield from credit.allocated(one.request)


def _counters(history: History, unit: list[Generation]) -> Iterator[Finding]:
    """The engine counts what its requests reused; of a batch it counts the sum."""
    arm, ops = unit[0].arm, ", ".join(one.op.op for one in unit)
    if any(one.request in arm.preempted for one in unit):
        return
    for counter, tokens in (
        (LOCAL_HITS, [one.local for one in unit]),
        (EXTERNAL_HITS, [one.external for one in unit]),
    ):
        counted, evidence = arm.counter(unit[0].op.op, counter), arm.evidence(unit[0].op.op)
        known = [count for count in tokens if count is not None]
        if counted is None:
            if arm.connected or counter == LOCAL_HITS:
                message = f"arm {arm.name}: {ops}: {counter} cannot be read"
                yield unknown("counter_unreadable", message, unit[0].place, evidence)
        elif len(known) == len(tokens) and counted != sum(known):
            message = f"arm {arm.name}: {ops}: {counter} counts {counted:.0f} tokens, schedule and lookup {sum(known)}"
            make = fail if history.whole(arm.name) else unknown
            yield make("counter_disagrees", message, unit[0].place, evidence)


def _resets(history: History, arm: ArmHistory) -> Iterator[Finding]:
    for case in history.cases(arm.name):
        for op in case.operations:
            if op.name is OperationName.RESET:
                yield from confirmed(arm, case.id if case.id != RESET else None, op.op)


def non_vacuity(history: History) -> CheckResult:
    """Every candidate that plans it moved bytes from the external cache, the control none, and outputs vary."""
    checked = generations(history, history.candidates)
    planning = {one.arm.name for one in checked if one.op.path in FROM_OUTSIDE} or {
        arm.name for arm in history.candidates
    }
    moved = [one for one in checked if one.external and any(rank_bytes(one.loads).values())]
    findings = control_reused(history)
    for name in sorted(planning - {one.arm.name for one in moved}):
        message = f"arm {name}: no generation moved a byte from the external cache: nothing was tested"
        findings.append(unknown("vacuous", message, Place(arm=name)))
    return with_varied_outputs(history, findings, f"{len(moved)} generations moved bytes")
