"""``resets``: after a reset that the engine confirmed, nothing is local but what was computed or loaded since.

`paths` says where that is not known; here it is held against the engine that it confirmed what it did not do.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding
from samestate.checks.history import ArmHistory, History
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations, holds_local
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown
from samestate.evidence.records import OperationName

CHECK = "resets"


def resets(history: History) -> CheckResult:
    """Every generation of every arm after its first confirmed reset."""
    findings: list[Finding] = []
    examined = 0
    for arm in history.arms.values():
        prefixes = Prefixes(history, arm)
        for one, since in _after_resets(history, arm):
            examined += 1
            findings += _left_over(history, prefixes, one, since)
    if not examined:
        message = "no generation follows a confirmed reset"
        return not_exercised(CHECK, "no_reset", message, unit="generations")
    summary = f"{examined - len(findings)}/{examined} generations after a reset found nothing of before it locally"
    return conclude(CHECK, findings, unit="generations", examined=examined, summary=summary)


def _after_resets(history: History, arm: ArmHistory) -> Iterator[tuple[Generation, list[Generation]]]:
    """Generations after a confirmed reset, each with those that came between, and with its company."""
    planned = {one.op.op: one for one in generations(history, [arm])}
    since: list[Generation] = []
    confirmed = False
    for op in [op for case in history.cases(arm.name) for op in case.operations]:
        if op.name is OperationName.RESET:
            seen = arm.resets.get(op.op, [])
            confirmed, since = bool(seen) and all(one.rec.local_reset for one in seen), []
            continue
        one = planned[op.op]
        company = [
            other for other in planned.values() if op.together and other.op.together == op.together and other != one
        ]
        if confirmed:
            yield one, [*since, *company]
        since.append(one)


def _left_over(history: History, prefixes: Prefixes, one: Generation, since: list[Generation]) -> Iterator[Finding]:
    local = one.local
    if not local or one.first is None or any(holds_local(prefixes, one, other) for other in since):
        return
    read = all(prefixes.digest(other.request or "", other.tokens) is not None for other in [one, *since])
    known = history.whole(one.arm.name) and read and all(other.output and other.schedule for other in since)
    message = (
        f"{one.name}: {local} tokens local, though the engine had confirmed a reset and no request since then that "
        "begins so had reached them"
    )
    place = one.place.model_copy(update={"boundary": local})
    yield (fail if known else unknown)("reset_left_local", message, place, [one.first.where])
