"""Why two outputs of one prompt differ: schedule, kernel, storage, state or unknown, with the evidence in that order.

An earlier cause explains a difference before a later one is asked: steps of another shape change bits without any
fault, so do other kernels, and other weights more than bits. Only where none of these is seen to differ, and the cold
runs of both sides agree, is the reused state to blame. What was not recorded is said, and never called the same; an
output that cannot be compared is listed, and never passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from samestate.checks.base import CheckResult
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.seen import Seen
from samestate.evidence.records import OperationOutput
from samestate.plans.errors import PlanError
from samestate.plans.scenarios import CONTROL
from samestate.reports.cause import Cause, Side, Step
from samestate.reports.causes import causes, first_difference
from samestate.reports.wholeness import damage

__all__ = ["Cause", "Explained", "Explanation", "Step", "explain"]


class Explained(NamedTuple):
    """Two outputs of one prompt that differ."""

    arm: str
    op: str
    against: str
    """``control N3584.cold``."""
    first_difference: int
    """Index of the token."""
    cause: Cause
    steps: list[Step]


class Explanation(NamedTuple):
    """What an archive's unequal outputs come from."""

    compared: int
    """Pairs of outputs of one prompt."""
    explained: list[Explained]
    unseen: list[str]
    """Planned arms that are not there, and operations whose output could not be compared; each with the reason."""
    damage: str | None
    """Why nothing here is evidence; None: the archive is sealed and undamaged."""

    @property
    def complete(self) -> bool:
        """Whether every output was compared, in an archive that may speak, and every difference has a cause."""
        told = all(one.cause is not Cause.UNKNOWN for one in self.explained)
        return bool(self.compared) and told and not self.unseen and self.damage is None


Reference = tuple[ArmHistory, str, Seen[OperationOutput]]


def explain(history: History, results: Sequence[CheckResult]) -> Explanation:
    """Every output against the control's of the same prompt, or the arm's own first one; `results` of its judgement."""
    compared = 0
    found: list[Explained] = []
    unseen = [f"arm {name} is planned and not in the archive" for name in _absent(history)]
    if CONTROL in _absent(history):
        return Explanation(0, [], unseen, damage(history))
    planned, prompts = _Planned(history), _prompts(history)
    for arm in history.ordered:
        for started in arm.started:
            if started.rec.prompt_sha256 is None:
                continue
            other = history.arms.get(CONTROL, arm)
            same = prompts[other.name].get(started.rec.prompt_sha256, [])
            if other is arm and same[0] == started.rec.op:
                continue  # the first of its prompt: the others are compared with it
            reference, output = _reference(other, same, arm, started.rec.op), arm.output(started.rec.op)
            why = _incomparable(arm, reference, output)
            if why is not None:
                unseen += [f"{arm.name} {started.rec.op}: {why}"] if why else []
                continue
            assert not isinstance(reference, str) and output is not None
            compared += 1
            found += _explained(history, results, planned, reference, (arm, started.rec.op), output)
    return Explanation(compared, found, unseen, damage(history))


def _explained(
    history: History,
    results: Sequence[CheckResult],
    planned: _Planned,
    reference: Reference,
    subject: Side,
    output: Seen[OperationOutput],
) -> Iterator[Explained]:
    (other, other_op, other_output), (arm, op) = reference, subject
    ours, theirs = other_output.rec.token_ids, output.rec.token_ids
    at = first_difference(ours, theirs, min(planned.tokens(other, other_op), planned.tokens(arm, op)))
    if at is None:
        return
    steps = list(causes(history, results, (other, other_op), subject, (ours, theirs)))
    cause = next((step.cause for step in steps if step.differs), Cause.UNKNOWN)
    yield Explained(arm.name, op, f"{other.name} {other_op}", at, cause, steps)


class _Planned:
    """How many tokens the plan asks of every operation."""

    def __init__(self, history: History) -> None:
        self._tokens: dict[tuple[str, str], int] = {}
        for arm in history.arms:
            try:
                steps = [step for case in history.cases(arm) for step in case.operations]
            except (MissingEvidence, PlanError, KeyError):
                continue
            self._tokens |= {(arm, step.op): step.output_tokens for step in steps}

    def tokens(self, arm: ArmHistory, op: str) -> int:
        """0 where the plan does not say."""
        return self._tokens.get((arm.name, op), 0)


def _absent(history: History) -> list[str]:
    try:
        return [arm.name for arm in history.plan.arms if arm.name not in history.arms]
    except MissingEvidence:
        return []


def _prompts(history: History) -> dict[str, dict[str | None, list[str]]]:
    """By arm: operations of each prompt, in order."""
    found: dict[str, dict[str | None, list[str]]] = {}
    for arm in history.ordered:
        mine = found.setdefault(arm.name, {})
        for seen in arm.started:
            mine.setdefault(seen.rec.prompt_sha256, []).append(seen.rec.op)
    return found


def _reference(other: ArmHistory, same: list[str], arm: ArmHistory, op: str) -> Reference | str:
    """Of the operations `same`, the one of the same name if there is one, else the first; or why there is none."""
    if not same:
        return f"arm {other.name} has no run of this prompt"
    chosen = op if op in same and other is not arm else same[0]
    output = other.output(chosen)
    if output is None or not output.rec.token_ids:
        return f"arm {other.name} has no output of {chosen}"
    return other, chosen, output


def _incomparable(arm: ArmHistory, reference: Reference | str, output: Seen[OperationOutput] | None) -> str | None:
    """Why an operation is not compared; empty: its engine was killed, as the plan has it. None: it is."""
    if output is None or not output.rec.token_ids:
        return "" if arm.killed else "it has no output"
    return reference if isinstance(reference, str) else None
