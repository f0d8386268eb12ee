"""What `samestate.checks.divergence` takes and gives: answers, pairs, the policy, the judgement with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

Token = int | str
"""A token id or, where the server tells none, a piece of text."""


class Ruling(StrEnum):
    """What a pair, or all of them together, came to."""

    STATE_FAULT = "state fault"
    NUMERICAL_TIE = "numerical tie"
    """Answers part, and no further than correct ones do."""
    EQUAL = "equal"
    """The same tokens, and log-probabilities, where there are any, no further apart than the floor."""
    UNKNOWN = "unknown"


class Mode(StrEnum):
    """What the ruling rests on."""

    EXACT = "exact equality"
    DISPLACEMENT = "displacement"
    POSITION = "position"
    NONE = "none"
    """No usable floor."""


class Answer(NamedTuple):
    """One greedy answer. Lists are by token; None: not told, as is a value that is no finite number."""

    tokens: Sequence[Token]
    logprobs: Sequence[float | None] | None = None
    """Natural logarithm, of the chosen token."""
    margins: Sequence[float | None] | None = None
    """Log-probability of the chosen token less the runner-up's, ≥ 0."""


class Pair(NamedTuple):
    """Two answers to one input. The pairs of an input share their cold answer where they can."""

    input: str
    cold: Answer
    other: Answer
    """Cold again (floor), or a reload."""
    split: bool = False
    """Of the floor: the other was computed in other steps than the first."""


class Policy(NamedTuple):
    """The rule, fixed before anything is measured."""

    alpha: float = 0.001
    """Probability of a false `state fault` over all pairs together."""
    slack: float = 3.0
    """A reload may move so many times as far as the floor: its steps are never quite the floor's."""
    tail: float = 4.0
    """See `excess`."""
    negligible: float = 1e-4
    """Nats: less than this the order of sums moves a logit even in single precision; never a fault."""
    least_splits: int = 4
    """Split pairs that a floor needs."""
    least_pairs: int = 8
    """Pairs that a floor needs in all."""
    least_differing: int = 2
    """Reloads that must differ before exact equality says `state fault`; one alone is asked again."""
    splits_required: bool = True
    """False: the caller knows that steps do not matter to this engine, and every pair of the floor counts as split."""


class Divergence(NamedTuple):
    """One reload against its cold run."""

    input: str
    position: int | None
    """Token, from 0, where they part; None: the same tokens."""
    cold_margin: float | None
    """There."""
    other_margin: float | None
    displacement: float | None
    """Nats; None: nothing to measure it by."""
    complete: bool
    """False: something was not told, and the displacement is a lower bound."""
    ruling: Ruling
    why: str


class FloorFigures(NamedTuple):
    """What correct answers do."""

    pairs: int
    splits: int
    parted: int
    """Pairs whose tokens differ."""
    tokens: int
    """Log-probabilities compared."""
    largest: float | None
    """Displacement in nats; None: not measured."""
    exact: bool
    """Complete, and zero throughout."""


class Tested(NamedTuple):
    """One statistical test."""

    test: str
    """``permutation`` or ``excess``."""
    p: float
    alpha: float
    """Its share: it rejects at p ≤ alpha."""
    inputs: int
    floor: int
    """Pairs used."""
    reloads: int


class Judgement(NamedTuple):
    """All reloads together, with the evidence."""

    ruling: Ruling
    why: str
    """One line."""
    mode: Mode
    floor: FloorFigures
    divergences: list[Divergence]
    """In the order of the reloads."""
    tests: list[Tested]
    ask_again: list[str]
    """Inputs of which another cold run and reload may settle an `unknown`."""
    policy: Policy
