"""The figures of a latency study, as they are kept beside a verdict: cells, comparisons, ranges, paths."""

from __future__ import annotations

from pydantic import Field

from samestate.checks.latency_copies import CopySpeed, Figures, ReloadCost


class Cell(Figures):
    """One condition in one group. None: unavailable."""

    repetition: int
    tokens: int
    """N."""
    condition: str
    """``OFF cold``."""
    trials: int
    """That count."""
    first_token: float | None
    """Seconds, the median of the trials; so the next two."""
    total: float | None
    decode_rate: float | None
    """Tokens a second."""
    paths: dict[str, int]
    """Actual paths of the trials that count."""
    credited: list[int]
    """p of these, each value once."""
    suffix: list[int]
    moved: list[int]
    """Bytes loaded, over all ranks, each value once."""


class Comparison(Figures):
    """Ratios of two conditions in one group: medians over inputs of each input's own ratio."""

    repetition: int
    tokens: int
    name: str
    """``OFF cold / ON reload``."""
    inputs: int
    first_token: float | None
    total: float | None
    suffix: list[list[int]]
    """Of the two sides, each value once."""
    note: str
    """``unavailable``, or ``not comparable`` and why; empty where there are ratios."""


class Spread(Figures):
    """A comparison over all groups that have it."""

    name: str
    measure: str
    """``first token`` or ``total``."""
    low: float
    high: float
    groups: int
    called: str
    """``range over 6 groups (not CI)``."""
    interval: list[float] | None
    """Bootstrap over inputs, low and high, where repetitions suffice; else None."""
    inputs: int


class PathCell(Figures):
    """Times of the requests that took one path to one length, whatever was attempted."""

    tokens: int
    path: str
    requests: int
    first_token: float | None
    suffix: list[int]
    moved: list[int]


class Attempted(Figures):
    """Of one attempted condition, how many measured requests took which path."""

    condition: str
    requests: int
    actual: dict[str, int]


class Study(Figures):
    """All of it."""

    pairs: int
    """Repetitions with both engines; requests are no experiments of their own."""
    tasks: int
    inputs: int
    measured_inputs: int
    requests: int
    measured: int
    counted: int
    """Measured requests whose times count."""
    not_counted: list[str]
    """Why the others do not, one line each."""
    held_up: list[str]
    """Counted requests whose first token was received after their last step had begun: the host was too busy."""
    order: str
    """Order of the trials."""
    cells: list[Cell]
    comparisons: list[Comparison]
    spreads: list[Spread]
    attempted: list[Attempted]
    paths: list[PathCell]
    break_even: str
    """From which reused prefix on a reload's first token came sooner than a cold one's, of what was measured."""
    not_claimed: list[str]
    copies: list[CopySpeed] = Field(default_factory=list)
    """Copy speeds that the workers measured in this run; empty: none did."""
    reloads: list[ReloadCost] = Field(default_factory=list)
    """What reloads took against their bytes at that speed and a local hit with the same B."""
