"""Prompts that continue an answer, recomputed from records; and ``turns``: what of an earlier turn was reused.

Such a prompt is the tokens of an earlier one, the control's recorded answer to that, and tokens of its own that were
fixed before the first request. No arm is believed to have asked the right thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import History, Row
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations
from samestate.checks.verdicts import conclude, unknown
from samestate.evidence.canonical import token_digest
from samestate.plans.model import InputIdentity, PromptPlan
from samestate.plans.scenarios import CONTROL, cold_op
from samestate.plans.turns import OWN, continuing, made

CHECK = "turns"
TARGET = "target"


def known_inputs(history: History) -> list[InputIdentity]:
    """The inputs of `resolved.json`; of a prompt that continues an answer the digest that the records make it.

    Its digest stays None where the answer, or what comes before or after it, is not recorded. Raises MissingEvidence.
    """
    found = {(one.case, one.role): one for one in history.resolved.inputs}
    for prompt in continuing(history.plan):
        planned = found.get((prompt.name, TARGET))
        if planned is not None and planned.sha256 is None:
            found[prompt.name, TARGET] = planned.model_copy(update={"sha256": _digest(history, prompt, found)})
    return list(found.values())


def _digest(history: History, prompt: PromptPlan, found: dict[tuple[str, str], InputIdentity]) -> str | None:
    parts = [found.get((prompt.continues or "", TARGET)), found.get((prompt.name, OWN))]
    ids = [history.inputs.get(one.sha256 or "") if one else None for one in parts]
    control = history.arms.get(CONTROL)
    answer = control.output(cold_op(prompt.continues or "")) if control else None
    before, own = ids
    if before is None or own is None or answer is None or len(answer.rec.token_ids) != history.plan.output_tokens:
        return None
    try:
        return token_digest(made(prompt, before, answer.rec.token_ids, own))
    except ValueError:
        return None


class Decoded:
    """Which generations reused what decode had computed: it has other bits than prefill's, and both are right."""

    def __init__(self, history: History) -> None:
        self._all = generations(history, history.candidates)
        self._prefixes = {arm.name: Prefixes(history, arm) for arm in history.candidates}
        self._known: dict[tuple[str, str], bool] = {}

    def steps(self, one: Generation) -> tuple[list[Row], list[Generation]]:
        """Decoding steps that ended at p of a prompt that begins so, and the requests whose prefill steps did."""
        decode: list[Row] = []
        prefill: list[Generation] = []
        if one.first is None or not one.first.start:
            return decode, prefill
        p, prefixes = one.first.start, self._prefixes[one.arm.name]
        for other in self._all:
            if other.arm.name != one.arm.name or not prefixes.shared(one.request or "", other.request or "", p):
                continue
            ended = [row for row in other.schedule or () if row.end == p and row.n < one.first.n]
            decode += [row for row in ended if row.start >= other.tokens]
            prefill += [other] if any(row.start < other.tokens for row in ended) else []
        return decode, prefill

    def behind(self, one: Generation) -> bool:
        """Whether its reused state may be one that decode computed, or go on from such a one."""
        at = one.arm.name, one.op.op
        if at not in self._known:
            self._known[at] = False  # a request begins after those that it reuses
            decode, prefill = self.steps(one)
            self._known[at] = bool(decode) or any(self.behind(other) for other in prefill)
        return self._known[at]


def turns(history: History) -> CheckResult:
    """What every generation of a candidate that continues an answer reused; nothing from decode is nothing shown."""
    later = {prompt.name for prompt in continuing(history.plan)}
    checked = [one for one in generations(history, history.candidates) if one.prompt in later]
    decoded_by = Decoded(history)
    findings: list[Finding] = list(_unclear(checked))
    reused = [one for one in checked if one.first is not None and one.first.start]
    decoded = [one for one in reused if decoded_by.steps(one)[0] and not decoded_by.steps(one)[1]]
    if not decoded:
        message = "no turn reused a state that decode had computed: that reuse was not exercised"
        findings.append(unknown("decode_not_reused", message, Place()))
    outside = sum(bool(one.external) for one in decoded)
    summary = (
        f"{len(reused)}/{len(checked)} turns reused a prefix, {len(decoded)} of them a state that decode computed "
        f"({outside} from outside)"
    )
    return conclude(CHECK, findings, unit="turns", examined=len(checked), summary=summary)


def _unclear(checked: Sequence[Generation]) -> Iterator[Finding]:
    for one in checked:
        if one.first is None:
            yield unknown("missing_batches", f"{one.name}: no step is recorded: what it reused is not known", one.place)
