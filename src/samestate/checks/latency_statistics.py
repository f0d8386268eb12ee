"""What latencies are made of, and how they are summed up: pure functions over numbers.

Times come in nanoseconds of one monotonic clock and leave as seconds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from random import Random
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

NANO = 1e9
LEAST_FOR_INTERVAL = 20
"""Repetitions below which no interval is given: of a handful, a bootstrap repeats the handful."""
RESAMPLES = 2000
LEVEL = 0.95

K = TypeVar("K", bound=Hashable)


class Event(Protocol):
    """Something that came in a stream."""

    @property
    def at_ns(self) -> int:
        """Monotonic."""

    @property
    def tokens(self) -> int:
        """How many it brought."""


class Range(NamedTuple):
    """The least and the largest of some groups' values. Of groups, not of a population: no interval."""

    low: float
    high: float
    groups: int

    @property
    def name(self) -> str:
        """How it must be called wherever it is shown."""
        return f"range over {self.groups} groups (not CI)"


class Interval(NamedTuple):
    """A bootstrap percentile interval of a median."""

    low: float
    high: float
    level: float
    values: int
    """It rests on so many."""


def time_to_first_token(began_ns: int, events: Sequence[Event]) -> float | None:
    """Seconds from the start of a request to its first event with a token; None: none came."""
    first = next((event.at_ns for event in events if event.tokens), None)
    return None if first is None else (first - began_ns) / NANO


def total_latency(began_ns: int, done_ns: int) -> float:
    """Seconds from the start of a request to the stream's end marker."""
    return (done_ns - began_ns) / NANO


def decode_rate(events: Sequence[Event]) -> float | None:
    """Tokens after the first event, a second, between the first and the last event with a token.

    An event may bring several tokens: those of the first are not counted. None: one event, or no time between.
    """
    bringing = [event for event in events if event.tokens]
    if len(bringing) < 2 or bringing[-1].at_ns <= bringing[0].at_ns:
        return None
    return sum(event.tokens for event in bringing[1:]) * NANO / (bringing[-1].at_ns - bringing[0].at_ns)


def middle(values: Sequence[float]) -> float | None:
    """The median of trials; None of none."""
    return median(values) if values else None


def median_of_ratios(of: Mapping[K, float], to: Mapping[K, float]) -> float | None:
    """The median over inputs of each input's own ratio ``of / to``; inputs that lack a side are left out.

    Not the ratio of the medians, whose two sides may be of different inputs. None: no input has both sides.
    """
    ratios = [of[key] / to[key] for key in of if to.get(key)]
    return middle(ratios)


def ratio_of_medians(of: Sequence[float], to: Sequence[float]) -> float | None:
    """What `median_of_ratios` is not, for those who want to see both."""
    top, bottom = middle(of), middle(to)
    return None if top is None or not bottom else top / bottom


def over_groups(values: Sequence[float]) -> Range | None:
    """The range of some groups' values; None of none."""
    return Range(min(values), max(values), len(values)) if values else None


def bootstrap(values: Sequence[float], seed: int, *, least: int = LEAST_FOR_INTERVAL) -> Interval | None:
    """A percentile interval of the median by resampling; None where fewer than `least` values are there.

    The same values and seed give the same interval.
    """
    if len(values) < least:
        return None
    random = Random(seed)
    medians = sorted(median(random.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - LEVEL) / 2
    low, high = math.floor(tail * (RESAMPLES - 1)), math.ceil((1 - tail) * (RESAMPLES - 1))
    return Interval(medians[low], medians[high], LEVEL, len(values))
