"""Scenarios: prompts that share beginnings, in an order of their own, over one engine or several after each other."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import NamedTuple

from samestate.evidence.records import OperationName
from samestate.plans.errors import PlanError
from samestate.plans.lengths import parse
from samestate.plans.model import Plan, ReusePath
from samestate.plans.turns import check_turns

CONTROL, CANDIDATE = "control", "candidate"
BATCHED = "batched"
"""An arm without a connector that computes the prompts together and cold: what company alone does to an output."""
RESET = "reset"
"""Case of a scenario's resets; no prompt has this name."""


class ScenarioStep(NamedTuple):
    """One operation of a scenario, before C is known."""

    op: str
    """``trunk.1``: how often the prompt came so far in this scenario; ``reset-1``; in the control ``trunk.cold``."""
    case: str
    name: OperationName
    prompt: str | None
    salt: str | None
    together: str | None
    path: ReusePath
    output_tokens: int


def scenario_steps(plan: Plan, arm: str) -> list[ScenarioStep]:
    """What `arm` does, in order. An arm that the plan does not know is taken for a control.

    The control computes every prompt once, alone and after a reset, so that it reuses nothing.
    """
    if arm == CONTROL or all(known.name != arm for known in plan.arms):
        return [step for prompt in plan.prompts for step in _cold(prompt.name, plan.output_tokens)]
    seen, resets, batches = Counter[str](), count(1), count(1)
    steps: list[ScenarioStep] = []
    for planned in plan.scenario:
        if planned.reset:
            step = ScenarioStep(f"{RESET}-{next(resets)}", RESET, OperationName.RESET, None, None, None, "any", 0)
            steps += [step] if planned.arm == arm else []
            continue
        together = f"batch-{next(batches)}" if len(planned.prompts) > 1 else None
        for prompt in planned.prompts:
            seen[prompt] += 1
            op = f"{prompt}.{seen[prompt]}"
            outputs = planned.output_tokens or plan.output_tokens
            step = ScenarioStep(op, prompt, OperationName.PROMPT, prompt, planned.salt, together, planned.path, outputs)
            steps += [step] if planned.arm == arm else []
    return steps


def cold_op(prompt: str) -> str:
    """The control's operation that computes `prompt`."""
    return f"{prompt}.{OperationName.COLD}"


def check_scenario(plan: Plan) -> None:
    """Raise `PlanError` for a scenario that makes no sense."""
    known: list[str] = []
    for index, prompt in enumerate(plan.prompts):
        where = f"prompts[{index}]"
        if prompt.name in (*known, RESET):
            raise PlanError(f"{where}.name: {prompt.name!r} is taken; choose another")
        if (prompt.shares is None) != (prompt.shared is None):
            raise PlanError(f"{where}: 'shares' and 'shared' come together; add the other or remove both")
        if prompt.shares is not None and prompt.shares not in known:
            raise PlanError(f"{where}.shares: no prompt {prompt.shares!r} before this one; name an earlier one")
        for field in ("tokens", "shared"):
            if (length := getattr(prompt, field)) is not None:
                try:
                    parse(length)
                except PlanError as error:
                    raise error.within(f"{where}.{field}") from None
        known.append(prompt.name)
    check_turns(plan)
    arms = [arm.name for arm in plan.arms if arm.name != CONTROL]
    reached = 0
    for index, step in enumerate(plan.scenario):
        where = f"scenario[{index}]"
        if step.reset == bool(step.prompts):
            raise PlanError(f"{where}: is a reset, or has prompts, and not both; write one of them")
        if step.reset and (step.salt is not None or step.path != "any" or step.output_tokens is not None):
            raise PlanError(f"{where}: a reset has no salt, no path and no output_tokens; remove them")
        if (step.output_tokens or 0) > plan.output_tokens:
            raise PlanError(f"{where}.output_tokens: the cold runs make {plan.output_tokens}; ask for at most as many")
        for name in step.prompts:
            if name not in known:
                raise PlanError(f"{where}.prompts: no prompt {name!r}; known: {', '.join(known)}")
        if len(set(step.prompts)) < len(step.prompts):
            raise PlanError(f"{where}.prompts: a prompt is there twice; give it a step of its own")
        if step.arm not in arms:
            raise PlanError(f"{where}.arm: no arm {step.arm!r} that runs a scenario; known: {', '.join(arms)}")
        if arms.index(step.arm) < reached:
            raise PlanError(f"{where}.arm: {step.arm!r} is over when this step comes; keep the arms' order")
        reached = arms.index(step.arm)
    unused = [name for name in known if all(name not in step.prompts for step in plan.scenario)]
    if unused:
        raise PlanError(f"prompts: {', '.join(unused)} is in no step; use or remove it")
    idle = [arm for arm in arms if all(step.arm != arm or step.reset for step in plan.scenario)]
    if idle:
        raise PlanError(f"scenario: arm {', '.join(idle)} has no prompts; give it a step or remove it")


def _cold(prompt: str, output_tokens: int) -> list[ScenarioStep]:
    op = cold_op(prompt)
    return [
        ScenarioStep(f"{prompt}.{RESET}", prompt, OperationName.RESET, None, None, None, "any", 0),
        ScenarioStep(op, prompt, OperationName.COLD, prompt, None, None, "cold", output_tokens),
    ]
