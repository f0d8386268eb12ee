"""Every page fault, armed and disarmed in one running engine: what the records then show, and what the checks say.

For each fault, on prompts of its own: cold, another prompt and reload under the fault, the same reload again
without it, then a clean cold and reload. Nothing of a fault may be seen outside its own operations.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from instruments.driven import Driver, prompt
from samestate.checks.base import Finding, Verdict
from samestate.evidence.records import (
    BatchScheduled,
    EntryKind,
    GuardsChecked,
    LoadCompleted,
    LoadSubmitted,
    Lookup,
    OperationName,
    PageRow,
    PagesDigested,
    PageSide,
    RankRegistered,
    SaveCompleted,
    SaveDelayed,
    SaveSubmitted,
    StateComputed,
)
from samestate.faults.catalogue import FAULTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

C = 256
TOKENS = 2 * C + 1
"""N: a reload restores [0, 2C) and computes one token."""
WHOLE = 2 * C
"""N for the full lookup, which is wrong only there; a reload should restore [0, C)."""
OUTPUT_TOKENS = 8
BLOCKS = 32
DELAY_MS = 150
ARRIVED_OTHER, ARRIVED_ZERO, SENTINEL_LEFT, GUARD_CHANGED = "arrived-other", "arrived-zero", "sentinel", "guard"
STALE, STORED_OTHER, OVERWRITTEN, EARLY = "stale", "stored-other", "overwritten", "early"
UNCOMPUTED, NULL_BLOCK, NOT_LOADED, LATE, NOT_CREDITED = "uncomputed", "null-block", "not-loaded", "late", "credit"

SHOWN: dict[str, tuple[set[str], set[str]]] = {
    "full-lookup": (set(), {NOT_CREDITED}),
    "stale-page": (set(), {STALE}),
    "zero-page": (set(), {ARRIVED_OTHER, ARRIVED_ZERO}),
    "swapped-layers": (set(), {ARRIVED_OTHER}),
    "short-copy": (set(), {ARRIVED_OTHER, SENTINEL_LEFT}),
    "neighbour-write": (set(), {GUARD_CHANGED}),
    "early-complete": ({EARLY, STORED_OTHER}, set()),
    "missing-group": (set(), {NOT_LOADED}),
    "null-block-saved": ({UNCOMPUTED, NULL_BLOCK}, {ARRIVED_ZERO}),
    "sync-load": (set(), {LATE}),
}
"""What the records of a fault's cold run and of its reload show, and nothing else."""
TIER_STAYS_WRONG = {"null-block-saved"}


class Session(NamedTuple):
    """One engine's life."""

    lines: list[tuple[int, object]]
    """(t_ns, record) of scheduler and worker."""
    requests: dict[str, str]
    """By operation."""
    outputs: dict[str, list[int]]
    findings: dict[str, dict[tuple[str, str], Finding]]
    """By operation, check and code."""

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


class Faulted(Driver):
    """Runs cases on one engine, each with a fault armed and then without."""

    def run(self, case: str, name: str, tag: str, tokens: int) -> None:
        kind = OperationName.COLD if name.endswith("cold") else OperationName.RELOAD
        self.ask([(f"{case}.{name}", case, prompt(tag, tokens))], kind)

    def case(self, fault: str) -> None:
        tokens = WHOLE if fault == "full-lookup" else TOKENS
        self.engine.arm_fault(fault)
        self.run(fault, "cold", fault, tokens)
        self.run(fault, "other-cold", f"{fault}, other", tokens)
        time.sleep(DELAY_MS / 1000)  # an early completion waits for nothing, its copies are still to come
        self.run(fault, "reload", fault, tokens)
        self.engine.arm_fault(None)
        self.run(fault, "again", fault, tokens)
        self.run(fault, "clean-cold", f"{fault}, clean", tokens)
        self.run(fault, "clean-reload", f"{fault}, clean", tokens)


@pytest.fixture(scope="module")
def session(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    root = tmp_path_factory.mktemp("live-faults") / "archive"
    settings = {"block_size": C, "num_gpu_blocks_override": BLOCKS}
    driver = Faulted(root, tiny_model, settings, output_tokens=OUTPUT_TOKENS, save_delay_ms=DELAY_MS)
    try:
        assert driver.engine.start().checkpoint_interval == C
        driver.run("first", "clean-cold", "first", TOKENS)
        driver.run("first", "clean-reload", "first", TOKENS)
        for fault in FAULTS:
            driver.case(fault)
    finally:
        driver.close()
    seen = driver.seal()
    return Session(
        seen.lines,
        {answer.op: answer.request for answer in seen.answers},
        {answer.op: answer.token_ids for answer in seen.answers},
        seen.findings,
    )


def shown(session: Session, op: str) -> dict[str, set[int]]:
    """All that is wrong in an operation's records, each with the entries (groups, jobs, blocks) it concerns."""
    found: dict[str, set[int]] = defaultdict(set)
    _saves(session, op, found)
    _loads(session, op, found)
    return dict(found)


def _saves(session: Session, op: str, found: dict[str, set[int]]) -> None:
    registered = next(one for _, one in session.lines if isinstance(one, RankRegistered))
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
        entry = registered.entries[row.entry]
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
    registered = next(one for _, one in session.lines if isinstance(one, RankRegistered))
    stored = session.rows(op, "load", PageSide.STORED, "submitted")
    arrived = session.rows(op, "load", PageSide.DESTINATION, "completed")
    assert stored.keys() == arrived.keys()
    saved = {
        (row.entry, row.block_index): row.digest
        for other in session.requests
        if other.replace("clean-cold", "clean-reload") == op or other == f"{op.rpartition('.')[0]}.cold"
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
        absent = {group.group for group in registered.transfer_groups} - {part.group for part in load_.parts}
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


def states_of(session: Session, groups: int) -> set[int]:
    """Entries of the first recurrent transfer groups."""
    registered = next(one for _, one in session.lines if isinstance(one, RankRegistered))
    recurrent = {entry.engine_group for entry in registered.entries if entry.kind is EntryKind.RECURRENT}
    first = [one.engine_group for one in registered.transfer_groups if one.engine_group in recurrent][:groups]
    return {entry.entry for entry in registered.entries if entry.engine_group in first}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_in_its_own_operations_and_nowhere_else(session: Session, fault: str) -> None:
    cold, reload = shown(session, f"{fault}.cold"), shown(session, f"{fault}.reload")
    assert (set(cold), set(reload)) == SHOWN[fault]
    for clean in ("clean-cold", "clean-reload", *(() if fault in TIER_STAYS_WRONG else ("again",))):
        assert shown(session, f"{fault}.{clean}") == {}, clean
        assert session.rows(f"{fault}.{clean}", "save" if clean == "clean-cold" else "load", *side(clean))
    assert session.outputs[f"{fault}.clean-reload"] == session.outputs[f"{fault}.clean-cold"]
    if fault not in TIER_STAYS_WRONG:
        assert session.outputs[f"{fault}.again"] == session.outputs[f"{fault}.cold"]


def side(clean: str) -> tuple[PageSide, str]:
    return (PageSide.SOURCE, "submitted") if clean == "clean-cold" else (PageSide.DESTINATION, "completed")


def test_the_engine_was_right_before_the_first_fault(session: Session) -> None:
    assert shown(session, "first.clean-cold") == shown(session, "first.clean-reload") == {}
    assert session.outputs["first.clean-reload"] == session.outputs["first.clean-cold"]


@pytest.mark.parametrize(
    ("fault", "what", "groups"),
    [
        ("stale-page", STALE, 1),
        ("zero-page", ARRIVED_ZERO, 1),
        ("zero-page", ARRIVED_OTHER, 1),
        ("swapped-layers", ARRIVED_OTHER, 2),
    ],
)
def test_only_the_pages_meant_are_damaged(session: Session, fault: str, what: str, groups: int) -> None:
    assert shown(session, f"{fault}.reload")[what] == states_of(session, groups)


def test_half_a_page_leaves_the_sentinel_in_the_other_half(session: Session) -> None:
    found = shown(session, "short-copy.reload")
    assert found[SENTINEL_LEFT] == found[ARRIVED_OTHER]
    assert found[SENTINEL_LEFT] < states_of(session, 1)


def test_one_block_beside_the_load_is_written_too(session: Session) -> None:
    (changed,) = shown(session, "neighbour-write.reload")[GUARD_CHANGED]
    rows = session.rows("neighbour-write.reload", "load", PageSide.DESTINATION, "completed").values()
    loaded = {row.block for row in rows}
    assert changed == (max(loaded) + 1 if max(loaded) + 1 < BLOCKS else min(loaded) - 1)


def test_a_synchronous_load_is_answered_as_one(session: Session) -> None:
    answers = {op: [one.is_async for _, one in session.of(Lookup, f"sync-load.{op}")] for op in ("reload", "again")}
    assert answers == {"reload": [False], "again": [True]}
    assert session.outputs["sync-load.reload"] != session.outputs["sync-load.cold"]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "full-lookup"])
def test_the_check_that_the_catalogue_names_fires(session: Session, fault: str) -> None:
    op = f"{fault}.{'cold' if SHOWN[fault][0] else 'reload'}"
    finding = session.findings[op][FAULTS[fault].check, FAULTS[fault].code]
    assert finding.verdict is Verdict.FAIL
    assert finding.place.rank == 0


def test_a_full_lookup_is_seen_in_the_bytes_too(session: Session) -> None:
    """Its own check needs a plan's cases; tests/checks holds it."""
    assert set(session.findings["full-lookup.reload"]) == {("prefix-identity", "content_not_credited")}


def test_the_checks_are_silent_elsewhere(session: Session) -> None:
    spoiled = {f"{fault}.{name}" for fault in FAULTS for name in ("cold", "other-cold", "reload")}
    spoiled |= {f"{fault}.again" for fault in TIER_STAYS_WRONG}
    assert set(session.findings) <= spoiled
