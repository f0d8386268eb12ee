"""Engines that take turns: trial by trial every one of them makes it, and while one does all others are idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from samestate.lab.operate import Operator
from samestate.lab.resolve import Resolution, planned_cases
from samestate.plans.latency import trial_tokens, turns
from samestate.plans.model import Plan


class Over(NamedTuple):
    """An operation that is over."""

    arm: str
    op: str
    done: int
    """Operations of all arms that are over, this one included."""
    total: int


def take_turns(plan: Plan, resolution: Resolution, operators: Mapping[str, Operator]) -> Iterator[Over]:
    """Have all arms make all trials, in the plan's order; every operation is told when its trial is over.

    Raises `EngineError` and `RunError`.
    """
    c = resolution.resolved.checkpoint_interval
    cases = {arm: {case.id: case for case in planned_cases(plan, c, arm)} for arm in operators}
    total = sum(len(case.operations) for of_arm in cases.values() for case in of_arm.values())
    tokens = dict(trial_tokens(plan, c))
    done = 0
    for trial, arms in turns(plan):
        for arm in arms:
            over: list[str] = []
            operators[arm].perform([cases[arm][trial.case(tokens[trial])]], over.append)
            for op in over:
                done += 1
                yield Over(arm, op, done, total)
