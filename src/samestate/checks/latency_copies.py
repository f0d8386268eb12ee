"""What a reload takes against what it cannot go below: its bytes at the measured copy speed, and a local hit's time.

The speed is the one that the engine's own workers measured in the same run (`CopyMeasured`), the local hit one of the
same input, the same engine and the same p. Where either is missing the cost is unavailable; neither is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from samestate.checks.history import History
from samestate.checks.latency_paths import ActualPath
from samestate.checks.latency_sample import Sample
from samestate.checks.latency_statistics import NANO, median_of_ratios, middle
from samestate.evidence.records import OperationName

GOAL = 1.2
"""Largest ratio of a reload's time to a first token to the sum of both."""
NO_SPEED = "unavailable: no worker measured its copy speed"
NO_LOCAL = "unavailable: no local hit of the same input and p"
NO_RELOAD = "unavailable: no reload from outside alone"


class Figures(BaseModel):
    """Part of a study."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CopySpeed(Figures):
    """What one worker's copies took, before its engine had any work."""

    arm: str
    rank: int
    route: str
    """``host-to-host`` or ``host-to-device``."""
    device: str
    bytes: int
    """Of one copy."""
    copies: int
    rate: float
    """Bytes a second, of the median copy."""
    slowest: float
    fastest: float
    where: str


class ReloadCost(Figures):
    """The reloads of one length in one repetition. None: unavailable, and `note` says why."""

    repetition: int
    tokens: int
    """N."""
    arm: str
    credited: list[int]
    """p, each value once."""
    moved: list[int]
    """Bytes over all ranks, each value once."""
    inputs: int
    """Behind the ratio."""
    copying: float | None
    """Seconds that the bytes take at the measured speed, ranks at once; so the medians that follow."""
    loading: float | None
    """Seconds from the load's submission to its completion, as records have them."""
    local: float | None
    """To a first token, of the local hits."""
    first_token: float | None
    """Of the reloads."""
    ratio: float | None
    """Median over inputs of each reload's own ratio to copy and local hit together."""
    note: str

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within `GOAL`; None: there is none."""
        return None if self.ratio is None else self.ratio <= GOAL


def copy_speeds(history: History) -> list[CopySpeed]:
    """Every worker's, by arm and rank."""
    found = []
    for arm in history.ordered:
        for seen in sorted(arm.copies, key=lambda one: one.rec.rank):
            rec = seen.rec
            rates = [rec.bytes * NANO / took for took in rec.took_ns]
            if rates:
                found.append(
                    CopySpeed(
                        arm=arm.name,
                        rank=rec.rank,
                        route=rec.route,
                        device=rec.device,
                        bytes=rec.bytes,
                        copies=len(rates),
                        rate=rec.bytes * NANO / median(rec.took_ns),
                        slowest=min(rates),
                        fastest=max(rates),
                        where=seen.where,
                    )
                )
    return found


def reload_costs(counted: Sequence[Sample], speeds: Sequence[CopySpeed]) -> list[ReloadCost]:
    """One cost for every length, repetition and arm in which reloads counted."""
    by_arm: dict[str, dict[int, float]] = {}
    for speed in speeds:
        by_arm.setdefault(speed.arm, {}).setdefault(speed.rank, speed.rate)
    reloads = [one for one in counted if one.condition.attempted is OperationName.RELOAD]
    groups = sorted({(one.repetition, one.tokens, one.arm) for one in reloads})
    return [_cost(group, counted, by_arm.get(group[2], {})) for group in groups]


def _cost(group: tuple[int, int, str], counted: Sequence[Sample], rates: Mapping[int, float]) -> ReloadCost:
    repetition, tokens, arm = group
    mine = [one for one in counted if (one.repetition, one.tokens, one.arm) == group]
    reloads = {
        one.case: one
        for one in mine
        if one.condition.attempted is OperationName.RELOAD and one.moved and one.path is not ActualPath.MIXED
    }
    local = {
        one.case: one.first_token
        for one in mine
        if one.path is ActualPath.LOCAL
        and one.case in reloads
        and one.credited == reloads[one.case].credited
        and one.first_token is not None
    }
    copying = {case: taken for case, one in reloads.items() if (taken := copy_seconds(one.by_rank, rates)) is not None}
    first = {case: one.first_token for case, one in reloads.items() if one.first_token is not None}
    least = {case: copying[case] + local[case] for case in first if case in copying and case in local}
    note = "" if least else NO_RELOAD if not reloads else NO_SPEED if not copying else NO_LOCAL
    return ReloadCost(
        repetition=repetition,
        tokens=tokens,
        arm=arm,
        credited=sorted({one.credited for one in reloads.values() if one.credited is not None}),
        moved=sorted({one.moved for one in reloads.values() if one.moved}),
        inputs=len(least),
        copying=middle(list(copying.values())),
        loading=middle([one.loading for one in reloads.values() if one.loading is not None]),
        local=middle(list(local.values())),
        first_token=middle(list(first.values())),
        ratio=median_of_ratios(first, least),
        note=note,
    )


def copy_seconds(by_rank: Mapping[int, int], rates: Mapping[int, float]) -> float | None:
    """How long the bytes take at the ranks' speeds, all ranks at once; None where a rank has no speed, or no bytes."""
    if not by_rank or any(rank not in rates for rank in by_rank):
        return None
    return max(moved / rates[rank] for rank, moved in by_rank.items())
