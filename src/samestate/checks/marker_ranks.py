"""``trace-ranks``: all ranks recorded the same, field by field.

Agreement is not correctness, and disagreement is unknown: one of the traces is wrong, and nobody can say which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History
from samestate.checks.marker_history import RankTrace, TracedStep, rank_traces
from samestate.checks.marker_probes import probes_of, probing_arms
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, not_exercised, unknown

CHECK = "trace-ranks"
UNIT = "steps"


def trace_ranks(history: History) -> CheckResult:
    """Compare what every further rank recorded with the first rank's; with one rank there is nothing to compare."""
    arms = probing_arms(history)
    if all(len(arm.markers.rank_streams) <= 1 and _ranks(arm) <= 1 for arm in arms):
        return not_exercised(CHECK, "one_rank", "one rank: there is no other to agree with", unit=UNIT)
    findings = [finding for arm in arms for finding in disagreements(arm)]
    compared = sum(
        len(trace.steps)
        for arm in arms
        for ranks in rank_traces(arm.markers).values()
        for trace in list(ranks.values())[1:]
    )
    summary = f"{compared} steps alike on every rank" if not findings else findings[0].message
    return conclude(CHECK, findings, unit=UNIT, examined=compared, summary=summary)


def _ranks(arm: ArmHistory) -> int:
    recorder = arm.markers.recorder
    return recorder.rec.ranks if recorder else 1


def disagreements(arm: ArmHistory) -> Iterator[Finding]:
    """Where an arm's ranks differ: in what their recorders are, and in each request's first differing record."""
    starts = [stream.started[0] for stream in arm.markers.rank_streams if stream.started]
    for started in starts[1:]:
        for field, ours, theirs in _differing(starts[0], started):
            message = f"arm {arm.name}: recorder of rank {started.rec.rank}: {field} {theirs}, the first rank's {ours}"
            place = Place(arm=arm.name, rank=started.rec.rank)
            yield unknown("recorders_differ", message, place, [starts[0].where, started.where])
    names = {request: probe.place for probe in probes_of(arm) for request in probe.requests}
    for request, ranks in rank_traces(arm.markers).items():
        first, *others = ranks.values()
        for other in others:
            place = names.get(request, Place(arm=arm.name, request=request))
            for said, evidence in _unlike(first, other):
                message = f"arm {arm.name}: request {request}: rank {other.rank}: {said}"
                yield unknown("ranks_differ", message, place.model_copy(update={"rank": other.rank}), evidence)


def _unlike(first: RankTrace, other: RankTrace) -> Iterator[tuple[str, Sequence[str]]]:
    """The request as it was asked, the number of steps, and the first step that differs."""
    for one, two in zip(first.asked, other.asked, strict=False):
        for field, ours, theirs in _differing(one, two):
            yield f"{field} {theirs}, rank {first.rank} {ours}", [one.where, two.where]
    if len(first.asked) != len(other.asked) or len(first.steps) != len(other.steps):
        yield f"{len(other.steps)} steps, rank {first.rank} {len(first.steps)}", [*first.evidence, *other.evidence]
    for mine, yours in zip(first.steps, other.steps, strict=False):
        found = list(_step(mine, yours))
        if found:
            said = ", ".join(f"{field} {theirs} (rank {first.rank}: {ours})" for field, ours, theirs in found[:2])
            yield f"step {yours.step}: {said}", [*mine.evidence, *yours.evidence]
            return


def _step(mine: TracedStep, yours: TracedStep) -> Iterator[tuple[str, Any, Any]]:
    for ours, theirs in ((mine.rows, yours.rows), (mine.committed, yours.committed)):
        if ours is None or theirs is None:
            if ours is not theirs:
                yield "record", "there" if ours else "missing", "there" if theirs else "missing"
            continue
        for field, left, right in _differing(ours, theirs):
            yield from _rows(left, right) if field == "rows" else [(field, left, right)]


def _rows(left: list[Any], right: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """The first of two lists of rows that differ, and its field."""
    if len(left) != len(right):
        yield "rows", len(left), len(right)
        return
    for at, (one, two) in enumerate(zip(left, right, strict=True)):
        if one == two:
            continue
        if isinstance(one, msgspec.Struct):
            fields = (f for f in one.__struct_fields__ if getattr(one, f) != getattr(two, f))
            yield from ((f"row {at} {f}", getattr(one, f), getattr(two, f)) for f in fields)
        else:
            yield f"row {at}", one, two
        return


def _differing(one: Seen[Any], two: Seen[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Every field but the rank's own."""
    for field in one.rec.__struct_fields__:
        left, right = getattr(one.rec, field), getattr(two.rec, field)
        if field != "rank" and left != right:
            yield field, left, right
