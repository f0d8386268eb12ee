"""Where the time of a reload goes until its first token: lookup, queue, load, suffix compute, first token.

From records alone: moments that the client, the scheduler and the workers wrote down by one clock of one host. A piece
whose beginning or end is not recorded is not drawn, and said so; it is never made up from its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low
from typing import NamedTuple

from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.latency_sample import Sample, samples
from samestate.evidence.latency_records import RequestTimed
from samestate.evidence.records import OperationName

_MS = 1e6
ASYNC = "scheduler_config.async_scheduling"


class Piece(NamedTuple):
    """One stretch of a reload's time."""

    name: str
    """``arrival``, ``lookup``, ``queue``, ``load``, ``schedule``, ``suffix compute`` or ``first token``."""
    what: str
    """From which moment to which."""
    begins: float
    """Milliseconds since the request was handed over; so the next."""
    ends: float


class Waterfall(NamedTuple):
    """One reload."""

    arm: str
    op: str
    tokens: int
    """N."""
    of: int
    """Reloads of this length in this arm, of which it is the median one by its time to a first token."""
    first_token: float
    """Milliseconds."""
    pieces: list[Piece]
    """In order of time; what lies between two of them is not recorded."""
    missing: list[str]
    """Pieces that the records do not bound, and why."""


class _Moments(NamedTuple):
    """Nanoseconds of the host's clock; None: not recorded."""

    began: int
    asked: int | None
    """The connector first answered for the request, be it with "ask again"."""
    allocated: int | None
    """Blocks were given to what is to be loaded: the lookup is over."""
    loading: int | None
    loaded: int | None
    batch: int | None
    """The first step with the request was made."""
    next_batch: int | None
    """The first step after its prompt was done."""
    first_token: int


def waterfalls(history: History) -> list[Waterfall]:
    """The median reload of every length of every arm that timed any; none for another plan."""
    try:
        found = samples(history)
    except MissingEvidence:
        return []
    groups: dict[tuple[str, int], list[Sample]] = {}
    for one in found:
        if one.measured and one.condition.attempted is OperationName.RELOAD and one.moved and one.first_token:
            groups.setdefault((one.arm, one.tokens), []).append(one)
    return [_waterfall(history.arm(arm), mine) for (arm, _), mine in groups.items()]


def _waterfall(arm: ArmHistory, mine: list[Sample]) -> Waterfall:
    times = {one.op: one.first_token or 0.0 for one in mine}
    middle = median_low(times.values())
    chosen = next(one for one in mine if times[one.op] == middle)
    moments = _moments(arm, chosen, chosen.timed[0].rec)
    pieces, missing = _pieces(moments, overlapping=_overlapping(arm))
    first = (moments.first_token - moments.began) / _MS
    return Waterfall(arm.name, chosen.op, chosen.tokens, len(mine), first, pieces, missing)


def _moments(arm: ArmHistory, one: Sample, rec: RequestTimed) -> _Moments:
    request = one.request or ""
    loads = arm.loads.get(request, [])
    done = [load.completed.t_ns for load in loads if load.completed is not None]
    schedule = arm.schedule(one.op)
    rows = list(schedule or ())
    first = rows[0] if rows else None
    after = next((row for row in rows if row.start >= one.tokens), None)
    return _Moments(
        began=rec.began_ns,
        asked=min((seen.t_ns for seen in arm.lookups.get(request, ())), default=None),
        allocated=min((seen.t_ns for seen in arm.allocated.get(request, ()) if seen.rec.external_tokens), default=None),
        loading=min((load.submitted.t_ns for load in loads), default=None),
        loaded=max(done) if loads and len(done) == len(loads) else None,
        batch=arm.steps.time_of(first.n) if first else None,
        next_batch=arm.steps.time_of(after.n) if after else None,
        first_token=next(event.at_ns for event in rec.events if event.tokens),
    )


def _overlapping(arm: ArmHistory) -> bool:
    """Whether a step may be made while the one before it still computes; True also where that is not recorded."""
    return not arm.engines or arm.engines[0].rec.settings.get(ASYNC) is not False


def _pieces(at: _Moments, *, overlapping: bool) -> tuple[list[Piece], list[str]]:
    computed = None if _unmarked(at, overlapping=overlapping) else at.next_batch
    spans: Mapping[str, tuple[str, int | None, int | None]] = {
        "arrival": ("handed over, until the connector was first asked", at.began, at.asked),
        "lookup": ("first asked, until blocks were allocated", at.asked, at.allocated),
        "queue": ("blocks allocated, until the worker was handed the load", at.allocated, at.loading),
        "load": ("load submitted, until the last rank reported it", at.loading, at.loaded),
        "schedule": ("load reported, until the first step was made", at.loaded, at.batch),
        "suffix compute": ("first step made, until the step after the prompt", at.batch, computed),
        "first token": ("step over, until the client had its token", computed, at.first_token),
    }
    if computed is None and at.batch is not None:
        spans = {name: span for name, span in spans.items() if name not in ("suffix compute", "first token")} | {
            "suffix compute and first token": ("first step made, until the client's token", at.batch, at.first_token)
        }
    why = _unmarked(at, overlapping=overlapping)
    pieces, missing = [], [f"end of the suffix compute: {why}"] if why and at.batch is not None else []
    for name, (what, begins, ends) in spans.items():
        if begins is None or ends is None:
            missing.append(f"{name}: not recorded ({what})")
        elif ends < begins:
            missing.append(f"{name}: its end is recorded before its beginning")
        else:
            pieces.append(Piece(name, what, (begins - at.began) / _MS, (ends - at.began) / _MS))
    return pieces, missing


def _unmarked(at: _Moments, *, overlapping: bool) -> str:
    """Why the step after the prompt does not mark the end of its compute; empty: it does."""
    if overlapping:
        return "steps may overlap in this engine, so the next one does not mark it"
    if at.next_batch is None:
        return "no step after the prompt is recorded"
    return "the client had its token before the next step was made" if at.first_token < at.next_batch else ""
