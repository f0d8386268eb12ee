"""Is a reload that answers differently a state fault, a numerical tie, or not known? Pure: answers in, a judgement out.

For answers of a server whose records nobody has: token ids or pieces of text, log-probabilities of the chosen tokens
and their margins to the runner-up, as far as the server tells. Beside reloads against cold runs it takes the *floor*:
cold runs against cold runs of the same inputs. A pair whose second run was computed in other steps than its first is
*split*: so is a reload, and only these show what a correct answer may do. Company that leaves the prompt in the same
chunks may show less than a reload's steps do; a floor that is exact under such splits alone accuses correct engines.

A pair's *displacement*, in nats, is the least that some logit must have moved between its two runs to explain what is
seen: over the tokens before they part, the largest difference of log-probabilities; where they part, half the sum of
both margins, as two logits had to cross. Where an answer lacks these it is a lower bound.

Null hypothesis: a reload's displacement is, on its input, stochastically no larger than `slack` times the floor's. Two
exact tests share `alpha`: `permutation` (many inputs a little) and `excess` (a few far; it assumes a regular tail).
Without margins or log-probabilities only where a pair parts is ranked, and permutation stands alone; the slack then
says that reloads part, token by token, at most so many times as often. An engine whose floor is zero in every bit is
compared by exact equality, which assumes that an engine varies always or never.

`samestate.checks.floor` is the older rule for runs with records: one largest difference, no test, and schedules that
prove each cold run cold. Its verdicts stand. It cannot work without records, nor measure an answer that parts early.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from samestate.checks.divergence_statistics import Excess, Stratum, excess, permutation
from samestate.checks.divergence_types import (
    Answer,
    Divergence,
    FloorFigures,
    Judgement,
    Mode,
    Pair,
    Policy,
    Ruling,
    Tested,
)
from samestate.checks.equality import first_difference

__all__ = [
    "Answer",
    "Divergence",
    "FloorFigures",
    "Judgement",
    "Mode",
    "Pair",
    "Policy",
    "Ruling",
    "Tested",
    "judge",
]

POLICY = Policy()


def judge(floor: Sequence[Pair], reloads: Sequence[Pair], policy: Policy = POLICY) -> Judgement:
    """Judge reloads by the floor. Never raises on missing evidence: that is `unknown`."""
    return _Judge(floor, reloads, policy).judgement()


class _Seen(NamedTuple):
    """One pair, measured."""

    input: str
    position: int | None
    cold_margin: float | None
    other_margin: float | None
    displacement: float | None
    complete: bool
    compared: int
    """Log-probabilities."""
    tokens: int
    """Of the shorter answer."""

    @property
    def moved(self) -> float:
        """Nats, at least."""
        return self.displacement or 0.0


class _Judge:
    """One judgement. Which tests are made follows from the floor and from what was told, never from what differs."""

    def __init__(self, floor: Sequence[Pair], reloads: Sequence[Pair], policy: Policy) -> None:
        self._policy = policy
        self._cold = [_seen(pair) for pair in floor]
        self._reloads = [_seen(pair) for pair in reloads]
        self._splits = [
            one for pair, one in zip(floor, self._cold, strict=True) if pair.split or not policy.splits_required
        ]
        self._figures = self._measured()
        self._gap = _vacuous([*floor, *reloads]) or self._too_few()
        self._limit = max(policy.slack * (self._figures.largest or 0.0), policy.negligible)
        """Nats that a correct reload may move."""
        known = {one.input for one in self._splits}
        self._judged = [one for one in self._reloads if one.input in known]
        self._mode = Mode.NONE if self._gap or not self._judged else self._chosen()
        self._strata = self._ranked()
        self._excess = Excess(1.0, 0)
        self._tests = self._tested()

    def judgement(self) -> Judgement:
        rows = [Divergence(*one[:6], *self._rule(one)) for one in self._reloads]
        if sum(row.ruling is Ruling.STATE_FAULT for row in rows) < self._policy.least_differing:
            rows = [_asked_again(row) if self._mode is Mode.EXACT else row for row in rows]
        ruling, why = self._together(rows)
        again = sorted({row.input for row in rows if row.ruling is Ruling.UNKNOWN})
        return Judgement(ruling, why, self._mode, self._figures, rows, self._tests, again, self._policy)

    # --- the floor ------------------------------------------------------------------------------------

    def _measured(self) -> FloorFigures:
        cold = self._cold
        measured = bool(cold) and all(one.complete and one.displacement is not None for one in cold)
        largest = max(one.moved for one in cold) if measured else None
        parted = sum(one.position is not None for one in cold)
        compared = sum(one.compared for one in cold)
        return FloorFigures(len(cold), len(self._splits), parted, compared, largest, largest == 0.0 and not parted)

    def _too_few(self) -> str | None:
        figures, policy = self._figures, self._policy
        if figures.pairs < policy.least_pairs:
            return f"the floor has {figures.pairs} pairs of cold runs, and needs {policy.least_pairs}"
        if figures.splits < policy.least_splits:
            return (
                f"{figures.splits} pairs of the floor were computed in other steps, and {policy.least_splits} are "
                "needed: what other steps do to a correct answer is not known"
            )
        return None

    # --- the tests ------------------------------------------------------------------------------------

    def _chosen(self) -> Mode:
        if self._figures.largest is None or not all(one.position is not None or one.complete for one in self._judged):
            return Mode.POSITION
        return Mode.EXACT if self._figures.exact else Mode.DISPLACEMENT

    def _ranked(self) -> dict[str, Stratum]:
        """By input, what permutation ranks; the floor is stretched by the slack."""
        sides: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        slack, least, positions = self._policy.slack, self._policy.negligible, self._mode is Mode.POSITION
        for one in self._splits:
            # Not parted within its tokens: it would have at the earliest after them.
            early = -((one.tokens if one.position is None else one.position) // slack)
            sides[one.input][0].append(early if positions else max(slack * one.moved, least))
        for one in self._judged:
            early = -math.inf if one.position is None else -float(one.position)
            sides[one.input][1].append(early if positions else max(one.moved, least))
        return {name: Stratum(*both) for name, both in sides.items()}

    def _tested(self) -> list[Tested]:
        if self._mode is Mode.NONE:
            return []
        share = self._policy.alpha if self._mode is Mode.POSITION else self._policy.alpha / 2
        used = [one for one in self._strata.values() if one.reload]
        counts = len(used), sum(len(one.floor) for one in used), len(self._judged)
        tests = [Tested("permutation", permutation(used), share, *counts)]
        if self._mode is Mode.DISPLACEMENT:
            moved = [one.moved for one in self._judged]
            self._excess = excess(len(self._splits), self._limit, moved, self._policy.tail)
            tests.append(Tested("excess", self._excess.p, share, len(used), len(self._splits), len(moved)))
        return tests

    def _blamed(self, one: _Seen) -> bool:
        """Whether a test that rejects points at this reload."""
        rejecting = {tested.test for tested in self._tests if tested.p <= tested.alpha}
        if "permutation" in rejecting:
            value = (
                one.moved if self._mode is not Mode.POSITION else -math.inf if one.position is None else -one.position
            )
            if value > max(self._strata[one.input].floor):
                return True
        largest = sorted((seen.moved for seen in self._judged), reverse=True)[: self._excess.largest]
        return "excess" in rejecting and one.moved >= largest[-1]

    # --- the rulings ----------------------------------------------------------------------------------

    def _rule(self, one: _Seen) -> tuple[Ruling, str]:
        if self._gap is not None:
            return Ruling.UNKNOWN, self._gap
        if one not in self._judged:
            return Ruling.UNKNOWN, "the floor has no pair of this input that was computed in other steps"
        apart = "the same tokens" if one.position is None else f"parts at token {one.position}"
        if self._mode is Mode.POSITION:
            why = f"{apart}; how far it moved is not known"
            if one.position is None:
                return Ruling.EQUAL, why
            return (Ruling.STATE_FAULT if self._blamed(one) else Ruling.UNKNOWN), why
        if self._mode is Mode.EXACT and (one.moved > self._limit or not one.complete):
            return Ruling.STATE_FAULT, f"{apart}, moved by {_nats(one)}, where cold runs are equal in every bit"
        why = f"{apart}, moved by {_nats(one)}: {one.moved / self._limit:.3g} of the limit of {self._limit:.3g}"
        if self._mode is Mode.DISPLACEMENT and self._blamed(one):
            return Ruling.STATE_FAULT, why
        if one.moved > self._limit:
            return Ruling.UNKNOWN, f"{why}, and chance is not excluded"
        if not one.complete:
            return Ruling.UNKNOWN, f"{why}; a log-probability or margin is missing"
        return (Ruling.EQUAL if one.position is None else Ruling.NUMERICAL_TIE), why

    def _together(self, rows: Sequence[Divergence]) -> tuple[Ruling, str]:
        """The worst decides."""
        if not rows:
            return Ruling.UNKNOWN, "no reload was compared"
        if self._gap is not None:
            return Ruling.UNKNOWN, self._gap
        times = Counter(row.ruling for row in rows)
        worst = next(one for one in _WORST_FIRST if times[one])
        said = "; ".join(f"{one.test} p = {one.p:.2g}, alpha {one.alpha:.2g}" for one in self._tests)
        return worst, f"{times[worst]} of {len(rows)} reloads: {worst} (by {self._mode}; {said})"


_WORST_FIRST = (Ruling.STATE_FAULT, Ruling.UNKNOWN, Ruling.NUMERICAL_TIE, Ruling.EQUAL)


def _seen(pair: Pair) -> _Seen:
    cold, other = pair.cold, pair.other
    position = first_difference(cold.tokens, other.tokens)
    tokens = min(len(cold.tokens), len(other.tokens))
    shared = tokens if position is None else position
    told = [(_told(cold.logprobs, at), _told(other.logprobs, at)) for at in range(shared)]
    moved = [abs(a - b) for a, b in told if a is not None and b is not None]
    compared, complete = len(moved), len(moved) == shared
    if position is None:
        return _Seen(pair.input, None, None, None, max(moved, default=None), complete, compared, tokens)
    margins = _margin(cold, position), _margin(other, position)
    known = [margin for margin in margins if margin is not None]
    moved += [sum(known) / 2] if known else []
    complete = complete and len(known) == 2
    return _Seen(pair.input, position, *margins, max(moved, default=None), complete, compared, tokens)


def _told(values: Sequence[float | None] | None, at: int) -> float | None:
    value = values[at] if values is not None and at < len(values) else None
    return value if value is not None and math.isfinite(value) else None


def _margin(answer: Answer, at: int) -> float | None:
    """None also where it is negative: the token was not the likeliest, so the answer is not greedy there."""
    value = _told(answer.margins, at) if at < len(answer.tokens) else None
    return value if value is not None and value >= 0 else None


def _vacuous(pairs: Sequence[Pair]) -> str | None:
    """Why these answers show nothing, whatever they are."""
    if any(not pair.cold.tokens or not pair.other.tokens for pair in pairs):
        return "an answer is empty"
    if len({pair.input for pair in pairs}) > 1 and len({tuple(pair.cold.tokens) for pair in pairs}) == 1:
        return "all inputs have one and the same cold answer, so answers do not depend on the input"
    return None


def _nats(one: _Seen) -> str:
    return f"{'' if one.complete else 'at least '}{one.moved:.3g} nats"


def _asked_again(row: Divergence) -> Divergence:
    """One difference on an engine that never differed may be the first that chance shows."""
    if row.ruling is not Ruling.STATE_FAULT:
        return row
    return row._replace(ruling=Ruling.UNKNOWN, why=f"{row.why}; seen once, so ask this input again")
