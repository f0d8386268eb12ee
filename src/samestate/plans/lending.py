"""Which plans' archives may lend their control arm to a run of another plan (requirements 82).

An instrumented run is compared with an archived run that was not: the control reuses nothing
external, so what watches the candidate does not touch it. Everything that decides the control's
tokens must be equal.
"""

from __future__ import annotations

from samestate.plans.model import ArmPlan, Plan

_DECIDE_THE_CONTROL = (
    "engine",
    "lengths",
    "operations",
    "prompts",
    "template",
    "output_tokens",
    "series",
    "seed",
    "temperature",
    "ignore_eos",
)


def objection(plan: Plan, lender: Plan) -> str | None:
    """Why `lender`'s control cannot stand in for `plan`'s own; None: it can.

    Either both are one plan, or `lender` has `plan`'s name (its other arms have another connector, release or
    option) or the one in `control_from`, and the two do not differ in anything that decides what a control computes.
    """
    if lender == plan:
        return None
    if lender.name not in (plan.name, plan.control_from):
        lenders = " or ".join(name for name in (plan.name, plan.control_from) if name)
        return f"is of plan {lender.name}; plan {plan.name} takes its control from plan {lenders}"
    ours, theirs = _control(plan), _control(lender)
    if ours != theirs:
        return "its control arm is another than this plan's"
    differing = [name for name in _DECIDE_THE_CONTROL if getattr(plan, name) != getattr(lender, name)]
    if differing:
        return f"differs from plan {plan.name} in {', '.join(differing)}"
    return None


def _control(plan: Plan) -> list[ArmPlan]:
    return [arm for arm in plan.arms if arm.connector == "none"]
