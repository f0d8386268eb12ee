"""What the records of the drills show, looked at without the product's checks: the fault meant, and nothing else.

For a cold run its saves, for a reload its loads, page by page.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest

from instruments.conftest import Drilled
from instruments.driven import Seen
from samestate.evidence.records import (
    BatchScheduled,
    EntryKind,
    GuardsChecked,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    PageRow,
    PagesDigested,
    PageSide,
    RankRegistered,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    StateComputed,
)
from samestate.plans.drills import CLEAN, DRILLS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

DELAY_MS = 150
BLOCKS = 32
ARRIVED_OTHER, ARRIVED_ZERO, SENTINEL_LEFT, GUARD_CHANGED = "arrived-other", "arrived-zero", "sentinel", "guard"
STALE, STORED_OTHER, OVERWRITTEN, EARLY = "stale", "stored-other", "overwritten", "early"
UNCOMPUTED, NULL_BLOCK, NOT_LOADED, LATE, NOT_CREDITED = "uncomputed", "null-block", "not-loaded", "late", "credit"

SAVES: dict[str, set[str]] = {
    "early-complete": {EARLY, STORED_OTHER},
    "null-block-saved": {UNCOMPUTED, NULL_BLOCK},
    "scratch-saved": {UNCOMPUTED, OVERWRITTEN},
    "trimmed-key": {UNCOMPUTED, OVERWRITTEN},
    "unsaved-group": {STORED_OTHER},
    "failed-put-visible": {STORED_OTHER},
}
"""What the records of the cold run of a fault's first prompt show."""
LOADS: dict[str, set[str]] = {
    "full-lookup": {NOT_CREDITED},
    "unaligned-credit": {NOT_CREDITED},
    "stale-page": {STALE},
    "zero-page": {ARRIVED_OTHER, ARRIVED_ZERO},
    "swapped-layers": {ARRIVED_OTHER},
    "halves-swapped": {ARRIVED_OTHER},
    "read-during-eviction": {ARRIVED_OTHER},
    "short-copy": {ARRIVED_OTHER, SENTINEL_LEFT},
    "wide-column": {ARRIVED_OTHER, SENTINEL_LEFT},
    "missing-entry": {ARRIVED_OTHER, SENTINEL_LEFT},
    "early-load-complete": {ARRIVED_OTHER, SENTINEL_LEFT},
    "swallowed-load-failure": {ARRIVED_OTHER, SENTINEL_LEFT},
    "neighbour-write": {GUARD_CHANGED},
    "missing-group": {NOT_LOADED},
    "attention-only": {NOT_LOADED},
    "fresh-state": set(),
    "sync-load": {LATE},
}
"""What those of its first reload show."""


STATES = (EntryKind.CONV, EntryKind.RECURRENT)


class Session(NamedTuple):
    """One engine's life."""

    lines: list[tuple[int, object]]
    """(t_ns, record) of scheduler and worker."""
    requests: dict[str, str]
    """By operation."""
    outputs: dict[str, list[int]]

    def rows(self, op: str, direction: str, side: PageSide, moment: str) -> dict[tuple[int, int, int], PageRow]:
        """By job, entry and block index."""
        return {
            (record.job, row.entry, row.block_index): row
            for _, record in self.lines
            if isinstance(record, PagesDigested)
            and (record.request, record.direction, record.side, record.moment)
            == (self.requests[op], direction, side, moment)
            for row in record.rows
        }

    def of(self, kind: type, op: str) -> list[tuple[int, object]]:
        """Records of a kind that name the operation's request."""
        return [(t, one) for t, one in self.lines if isinstance(one, kind) and one.request == self.requests[op]]

    @property
    def registered(self) -> RankRegistered:
        """The one rank's tables."""
        return next(one for _, one in self.lines if isinstance(one, RankRegistered))


@pytest.fixture(scope="module")
def session(drilled: Drilled) -> Session:
    seen = Seen.of(drilled.archive)
    return Session(
        seen.lines,
        {answer.op: answer.request for answer in seen.answers},
        {answer.op: answer.token_ids for answer in seen.answers},
    )


def shown(session: Session, op: str) -> dict[str, set[int]]:
    """All that is wrong in an operation's records, each with the entries (groups, jobs, blocks) it concerns."""
    found: dict[str, set[int]] = defaultdict(set)
    _saves(session, op, found)
    _loads(session, op, found)
    return dict(found)


def _saves(session: Session, op: str, found: dict[str, set[int]]) -> None:
    submitted = session.rows(op, "save", PageSide.SOURCE, "submitted")
    completed = session.rows(op, "save", PageSide.SOURCE, "completed")
    stored = session.rows(op, "save", PageSide.STORED, "completed")
    assert submitted.keys() == completed.keys() == stored.keys()
    computed = {
        (group, block)
        for _, one in session.of(StateComputed, op)
        for group, block in one.blocks  # type: ignore[attr-defined]
    }
    for page, row in submitted.items():
        entry = session.registered.entries[row.entry]
        if completed[page].digest != row.digest:
            found[OVERWRITTEN].add(row.entry)
        if stored[page].digest != row.digest:
            found[STORED_OTHER].add(row.entry)
        if entry.kind is EntryKind.ATTENTION:
            continue
        if (entry.engine_group, row.block) not in computed:
            found[UNCOMPUTED].add(row.entry)
        if row.block == 0:
            found[NULL_BLOCK].add(row.entry)
    jobs = {one.job: t for t, one in session.of(SaveSubmitted, op)}  # type: ignore[attr-defined]
    delays = {one.job: one.delay_ms for _, one in session.lines if isinstance(one, SaveDelayed)}
    ends = {one.job: t for t, one in session.lines if isinstance(one, SaveCompleted)}
    for job, began in jobs.items():
        assert delays[job] == DELAY_MS
        if ends[job] - began < DELAY_MS * 1_000_000:
            found[EARLY].add(job)


def _loads(session: Session, op: str, found: dict[str, set[int]]) -> None:
    stored = session.rows(op, "load", PageSide.STORED, "submitted")
    arrived = session.rows(op, "load", PageSide.DESTINATION, "completed")
    assert stored.keys() == arrived.keys()
    prompt = op.rpartition(".")[0]
    saved = {
        (row.entry, row.block_index): row.digest
        for other in session.requests
        if other.rpartition(".")[0] == prompt
        for row in session.rows(other, "save", PageSide.SOURCE, "submitted").values()
    }
    for page, row in arrived.items():
        if row.digest != stored[page].digest:
            found[ARRIVED_OTHER].add(row.entry)
        if stored[page].digest != saved[page[1:]]:
            found[STALE].add(row.entry)
        if not row.nonzero:
            found[ARRIVED_ZERO].add(row.entry)
        if row.sentinel:
            found[SENTINEL_LEFT].add(row.entry)
    starts = [
        (t, row.start)
        for t, one in session.lines
        if isinstance(one, BatchScheduled)
        for row in one.rows
        if row.request == session.requests[op]
    ]
    for _, load_ in session.of(LoadSubmitted, op):
        assert isinstance(load_, LoadSubmitted)
        absent = {group.group for group in session.registered.transfer_groups} - {part.group for part in load_.parts}
        if absent:
            found[NOT_LOADED] |= absent
        if load_.boundary != starts[0][1]:
            found[NOT_CREDITED].add(load_.job)
        ended = next(t for t, one in session.lines if isinstance(one, LoadCompleted) and one.job == load_.job)
        if ended > starts[0][0]:
            found[LATE].add(load_.job)
        guards = next(one for _, one in session.lines if isinstance(one, GuardsChecked) and one.job == load_.job)
        assert guards.steps_between == 0
        if guards.changed:
            found[GUARD_CHANGED] |= {block for _, block in guards.changed}


def states_of(session: Session, groups: int, kinds: tuple[EntryKind, ...] = (EntryKind.RECURRENT,)) -> set[int]:
    """Entries of these kinds of the first recurrent transfer groups."""
    entries = session.registered.entries
    recurrent = {entry.engine_group for entry in entries if entry.kind is EntryKind.RECURRENT}
    first = [one.engine_group for one in session.registered.transfer_groups if one.engine_group in recurrent][:groups]
    return {entry.entry for entry in entries if entry.engine_group in first and entry.kind in kinds}


@pytest.mark.parametrize("fault", SAVES)
def test_a_fault_of_saves_shows_in_the_cold_run(session: Session, fault: str) -> None:
    assert set(shown(session, f"{fault}-a.1")) == SAVES[fault]


@pytest.mark.parametrize("fault", LOADS)
def test_a_fault_of_loads_shows_in_the_reload(session: Session, fault: str) -> None:
    assert shown(session, f"{fault}-a.1") == {}
    assert set(shown(session, f"{fault}-a.2")) == LOADS[fault]
    assert shown(session, f"{fault}-a.3") == {}
    assert session.outputs[f"{fault}-a.3"] == session.outputs[f"{fault}-a.1"]


@pytest.mark.parametrize("fault", DRILLS)
def test_nothing_is_wrong_in_the_records_of_a_clean_prompt(session: Session, fault: str) -> None:
    cold, reload = f"{fault}-{CLEAN}.1", f"{fault}-{CLEAN}.2"
    assert shown(session, cold) == shown(session, reload) == {}
    assert session.rows(cold, "save", PageSide.SOURCE, "submitted")
    assert session.rows(reload, "load", PageSide.DESTINATION, "completed")
    assert session.outputs[reload] == session.outputs[cold]


@pytest.mark.parametrize(
    ("fault", "what", "groups"),
    [
        ("stale-page", STALE, 1),
        ("zero-page", ARRIVED_ZERO, 1),
        ("zero-page", ARRIVED_OTHER, 1),
        ("read-during-eviction", ARRIVED_OTHER, 1),
        ("swapped-layers", ARRIVED_OTHER, 2),
    ],
)
def test_only_the_pages_meant_are_damaged(session: Session, fault: str, what: str, groups: int) -> None:
    """A convolution's state is that of the last few tokens, in which two prompts can agree."""
    damaged = shown(session, f"{fault}-a.2")[what]
    assert states_of(session, groups) <= damaged <= states_of(session, groups, STATES)


@pytest.mark.parametrize("fault", ["short-copy", "missing-entry"])
def test_a_part_of_a_layers_page_leaves_the_sentinel_in_the_other_part(session: Session, fault: str) -> None:
    found = shown(session, f"{fault}-a.2")
    assert found[SENTINEL_LEFT] == found[ARRIVED_OTHER]
    assert found[SENTINEL_LEFT] < states_of(session, 1, STATES)


def test_a_failed_load_leaves_the_sentinel_everywhere(session: Session) -> None:
    found = shown(session, "swallowed-load-failure-a.2")
    assert found[SENTINEL_LEFT] == {entry.entry for entry in session.registered.entries}


def test_one_block_beside_the_load_is_written_too(session: Session) -> None:
    (changed,) = shown(session, "neighbour-write-a.2")[GUARD_CHANGED]
    rows = session.rows("neighbour-write-a.2", "load", PageSide.DESTINATION, "completed").values()
    loaded = {row.block for row in rows}
    assert changed == (max(loaded) + 1 if max(loaded) + 1 < BLOCKS else min(loaded) - 1)


def test_a_synchronous_load_is_answered_as_one(session: Session) -> None:
    answers = {op: [one.is_async for _, one in session.of(Lookup, f"sync-load-a.{op}")] for op in (2, 3)}
    assert answers == {2: [False], 3: [True]}
    assert session.outputs["sync-load-a.2"] != session.outputs["sync-load-a.1"]
