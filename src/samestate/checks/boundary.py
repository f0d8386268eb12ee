"""``boundary``: every reload restored exactly the prefix that it was credited, and the right one.

B comes from the transfer's own description on every rank, p and the scheduled tokens
from the request's first batch. Strict prefix: B = p = C·⌊(N−1)/C⌋, scheduled = N−B, no
drafts. B = N with p = N−1 is the lookup over the full prompt (requirements 18–24, 78).
An engine that gives up the last whole block of a hit, for drafts of EAGLE or MTP, restores
C·(⌊N/C⌋−1) instead; a prompt too short for that is computed again, and is no reload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, History, Load, Row, Schedule
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import BatchSource, EntryKind, OperationName
from samestate.plans.operations import boundary as strict_boundary
from samestate.plans.scenarios import CANDIDATE

CHECK = "boundary"
STATE = (EntryKind.RECURRENT, EntryKind.CONV)
"""Kinds whose page is the state at one boundary, not a row of tokens."""
RULES = {False: "C·⌊(N−1)/C⌋", True: "C·(⌊N/C⌋−1)"}
"""What B is, by whether a hit gives up its last whole block."""
MAX_ABSENT_RANKS = 16
"""How many ranks that never registered are named: an engine may claim any number of them."""


class Reload(NamedTuple):
    """One reload of the candidate, as far as it is recorded."""

    case: str
    op: str
    tokens: int
    """N."""
    request: str | None
    loads: dict[int, list[Load]]
    """By rank."""
    scheduler: Schedule | None
    connector: Schedule | None

    @property
    def place(self) -> Place:
        return Place(arm=CANDIDATE, case=self.case, op=self.op, request=self.request)

    @property
    def boundaries(self) -> dict[int, int | None]:
        """B by rank, the farthest of its loads; None: not reported by one of them."""
        return {rank: restored(loads) for rank, loads in sorted(self.loads.items())}

    @property
    def first(self) -> Row | None:
        """The first batch: p is its start."""
        return self.scheduler[0] if self.scheduler else None

    @property
    def evidence(self) -> list[str]:
        """Loads, and the first batch as both sources saw it."""
        wheres = [load.submitted.where for loads in self.loads.values() for load in loads]
        return wheres + [schedule[0].where for schedule in (self.connector, self.scheduler) if schedule]


def restored(loads: Sequence[Load]) -> int | None:
    """B of one rank: the farthest of its loads; None: not reported by one of them, or there is none."""
    reported = [load.submitted.rec.boundary for load in loads]
    known = [boundary for boundary in reported if boundary is not None]
    return max(known) if known and len(known) == len(reported) else None


def by_rank(loads: Sequence[Load]) -> dict[int, list[Load]]:
    """Loads of one request by rank."""
    found: dict[int, list[Load]] = {}
    for load in loads:
        found.setdefault(load.submitted.rec.rank, []).append(load)
    return found


def reloads(history: History) -> list[Reload]:
    """The candidate's planned reloads, in order; raises MissingEvidence."""
    arm = history.arm(CANDIDATE)
    found = []
    for case, op in history.generations(OperationName.RELOAD):
        output = arm.output(op.op)
        request = output.rec.request if output else None
        loads = by_rank(arm.loads.get(request, ()) if request else ())
        schedules = (arm.schedule(op.op), arm.schedule(op.op, BatchSource.CONNECTOR))
        found.append(Reload(case.id, op.op, case.tokens, request, loads, *schedules))
    return found


def nothing_due(history: History, reload: Reload) -> bool:
    """The prompt's only whole block was given up, and by load and credit nothing was restored.

    Raises MissingEvidence.
    """
    if not history.arm(CANDIDATE).drops_last_block:
        return False
    due = strict_boundary(reload.tokens, history.resolved.checkpoint_interval, drops_last=True)
    return due == 0 and not reload.loads and reload.first is not None and reload.first.start == 0


def expected_ranks(arm: ArmHistory) -> set[int]:
    """Ranks that registered, and the first that should have, by parallel sizes and by what workers say.

    Raises MissingEvidence.
    """
    sizes = [arm.engine.rec.ranks, *(s.rec.world_size for s in arm.ranks.values())]
    absent = (rank for rank in range(max(sizes)) if rank not in arm.ranks)
    return {*arm.ranks, *islice(absent, MAX_ABSENT_RANKS)}


def boundary(history: History) -> CheckResult:
    """Hold every reload of the candidate against the strict prefix."""
    arm = history.arm(CANDIDATE)
    ranks = expected_ranks(arm)
    findings = [
        unknown("missing_rank", f"rank {rank} never registered its cache", Place(arm=CANDIDATE, rank=rank))
        for rank in sorted(ranks - set(arm.ranks))
    ]
    found_again = reloads(history)
    checked = [reload for reload in found_again if not nothing_due(history, reload)]
    good = 0
    for reload in checked:
        found = list(_reload(history, reload, ranks))
        good += not found
        findings += found
    rule = RULES[arm.drops_last_block]
    summary = f"{good}/{len(checked)} reloads at B = p = {rule} on {len(ranks)} rank(s)"
    if short := len(found_again) - len(checked):
        summary += f"; {short} prompt(s) without a checkpoint, computed again"
    return conclude(CHECK, findings, unit="reloads", examined=len(checked), summary=summary)


def _reload(history: History, reload: Reload, ranks: set[int]) -> Iterator[Finding]:
    arm, whole = history.arm(CANDIDATE), history.whole(CANDIDATE)
    if reload.first is None or not reload.connector:
        absent = BatchSource.SCHEDULER if reload.first is None else BatchSource.CONNECTOR
        message = f"{reload.op}: the first batch is not recorded by the {absent.value}"
        yield unknown("missing_batches", message, reload.place)
        return
    other = reload.connector[0]
    if reload.first.shape != other.shape:
        message = f"{reload.op}: scheduler and connector record different first batches"
        make = fail if whole or reload.first.start == other.start else unknown
        yield make("sources_disagree", message, reload.place, reload.evidence)
    if not reload.loads and not any(registered.rec.transfer_groups for registered in arm.ranks.values()):
        message = f"{reload.op}: the connector has no adapter, so which prefix its loads restore is not reported"
        yield unknown("not_reported", message, reload.place, reload.evidence)
        return
    if not reload.loads:
        message = f"{reload.op}: nothing was loaded, {reload.first.start} tokens credited"
        yield unknown("no_external_hit", message, reload.place, reload.evidence)
        return
    for rank in sorted(ranks - set(reload.loads)):
        message = f"{reload.op}: rank {rank} records no load"
        yield unknown("missing_rank", message, _at(reload, rank=rank), reload.evidence)
    boundaries = reload.boundaries
    for rank, reported in boundaries.items():
        if reported is None:
            message = f"{reload.op}: rank {rank} does not report which prefix its load represents"
            yield unknown("not_reported", message, _at(reload, rank=rank), reload.evidence)
    distinct = sorted({reported for reported in boundaries.values() if reported is not None})
    if len(distinct) > 1:
        said = ", ".join(f"rank {rank}: {reported}" for rank, reported in boundaries.items())
        message = f"{reload.op}: ranks restored different prefixes ({said})"
        yield (fail if whole else unknown)("rank_disagreement", message, reload.place, reload.evidence)
    yield from _parts(arm, reload, whole=whole)
    interval, drops = history.resolved.checkpoint_interval, arm.drops_last_block
    expected = strict_boundary(reload.tokens, interval, drops_last=drops)
    yield from _credit(reload, reload.first, distinct, expected, whole=whole)


def _parts(arm: ArmHistory, reload: Reload, *, whole: bool) -> Iterator[Finding]:
    """Every recurrent part of a rank's loads reaches exactly to B, the others together as far.

    There is a recurrent part where the layout has state.
    """
    boundaries = reload.boundaries
    for rank, loads in reload.loads.items():
        registered = arm.ranks.get(rank)
        if registered is None:
            continue
        kinds = {group.group: group.entry_kind for group in registered.rec.engine_groups}
        groups = {group.group: kinds.get(group.engine_group) for group in registered.rec.transfer_groups}
        state = {group for group, kind in groups.items() if kind in STATE}
        moved = [(load, part) for load in loads for part in load.submitted.rec.parts if part.pages]
        for load, part in moved:
            place = _at(reload, rank=rank, group=part.group, boundary=part.boundary)
            if groups.get(part.group) is None:
                message = f"{reload.op}: rank {rank} loaded transfer group {part.group}, which it never registered"
                yield unknown("unknown_group", message, place, [load.submitted.where, registered.where])
            elif part.group in state and boundaries[rank] not in (None, part.boundary):
                message = (
                    f"{reload.op}: rank {rank}: state of transfer group {part.group} reaches to {part.boundary}, "
                    f"the load to {boundaries[rank]}"
                )
                yield fail("part_boundary", message, place, [load.submitted.where])
        for group in sorted(groups.keys() - state):
            ends = [part.boundary for _, part in moved if part.group == group]
            if ends and max(ends) < (boundaries[rank] or 0):
                message = (
                    f"{reload.op}: rank {rank}: pages of transfer group {group} reach to {max(ends)}, "
                    f"the load to {boundaries[rank]}"
                )
                place = _at(reload, rank=rank, group=group, boundary=max(ends))
                evidence = [load.submitted.where for load in loads]
                yield (fail if whole else unknown)("part_boundary", message, place, evidence)
        for group in sorted(state - {part.group for _, part in moved}):
            message = f"{reload.op}: rank {rank} loaded no state of transfer group {group}"
            evidence = [load.submitted.where for load in loads]
            yield unknown("no_state_loaded", message, _at(reload, rank=rank, group=group), evidence)


def _credit(reload: Reload, first: Row, boundaries: list[int], expected: int, *, whole: bool) -> Iterator[Finding]:
    """B, p and what was scheduled, against each other and against the strict prefix.

    A load or a step that is not recorded can only make B larger and p smaller than they seem.
    So too large a B is a fail in any record, too small a B or too large a p only in a whole one.
    """
    short = fail if whole else unknown
    n, p, scheduled = reload.tokens, first.start, first.scheduled
    if boundaries == [n] and (p, scheduled) == (n - 1, 1):
        message = (
            f"{reload.op}: checkpoint of [0, {n}) restored, {p} tokens credited, 1 scheduled: "
            "the last token is applied twice (lookup over the full prompt)"
        )
        yield fail("retained_lookup_boundary", message, _at(reload, boundary=n), reload.evidence)
        return
    for b in boundaries:
        place = _at(reload, boundary=b)
        if b != p:
            message = f"{reload.op}: checkpoint of [0, {b}) restored, {p} tokens credited"
            yield (fail if b > p else short)("boundary_not_credited", message, place, reload.evidence)
        if b != expected:
            message = f"{reload.op}: checkpoint of [0, {b}) restored, expected [0, {expected}) for N={n}"
            yield (fail if b > expected else short)("wrong_boundary", message, place, reload.evidence)
        if n - b < 1:
            message = f"{reload.op}: checkpoint of [0, {b}) leaves nothing of N={n} to compute"
            yield fail("empty_suffix", message, place, reload.evidence)
    if p != expected and p not in boundaries:
        message = f"{reload.op}: {p} tokens credited, expected {expected} for N={n}"
        yield (fail if p < expected else short)("wrong_credit", message, reload.place, reload.evidence)
    if first.drafted:
        message = f"{reload.op}: {first.drafted} draft tokens in the first batch"
        yield fail("drafts_scheduled", message, reload.place, reload.evidence)
    computed = _prefill(reload, first)
    if computed > n - p:
        message = f"{reload.op}: {computed} prompt tokens scheduled from {p} on, expected {n - p}"
        yield fail("wrong_suffix", message, reload.place, reload.evidence)
    elif computed < n - p:
        message = f"{reload.op}: only {computed} of the {n - p} prompt tokens from {p} on are in a recorded step"
        yield unknown("missing_batches", message, reload.place, reload.evidence)


def _prefill(reload: Reload, first: Row) -> int:
    """Tokens scheduled in the unbroken steps from the first batch to the prompt's end, drafts left out."""
    reached = first.start
    computed = 0
    for row in takewhile(lambda row: row.start < reload.tokens, reload.scheduler or ()):
        if row.start != reached:
            break
        computed += row.scheduled - row.drafted
        reached += row.scheduled - row.drafted
    return computed


def _at(reload: Reload, **where: int) -> Place:
    return reload.place.model_copy(update=where)
