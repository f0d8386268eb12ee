"""Repairs of the engine itself (`samestate.evidence.controls.ENGINE_REPAIRS`) in a plan: in every arm, or in none."""

from __future__ import annotations

from samestate.evidence.controls import ENGINE_REPAIRS
from samestate.plans.errors import PlanError
from samestate.plans.model import Plan


def with_engine_repair(plan: Plan, repair: str) -> Plan:
    """The same plan with an engine repair in all of its arms. Raises `PlanError` where it cannot be there."""
    for index, arm in enumerate(plan.arms):
        if arm.repair not in (None, repair):
            raise PlanError(f"arms[{index}].repair: is {arm.repair!r}, and an arm has one; leave {repair!r} out")
    arms = [arm.model_copy(update={"repair": repair}) for arm in plan.arms]
    changed = plan.model_copy(update={"arms": arms})
    check_engine_repairs(changed)
    return changed


def check_engine_repairs(plan: Plan) -> None:
    """Raise `PlanError` for an engine repair that only some arms have, or that nobody could read back."""
    named = sorted({arm.repair for arm in plan.arms if arm.repair in ENGINE_REPAIRS})
    if not named:
        return
    for index, arm in enumerate(plan.arms):
        if arm.repair != named[0]:
            raise PlanError(
                f"arms[{index}].repair: is {arm.repair or 'none'}, and another arm has {named[0]!r}, which changes "
                "what an engine computes; put it into every arm"
            )
    if plan.markers is not None or plan.latency is not None or plan.engine.core != "here":
        raise PlanError(
            f"arms[0].repair: {named[0]!r} is read back from an engine that runs in one process, with its core; "
            "remove it from this plan"
        )
