"""Latency plans: every length through the same conditions, trial after trial, without and with an external cache.

A trial of a length is a prompt of its own. Arm ``control`` is OFF, no connector; arm ``candidate`` is ON.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from samestate.evidence.records import OperationName
from samestate.plans.errors import PlanError
from samestate.plans.lengths import evaluate
from samestate.plans.model import AnalyzerPin, ArmPlan, Connector, LatencyPlan, Plan
from samestate.plans.repetitions import repeated_arms
from samestate.plans.scenarios import CONTROL

OFF = (OperationName.COLD, OperationName.REPEAT)
ON = (OperationName.COLD, OperationName.REPEAT, OperationName.RESET, OperationName.RELOAD)
"""What one trial does, by arm: cold, at once again, and again when the local cache alone was reset."""
SIDE_V1 = "latency-side-v1"
"""The analyzer of engines that take turns."""
SIDE_CHECKS = {
    "latency-serial": "latency-turns",
    "latency-reloads": "latency-side-reloads",
    "boundary": "latency-side-boundary",
}
"""What stands there for a check of one engine with a cache."""
BESIDE = (
    "The engines ran at once and took turns: an idle one takes memory, and a little time, from the one that is timed."
)


class Trial(NamedTuple):
    """One prompt of a latency plan."""

    number: int
    """From 1 within its length; 0: a warm-up, never measured."""
    warmup: int
    """From 1 where it is one; else 0."""
    length: int
    """Index in the plan's lengths."""

    def case(self, tokens: int) -> str:
        """``t1-N3584``, a warm-up ``w1-N3584``."""
        word = f"t{self.number}" if self.number else f"w{self.warmup}"
        return f"{word}-N{tokens}"


def trials(plan: Plan) -> list[Trial]:
    """All trials in the order in which every arm makes them: warm-ups first.

    Ascending by trial, then by length; or the measured ones shuffled by the plan's own seed.
    """
    latency = planned(plan)
    lengths = range(len(plan.lengths))
    warmups = [Trial(0, number, length) for number in range(1, latency.warmups + 1) for length in lengths]
    measured = [Trial(number, 0, length) for number in range(1, latency.trials + 1) for length in lengths]
    if latency.order_seed is not None:
        Random(latency.order_seed).shuffle(measured)
    return warmups + measured


def trial_tokens(plan: Plan, c: int) -> list[tuple[Trial, int]]:
    """Every trial and its N at C. Raises `PlanError` where two lengths meet at this C."""
    lengths: list[int] = []
    for index, length in enumerate(plan.lengths):
        try:
            n = evaluate(length, c)
        except PlanError as error:
            raise error.within(f"lengths[{index}]") from None
        if n in lengths:
            raise PlanError(f"lengths[{index}]: {length!r} is {n} tokens at C={c}, as another is; remove one")
        lengths.append(n)
    return [(trial, lengths[trial.length]) for trial in trials(plan)]


def conditions(plan: Plan, arm: str) -> tuple[OperationName, ...]:
    """What one trial does in an arm, in whichever repetition it has that name."""
    names = {one.name: one.arm.name for one in repeated_arms(plan)}
    return OFF if names.get(arm, arm) == CONTROL else ON


def turns(plan: Plan) -> list[tuple[Trial, list[str]]]:
    """Of an interleaved plan: every trial, and the arms in the order in which they make it.

    The arm that begins moves on with every trial, so that none is always first.
    """
    arms = [arm.name for arm in plan.arms]
    return [(trial, [*arms[at % len(arms) :], *arms[: at % len(arms)]]) for at, trial in enumerate(trials(plan))]


def side_by_side(plan: Plan, connectors: Mapping[Connector, str | None]) -> Plan:
    """The plan with one arm a connector, interleaved, in the order of `connectors`: each with its package's release.

    Raises `PlanError` where they make no sense.
    """
    if next(iter(connectors), None) != "none" or len(connectors) < 2:
        raise PlanError("connectors: must be none, to compare with, and then at least one other")
    arms = [
        ArmPlan(name=CONTROL if one == "none" else one, connector=one, release=release)
        for one, release in connectors.items()
    ]
    update = {"interleaved": True}
    changed = plan.model_copy(
        update={
            "name": "latency-side-by-side",
            "title": "Connectors side by side: cold, repeated and reloaded prompts, on engines that take turns",
            "arms": arms,
            "repetitions": ["forward"],
            "latency": planned(plan).model_copy(update=update),
            "analyzer": AnalyzerPin(id=SIDE_V1, source_sha256=None),
            "required_checks": [SIDE_CHECKS.get(check, check) for check in plan.required_checks],
            "not_shown": [*plan.not_shown, BESIDE],
        }
    )
    check_side_by_side(changed)
    return Plan.model_validate(changed.model_dump())


def check_side_by_side(plan: Plan) -> None:
    """Raise `PlanError` for an interleaved plan that makes no sense."""
    names = [arm.name for arm in plan.arms]
    if names[:1] != [CONTROL] or len(names) < 2 or len(set(names)) < len(names):
        raise PlanError(f"arms: must be {CONTROL!r} first, and then at least one other, each once")
    if plan.repetitions != ["forward"]:
        raise PlanError("repetitions: engines that take turns have one; remove them, and run again")
    if plan.analyzer.id != SIDE_V1:
        raise PlanError(f"analyzer.id: {plan.analyzer.id} judges engines one after another; make it {SIDE_V1!r}")


def planned(plan: Plan) -> LatencyPlan:
    """Raises `PlanError` for a plan that measures no latency."""
    if plan.latency is None:
        raise PlanError(f"plan {plan.name}: has no latency, so it is no latency plan")
    return plan.latency


def check_latency(plan: Plan) -> None:
    """Raise `PlanError` for a latency plan that makes no sense."""
    if plan.operations or plan.series:
        raise PlanError("operations, series: a latency plan's conditions are fixed; remove them")
    if plan.instruments.audit_level != "metadata":
        raise PlanError(
            f"instruments.audit_level: {plan.instruments.audit_level!r} reads pages, which takes the time that is "
            "measured; make it 'metadata'"
        )
    if plan.instruments.save_delay_ms:
        raise PlanError("instruments.save_delay_ms: holds saves back, and is measured with them; make it 0")
    if plan.analyzer.id == SIDE_V1 and not planned(plan).interleaved:
        raise PlanError(f"latency.interleaved: is false, and {SIDE_V1} judges engines that take turns; make it true")
    if plan.engine.core != "own-process":
        raise PlanError("engine.core: a server's engine core has its own process; make it 'own-process'")
