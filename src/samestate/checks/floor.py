"""``floor`` and ``floor-equality``: what company alone does to an output, and outputs equal to cold beyond that.

An engine is not batch-invariant: the same prompt in other company has other log-probabilities, though nothing is
reused. The floor is the largest such difference between the control (alone) and the arm ``batched`` (together), both
cold, over the tokens that the two have in common. Where a generation first parts from its cold run, and the cold run
preferred its token to the runner-up by less than the floor, that is a tie: listed apart, neither a pass nor a fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.equality import first_difference, wrong_length
from samestate.checks.geometry import missing_steps
from samestate.checks.history import History, MissingEvidence
from samestate.checks.scenario import (
    Excuse,
    Generation,
    cold_equality,
    generations,
    neighbours,
    scenario_table,
)
from samestate.checks.seen import Seen
from samestate.checks.table import CaseRow
from samestate.checks.turns import Decoded
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence.records import OperationOutput
from samestate.plans.scenarios import BATCHED, CONTROL, cold_op

FLOOR = "floor"
EQUALITY = "floor-equality"
TIE = "tie"


class Floor(NamedTuple):
    """What was measured."""

    value: float | None
    """Natural logarithm; None: nothing could be measured."""
    tokens: int
    """Compared, over all prompts."""
    parted: int
    """Prompts whose tokens differ between the two."""
    findings: list[Finding]
    """Why some of it could not be."""


def measured(history: History) -> Floor:
    """The floor, over every prompt that a candidate was asked; raises MissingEvidence without the arm ``batched``.

    With findings the number is none to rely on.
    """
    batched = generations(history, [history.arm(BATCHED)])
    findings: list[Finding] = []
    differences: list[float] = []
    parted = 0
    asked = {one.prompt for one in generations(history, history.candidates)}
    for prompt in sorted(asked - {one.prompt for one in batched}):
        message = f"arm {BATCHED} never computed {prompt}: what company does to it was not measured"
        findings.append(unknown("floor_not_measured", message))
    for one in batched:
        found = list(_unfit(one, batched))
        findings += found
        cold = history.arm(CONTROL).output(cold_op(one.prompt))
        if found or cold is None or one.output is None:
            findings += [] if found else [unknown("floor_not_measured", f"{one.name}: no cold output", one.place)]
            continue
        gap = missing_steps(
            history.arm(CONTROL).schedule(cold_op(one.prompt)), one.tokens + len(cold.rec.token_ids) - 1
        )
        odd = [
            *wrong_length(history, one.name, one.output, one.op.output_tokens, one.place),
            *([unknown("floor_not_measured", f"{cold_op(one.prompt)}: {gap}", one.place, [cold.where])] if gap else []),
        ]
        if odd:
            findings += odd
            continue
        alone, together = cold.rec, one.output.rec
        part = first_difference(alone.token_ids[: one.op.output_tokens], together.token_ids)
        parted += part is not None
        pairs = _logprobs(cold, one.output, len(together.token_ids) if part is None else part)
        if pairs is None:
            message = f"{one.name}: log-probabilities of it or of its cold run are not recorded"
            findings.append(unknown("floor_not_measured", message, one.place, [cold.where, one.output.where]))
        else:
            differences += [abs(left - right) for left, right in pairs]
    return Floor(max(differences, default=None), len(differences), parted, findings)


def _unfit(one: Generation, batched: Sequence[Generation]) -> Iterator[Finding]:
    """Why a generation of the arm ``batched`` does not show what company alone does."""
    where = [one.first.where] if one.first else []
    outputs = len(one.output.rec.token_ids) if one.output else 0
    gap = missing_steps(one.schedule, one.tokens + outputs - 1)
    if gap is not None:
        yield unknown("floor_not_measured", f"{one.name}: {gap}", one.place, where)
    elif one.first is not None and one.first.start:
        message = f"{one.name}: {one.first.start} tokens were reused, so it shows more than company"
        yield unknown("floor_not_cold", message, one.place, where)
    elif one.request in one.arm.preempted:
        yield unknown("floor_not_cold", f"{one.name}: it was preempted, and computed again in other steps", one.place)
    elif not neighbours(one, batched):
        yield unknown("floor_not_batched", f"{one.name}: no other request was in a step with it", one.place, where)


def _logprobs(
    cold: Seen[OperationOutput], other: Seen[OperationOutput], tokens: int
) -> list[tuple[float, float]] | None:
    """Of the first `tokens` tokens on both sides; None where not all are recorded."""
    left, right = cold.rec.logprobs, other.rec.logprobs
    if left is None or right is None or min(len(left), len(right)) < tokens:
        return None
    return list(zip(left[:tokens], right[:tokens], strict=True))


def floor(history: History) -> CheckResult:
    """Measure the floor, and say where it could not be."""
    found = measured(history)
    findings = list(found.findings)
    if found.value is None and not findings:
        findings.append(unknown("floor_not_measured", "no token is the same alone and in company"))
    summary = f"{said(found.value)} over {found.tokens} tokens, alone against in company, both cold"
    if found.parted:
        summary += f"; {found.parted} prompts then continue differently"
    return conclude(FLOOR, findings, unit="tokens", examined=found.tokens, summary=summary)


def said(value: float | None) -> str:
    """A floor or a margin, as people read it."""
    return "not measured" if value is None else f"{value:.3g}"


def floor_equality(history: History, impossible: set[tuple[str, str]]) -> CheckResult:
    """``cold-equality``, but where a difference is a tie or follows from a state that decode computed.

    `impossible`: as there; these are excused by nothing.
    """
    try:
        found = measured(history)
    except MissingEvidence as missing:
        found = Floor(None, 0, 0, [unknown(missing.code, str(missing))])
    usable = None if found.findings else found.value
    decoded = Decoded(history)

    def excused(one: Generation, difference: int) -> Excuse | None:
        cold = history.arm(CONTROL).output(cold_op(one.prompt))
        margins = cold.rec.margins if cold else None
        if usable is None:
            return Excuse("floor_unknown", "the floor was not measured, so it may be a tie")
        if margins is None or len(margins) <= difference:
            return Excuse("margin_unknown", "the cold run's margin there is not recorded, so it may be a tie")
        if margins[difference] < usable:
            return Excuse(
                TIE, f"a tie: the cold run's margin there is {margins[difference]:.3g}, and the floor {usable:.3g}"
            )
        if decoded.behind(one):
            return Excuse(
                "decode_state",
                f"its margin of {margins[difference]:.3g} is no tie (floor {usable:.3g}), and not attributable: what "
                " it reused goes on from a state that decode had computed, which has other bits than prefill's",
            )
        return None

    result = cold_equality(history, impossible, EQUALITY, excused)
    ties = sum(finding.code == TIE for finding in result.findings)
    summary = f"{result.summary}; {ties or 'no'} ties below the floor of {said(usable)}"
    return result.model_copy(update={"summary": summary})


def floor_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """`scenario_table`, ties marked; raises MissingEvidence."""
    ties = {
        (finding.place.arm, finding.place.op)
        for result in results
        if result.check == EQUALITY
        for finding in result.findings
        if finding.code == TIE
    }
    rows = scenario_table(history, results, required)
    return [row.model_copy(update={"tie": True}) if (row.arm, row.op) in ties else row for row in rows]
