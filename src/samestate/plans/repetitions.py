"""Repetitions: all arms of a plan again, in fresh engines. Never pooled: each is judged by itself."""

from __future__ import annotations

from typing import NamedTuple

from samestate.plans.errors import PlanError
from samestate.plans.model import ArmPlan, Plan


class RepeatedArm(NamedTuple):
    """One arm of one repetition."""

    repetition: int
    """From 1."""
    arm: ArmPlan
    """As planned."""

    @property
    def name(self) -> str:
        """What the archive calls it: ``candidate``, and from the second repetition on ``candidate-2``."""
        return arm_name(self.arm.name, self.repetition)

    @property
    def running(self) -> ArmPlan:
        """The planned arm under that name."""
        return self.arm.model_copy(update={"name": self.name})


def arm_name(arm: str, repetition: int) -> str:
    """The archive's name of a planned arm in a repetition, from 1."""
    return arm if repetition == 1 else f"{arm}-{repetition}"


def repeated_arms(plan: Plan) -> list[RepeatedArm]:
    """Every arm of every repetition, in the order in which they run; once where the plan says nothing."""
    found: list[RepeatedArm] = []
    for number, order in enumerate(plan.repetitions or ["forward"], 1):
        arms = plan.arms if order == "forward" else reversed(plan.arms)
        found += [RepeatedArm(number, arm) for arm in arms]
    return found


def check_repetitions(plan: Plan) -> None:
    """Raise `PlanError` for repetitions that make no sense."""
    if plan.repetitions == ["forward"]:
        return
    if not plan.repetitions:
        raise PlanError("repetitions: is empty, so nothing would run; write 'forward' or 'reverse' once for each")
    if plan.scenario or plan.prompts or plan.markers:
        raise PlanError("repetitions: only a matrix is repeated; remove them and run the scenario again")
    if "reverse" in plan.repetitions and len(plan.arms) == 1:
        at = plan.repetitions.index("reverse")
        raise PlanError(f"repetitions[{at}]: the plan has one arm, and no order to reverse; make it 'forward'")
