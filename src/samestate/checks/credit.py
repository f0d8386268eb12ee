"""What else says p, the tokens that a request was credited: lookup, allocation and the engine's own answer.

Each is another source than the first batch, and a disagreement is a finding (requirements 24, 79).
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.base import Finding, Place
from samestate.checks.history import ArmHistory, History, Row
from samestate.checks.verdicts import fail, unknown
from samestate.evidence.records import OperationName


def credits_agree(history: History) -> Iterator[Finding]:
    """Hold every generation of the planned arms against p; one without output or step is left to others."""
    for name in [arm.name for arm in history.plan.arms]:
        arm = history.arm(name)
        for case, op in history.generations():
            output, schedule = arm.output(op.op), arm.schedule(op.op)
            if output is None or not schedule:
                continue
            place = Place(arm=name, case=case.id, op=op.op, request=output.rec.request)
            one = Credit(arm, schedule[0], place, whole=history.whole(name))
            yield from one.cached(output.rec.cached_tokens, output.where)
            if arm.connected:
                yield from one.looked_up(output.rec.request, case.tokens)
            if arm.connected and op.name is OperationName.RELOAD:
                yield from one.allocated(output.rec.request)


class Credit:
    """p of one generation, and what other records make of it."""

    def __init__(self, arm: ArmHistory, first: Row, place: Place, *, whole: bool) -> None:
        self._arm, self._first, self._place = arm, first, place
        self._name = f"arm {arm.name}: {place.op}"
        self._make = fail if whole else unknown

    def cached(self, tokens: int | None, where: str) -> Iterator[Finding]:
        """The engine's answer names p as the tokens that it did not compute."""
        evidence = [where, self._first.where]
        if tokens is None:
            message = f"{self._name}: the engine does not say how many tokens were cached"
            yield unknown("not_reported", message, self._place, evidence)
        elif tokens != self._first.start:
            message = f"{self._name}: the engine answers {tokens} cached tokens, the first batch credits {self._p}"
            yield self._make("cached_tokens_disagree", message, self._place, evidence)

    def looked_up(self, request: str, prompt_tokens: int) -> Iterator[Finding]:
        """The last answered lookup was for the whole prompt, and found p beyond the local tokens."""
        seen = self._arm.lookups.get(request, [])
        answered = [one for one in seen if one.rec.matched_tokens is not None]
        if not answered:
            message = f"{self._name}: {'no lookup was answered' if seen else 'no lookup is recorded'}"
            yield unknown("missing_lookup", message, self._place, [one.where for one in seen])
            return
        last = answered[-1]
        found = last.rec.local_tokens + (last.rec.matched_tokens or 0)
        evidence = [last.where, self._first.where]
        if found != self._first.start:
            message = (
                f"{self._name}: the lookup found {found} tokens ({last.rec.local_tokens} of them local), "
                f"the first batch credits {self._p}"
            )
            yield self._make("lookup_disagrees", message, self._place, evidence)
        if last.rec.queried_tokens != prompt_tokens and request not in self._arm.preempted:
            message = (
                f"{self._name}: the lookup was for {last.rec.queried_tokens} tokens, the prompt has {prompt_tokens}"
            )
            yield fail("lookup_disagrees", message, self._place, evidence)

    def allocated(self, request: str) -> Iterator[Finding]:
        """Blocks were allocated for what the lookup found beyond the local tokens, where that is something."""
        seen = self._arm.allocated.get(request, [])
        local = max((one.rec.local_tokens for one in self._arm.lookups.get(request, ())), default=0)
        if not seen and self._first.start == local:
            return
        if not seen:
            message = f"{self._name}: no allocation for its load is recorded"
            yield unknown("missing_allocation", message, self._place)
            return
        tokens = max(one.rec.external_tokens for one in seen)
        if tokens != self._first.start - local:
            message = (
                f"{self._name}: blocks were allocated for {tokens} external tokens, the first batch credits {self._p}"
            )
            evidence = [*(one.where for one in seen), self._first.where]
            yield self._make("allocation_disagrees", message, self._place, evidence)

    @property
    def _p(self) -> int:
        return self._first.start
