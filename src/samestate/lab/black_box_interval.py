"""Finds C of a server that somebody else runs: what it says is tried; else prompts of growing length are repeated."""

from __future__ import annotations

import math
import secrets
from typing import Protocol

from samestate.engines.black_box import BlackBox, Prompt
from samestate.engines.black_box_facts import Facts
from samestate.evidence.records import OperationName
from samestate.lab.black_box_prompts import Prompts
from samestate.lab.black_box_record import Told
from samestate.plans import black_box as b

LARGEST = 1 << 16
"""Tokens: C is not searched for beyond."""
SHARE = 0.4
"""Of the token budget, that the search may take."""
SHORTEST = (15, 22)
"""N, tokens, beside the first of `samestate.plans.black_box.sweep_lengths`: they tell every C up to 16 apart."""
UNTOLD = "nobody tells what is reused: neither usage nor counters"


class Ask(Protocol):
    """One operation, recorded."""

    def __call__(
        self, case: str, op: str, name: OperationName, prompt: Prompt, output_tokens: int, salt: str | None = None
    ) -> Told: ...


class IntervalSearch:
    """One search, bounded by the budget. Raises what `ask` raises."""

    def __init__(self, box: BlackBox, prompts: Prompts, ask: Ask, notes: list[str]) -> None:
        self._box = box
        self._prompts = prompts
        self._ask = ask
        self._notes = notes
        self._hits: dict[int, int | None] = {}
        """What was reused, by the wanted length of a repeated prompt."""
        self._tokens: dict[int, int] = {}
        """N that it had, by the same: of a text as the server counted it."""

    def find(self, facts: Facts) -> tuple[int | None, str]:
        """C and how it is known; None and why it is not."""
        most = self._largest(facts)
        said = facts.interval
        if said is not None and said < most:
            hit = self._hit(said + 1)
            if hit is None:
                return None, UNTOLD
            if hit == said:
                return said, f"{facts.interval_from}, and seen"
        last = 1
        for tokens in b.sweep_lengths(most):
            hit = self._hit(tokens)
            if hit is None:
                return None, UNTOLD
            if hit:
                return self._narrow(last, tokens, hit), "seen in repeated prompts"
            last = tokens
        return None, f"no prompt of up to {last:,} tokens was reused when it was repeated"

    def _narrow(self, missed: int, tokens: int, hit: int) -> int:
        """C from the first prompt that hits, of `tokens`; one of `missed` does not."""
        if missed > 1 and self._tokens[missed] <= hit < self._tokens[tokens]:
            # Half of it would have been reused at `missed` already, unless the server leaves out the last C that it
            # found, as some speculative decoding does: then less than `hit` is reused of a prompt just longer.
            longer = hit + 1 if self._prompts.exact else hit + hit // 8
            if hit <= 2 * (self._tokens[missed] - 1) and self._hit(longer) == hit:
                return hit
        if missed == 1 and hit < self._tokens[tokens]:
            # Several multiples may lie below it. No N here is a multiple of 4: there a fault would show N-1.
            told = [self._hit(n) or 0 for n in SHORTEST]
            if all(one < self._tokens[n] for one, n in zip(told, SHORTEST, strict=True)):
                return math.gcd(hit, *told)
        low, high = missed, tokens  # what it says cannot be: the shortest that hits has C+1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._hit(middle) else (middle, high)
        return min((one for n, one in self._hits.items() if one and one < self._tokens[n]), default=high - 1)

    def _largest(self, facts: Facts) -> int:
        """Longest prompt of the search."""
        most = min(LARGEST, (facts.max_model_len or LARGEST) - 1)
        while most > 1 and b.sweep_cost(most).tokens > SHARE * self._box.budget.tokens_left:
            most //= 2
        return most

    def _hit(self, tokens: int) -> int | None:
        """Tokens reused when a new prompt is repeated, at the second time at the latest."""
        if tokens in self._hits:
            return self._hits[tokens]
        case, salt = f"{b.SWEEP}{tokens}", secrets.token_urlsafe(24)
        prompt = self._prompts.make(case, tokens)
        cold = self._ask(case, "cold", OperationName.COLD, prompt, 1, salt)
        if abs(cold.tokens - tokens) > tokens // 4:  # a text's length is known better now
            case = f"{case}-again"
            prompt = self._prompts.make(case, tokens)
            self._ask(case, "cold", OperationName.COLD, prompt, 1, salt)
        told = self._ask(case, "repeat", OperationName.REPEAT, prompt, 1, salt)
        if told.reused == 0:
            told = self._ask(case, "repeat-2", OperationName.REPEAT, prompt, 1, salt)
        if told.reused and self._box.salts:
            other = self._ask(case, b.SALTED, OperationName.COLD, prompt, 1, secrets.token_urlsafe(24))
            if other.reused and other.reused > b.SHARED_START:
                self._box.salts = False
                self._notes.append("the server takes cache salts and does not heed them")
        self._hits[tokens], self._tokens[tokens] = told.reused, told.tokens
        return told.reused
