"""``topology``: every arm is one engine of its own, all ranks there, no half of a pair (requirements 1, 2, 86).

Not exercised where no arm records controls, as before connector roles were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

CHECK = "topology"
ROLE = "kv_transfer_config.kv_role"
BOTH = "kv_both"
"""vLLM's word for an engine that stores and loads; a producer or a consumer alone is half of a disaggregated pair."""


def topology(history: History) -> CheckResult:
    """One engine an arm: no replicas, every rank of it registered, prefill and decode in the same one."""
    arms = list(history.arms.values())
    if not any(arm.engine.rec.controls is not None for arm in arms if arm.engines):
        return not_exercised(CHECK, "not_recorded", "no arm records what it would take", unit="arms")
    findings: list[Finding] = []
    for arm in arms:
        findings += [*_one_engine(arm), *_ranks(arm), *_role(arm)]
    findings += _fresh([arm for arm in arms if arm.imported_from is None])
    shapes = sorted({_shape(arm) for arm in arms})
    summary = f"{len(arms)} arms of one engine each: {', '.join(shapes)}"
    if findings:
        summary = findings[0].message
    return conclude(CHECK, findings, unit="arms", examined=len(arms), summary=summary)


def _shape(arm: ArmHistory) -> str:
    rec = arm.engine.rec
    return f"tensor {rec.tensor_parallel} x pipeline {rec.pipeline_parallel}"


def _one_engine(arm: ArmHistory) -> Iterator[Finding]:
    place = Place(arm=arm.name)
    if len(arm.engines) > 1:
        wheres = [seen.where for seen in arm.engines]
        yield fail("not_one_engine", f"arm {arm.name}: {len(arm.engines)} engines started in it", place, wheres)
    replicas = arm.engine.rec.data_parallel
    if replicas != 1:
        message = f"arm {arm.name}: {replicas} replicas (data_parallel), planned one engine"
        yield fail("replicas", message, place, [arm.engine.where])


def _ranks(arm: ArmHistory) -> Iterator[Finding]:
    """Ranks register where a connector is audited, and nowhere else."""
    rec = arm.engine.rec
    if rec.connector is None:
        return
    size = rec.ranks
    for rank in sorted({*range(size)} - arm.ranks.keys()):
        message = f"arm {arm.name}: rank {rank} of {size} registered no cache"
        yield unknown("missing_rank", message, Place(arm=arm.name, rank=rank), [arm.engine.where])
    for rank, seen in sorted(arm.ranks.items()):
        if seen.rec.world_size != size or rank >= size:
            message = f"arm {arm.name}: rank {rank} is one of {seen.rec.world_size}, the engine has {size}"
            yield fail("wrong_world", message, Place(arm=arm.name, rank=rank), [arm.engine.where, seen.where])


def _role(arm: ArmHistory) -> Iterator[Finding]:
    engine = arm.engine
    role, expected = engine.rec.settings.get(ROLE), BOTH if engine.rec.connector else None
    if role == expected:
        return
    place = Place(arm=arm.name)
    if role is None:
        message = f"arm {arm.name}: the role of its connector is not recorded ({ROLE})"
        yield unknown("role_not_recorded", message, place, [engine.where])
    else:
        message = f"arm {arm.name}: {ROLE} is {role!r}, planned {expected or 'none'}: prefill and decode in one engine"
        yield fail("disaggregated", message, place, [engine.where])


def _fresh(live: list[ArmHistory]) -> Iterator[Finding]:
    """No two live arms in one engine process."""
    seen_in: dict[str, ArmHistory] = {}
    for arm in live:
        process, place = arm.engine.rec.process, Place(arm=arm.name)
        other = seen_in.setdefault(process, arm)
        if not process:
            yield unknown("unnamed_process", f"arm {arm.name}: its engine does not name its process", place)
        elif other is not arm:
            message = f"arm {arm.name} ran in the engine process of arm {other.name} ({process})"
            yield fail("same_process", message, place, [other.engine.where, arm.engine.where])
