"""From a plan and C to the operations that every arm performs, in order."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from samestate.evidence.records import OperationName
from samestate.plans.errors import PlanError
from samestate.plans.lengths import evaluate
from samestate.plans.model import Plan

Role = Literal["target", "interposer-1", "interposer-2"]
_MAX_INTERPOSERS = 2


class PlannedOperation(NamedTuple):
    """One step of a case."""

    op: str
    """Unique within an arm: ``N3584.cold``, ``N3584.interposer-1``, ``N3584.repeat-1``."""
    name: OperationName
    role: Role | None
    """Whose tokens are the prompt; None for a reset."""


class Case(NamedTuple):
    """One prompt length and what is done with it."""

    id: str
    """``N3584``."""
    tokens: int
    """N."""
    operations: list[PlannedOperation]


class Workload(NamedTuple):
    """How much a plan asks for. Everything but the starts is for one arm."""

    engine_starts: int
    operations: int
    generations: int
    resets: int
    output_tokens: int
    distinct_inputs: int


def workload(plan: Plan) -> Workload:
    """Count what a plan asks for, which no C changes."""
    counts = Counter(plan.operations)
    cases_, generations = len(plan.lengths), len(plan.operations) - counts[OperationName.RESET]
    return Workload(
        engine_starts=len(plan.arms),
        operations=cases_ * len(plan.operations),
        generations=cases_ * generations,
        resets=cases_ * counts[OperationName.RESET],
        output_tokens=cases_ * generations * plan.output_tokens,
        distinct_inputs=cases_ * (1 + counts[OperationName.INTERPOSER]),
    )


def boundary(n: int, c: int) -> int:
    """B under the strict prefix: the last checkpoint before the last token of `n`.

    C·⌊(N−1)/C⌋, so 0 ≤ B ≤ N−1 and N−B ≥ 1. Whether that checkpoint exists is another
    question. Raises ValueError unless n ≥ 1 and c ≥ 1.
    """
    if n < 1 or c < 1:
        raise ValueError(f"N and C must be at least 1, got N={n}, C={c}")
    return c * ((n - 1) // c)


def cases(plan: Plan, c: int) -> list[Case]:
    """The cases of an arm, in the plan's order. Raises `PlanError` when two lengths meet at this C."""
    planned: dict[int, Case] = {}
    for index, length in enumerate(plan.lengths):
        try:
            n = evaluate(length, c)
        except PlanError as error:
            raise error.within(f"lengths[{index}]") from None
        if n in planned:
            raise PlanError(f"lengths[{index}]: {length!r} is {n} tokens at C={c}, as another length is; remove one")
        planned[n] = Case(f"N{n}", n, _case_operations(f"N{n}", plan.operations))
    return list(planned.values())


def check_operations(operations: list[OperationName]) -> None:
    """Raise `PlanError` unless a case is cold first and then reuses: a reload after a reset, or repeats without one."""
    counts = Counter(operations)
    if not operations or operations[0] is not OperationName.COLD:
        raise PlanError("operations[0]: a case begins with 'cold'; put it first")
    for name in (OperationName.COLD, OperationName.RESET, OperationName.RELOAD):
        if counts[name] > 1:
            raise PlanError(f"operations: {name.value!r} comes {counts[name]} times; a case has at most one")
    if counts[OperationName.INTERPOSER] > _MAX_INTERPOSERS:
        raise PlanError(f"operations: more than {_MAX_INTERPOSERS} interposers; remove some")
    if OperationName.REPEAT in counts:
        for name in (OperationName.RESET, OperationName.RELOAD):
            if name in counts:
                raise PlanError(f"operations: {name.value!r} beside 'repeat', which keeps the local cache; remove one")
        return
    if OperationName.RELOAD not in counts:
        raise PlanError(
            "operations: no 'reload' and no 'repeat', so nothing is reused; add 'reset' and 'reload', or 'repeat'"
        )
    reload = operations.index(OperationName.RELOAD)
    if OperationName.RESET not in operations[:reload]:
        raise PlanError(
            f"operations[{reload}]: 'reload' without 'reset' before it is a local hit; put 'reset' before it"
        )


def _case_operations(case: str, operations: list[OperationName]) -> list[PlannedOperation]:
    planned: list[PlannedOperation] = []
    interposers = repeats = 0
    for name in operations:
        match name:
            case OperationName.INTERPOSER:
                interposers += 1
                role: Role = "interposer-1" if interposers == 1 else "interposer-2"
                planned.append(PlannedOperation(f"{case}.{role}", name, role))
            case OperationName.REPEAT:
                repeats += 1
                planned.append(PlannedOperation(f"{case}.{name}-{repeats}", name, "target"))
            case OperationName.RESET:
                planned.append(PlannedOperation(f"{case}.{name}", name, None))
            case OperationName.COLD | OperationName.RELOAD:
                planned.append(PlannedOperation(f"{case}.{name}", name, "target"))
    return planned
