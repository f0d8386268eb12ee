"""``layout``: what every rank registered holds together, and is what the plan expects (requirements 5-9, 33)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.boundary import STATE, expected_ranks
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.seen import Seen
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.records import (
    EngineGroup,
    Entry,
    EntryKind,
    PageRow,
    RankRegistered,
    TransferGroup,
    TransferPart,
)
from samestate.plans.model import ExpectedLayout

CHECK = "layout"
_WINDOWED = ("SlidingWindow", "ChunkedLocal", "CircularBuffer")
"""Cache specs that need only the last pages of a prefix."""


class RankLayout:
    """One rank's tables, by index."""

    def __init__(self, seen: Seen[RankRegistered]) -> None:
        self.seen = seen
        self.entries = {entry.entry: entry for entry in seen.rec.entries}
        self.groups = {group.group: group for group in seen.rec.transfer_groups}
        self._engine_groups = {group.group: group for group in seen.rec.engine_groups}
        self._transfer_group = {group.engine_group: group.group for group in seen.rec.transfer_groups}

    def holds(self, row: PageRow) -> bool:
        """Whether the row's page is one that was registered."""
        return row.entry in self.entries and row.block < self.seen.rec.num_blocks

    def engine_group(self, group: int) -> EngineGroup | None:
        """The engine group whose pages a transfer group moves."""
        return self._engine_groups.get(self.groups[group].engine_group) if group in self.groups else None

    def members(self, group: int) -> list[Entry]:
        """The entries that a transfer group moves."""
        moved = self.groups[group].engine_group if group in self.groups else None
        return [entry for entry in self.entries.values() if entry.engine_group == moved]

    def moved(self) -> list[Entry]:
        """The entries that loads must bring: all but tails that no transfer group moves, where every boundary is a
        multiple of their pool, so that none is open there."""
        moving = [group for index, group in self._engine_groups.items() if index in self._transfer_group]
        step = min((group.tokens_per_block for group in moving), default=0)
        return [entry for entry in self.entries.values() if not self._is_idle(entry, step)]

    def _is_idle(self, entry: Entry, step: int) -> bool:
        group = self._engine_groups.get(entry.engine_group)
        if group is None or entry.kind is not EntryKind.TAIL or entry.engine_group in self._transfer_group:
            return False
        return step > 0 < group.tokens_per_block and step % group.tokens_per_block == 0

    def blocks(self, part: TransferPart) -> range:
        """Indices, in the request's block table, of the blocks that a part moves."""
        group = self.groups.get(part.group)
        return range(part.first_block, part.first_block + part.pages // group.entries) if group else range(0)

    def part_bytes(self, part: TransferPart) -> int:
        """Bytes of the whole blocks that a part moves; 0 for a group that was never registered."""
        group = self.groups.get(part.group)
        return len(self.blocks(part)) * group.bytes_per_block if group else 0

    def missing_blocks(self, group: int, parts: Sequence[TransferPart], local: int, restored: int) -> list[int]:
        """Blocks of a transfer group that [local, restored) needs and no part moves, as indices."""
        engine_group = self.engine_group(group)
        if engine_group is None:
            return []
        size = engine_group.tokens_per_block
        loaded = [self.blocks(part) for part in parts if part.group == group]
        last = restored // size - 1
        only_last = engine_group.entry_kind in STATE or any(word in engine_group.spec for word in _WINDOWED)
        needed = range(last, last + 1) if only_last else range(local // size, last + 1)
        return [index for index in needed if index >= 0 and not any(index in blocks for blocks in loaded)]

    def pages(self, part: TransferPart) -> set[tuple[int, int]]:
        """(entry, block index) of every page that a part moves."""
        return {(entry.entry, index) for entry in self.members(part.group) for index in self.blocks(part)}

    def end(self, row: PageRow) -> int:
        """Tokens up to which a page reaches, by its place in the block table."""
        group = self._engine_groups.get(self.entries[row.entry].engine_group)
        return (row.block_index + 1) * group.tokens_per_block if group else 0

    def is_state(self, row: PageRow) -> bool:
        """Whether the page is the state at one boundary."""
        return row.entry in self.entries and self.entries[row.entry].kind in STATE

    def name(self, row: PageRow) -> str:
        """``group 1, entry 2 (recurrent of layers.0), [0, 3584)``."""
        entry = self.entries[row.entry]
        group = self._transfer_group.get(entry.engine_group)
        return f"group {group}, entry {entry.entry} ({entry.kind.value} of {entry.layer}), [0, {self.end(row)})"

    def place(self, base: Place, row: PageRow) -> Place:
        """Where a finding about the page points."""
        entry = self.entries[row.entry]
        at = {"group": self._transfer_group.get(entry.engine_group), "layer": entry.layer, "boundary": self.end(row)}
        return base.model_copy(update={"rank": self.seen.rec.rank, **at})


def rank_layouts(arm: ArmHistory) -> dict[int, RankLayout]:
    """The layouts of an arm by rank; raises MissingEvidence when a rank registered none."""
    for rank in sorted(expected_ranks(arm)):
        if rank not in arm.ranks:
            raise MissingEvidence("missing_rank", f"arm {arm.name}: rank {rank} never registered its cache")
        if not arm.ranks[rank].rec.entries:
            raise MissingEvidence("no_layout", f"arm {arm.name}: rank {rank} registered no entries; no page was read")
    return {rank: RankLayout(seen) for rank, seen in arm.ranks.items()}


def layout(history: History) -> CheckResult:
    """Hold the candidates' registrations against each other, against themselves and against the plan."""
    registered = [(arm.name, one) for arm in history.candidates for _, one in sorted(rank_layouts(arm).items())]
    if not registered:
        raise MissingEvidence("no_layout", "no arm has a connector, so none registered its cache")
    findings: list[Finding] = []
    origin, first = registered[0]
    for name, one in registered:
        place = Place(arm=name, rank=one.seen.rec.rank)
        findings += _expected(one, history.plan.expected_layout, place)
        findings += _sizes(one, place)
        findings += _groups(one, place)
        if _tables(one) != _tables(first):
            other = f"rank {first.seen.rec.rank}" + (f" of arm {origin}" if name != origin else "")
            message = f"rank {place.rank} registered other tables than {other}"
            findings.append(fail("ranks_differ", message, place, [first.seen.where, one.seen.where]))
    entries = sum(len(one.entries) for _, one in registered)
    ranks = sum(name == origin for name, _ in registered)
    summary = f"{ranks} rank(s): {len(first.groups)} transfer groups, {len(first.entries)} entries each"
    return conclude(CHECK, findings, unit="entries", examined=entries, summary=summary)


def _tables(one: RankLayout) -> tuple[list[EngineGroup], list[TransferGroup], list[Entry]]:
    return one.seen.rec.engine_groups, one.seen.rec.transfer_groups, one.seen.rec.entries


def _expected(one: RankLayout, expected: ExpectedLayout | None, place: Place) -> Iterator[Finding]:
    if expected is None:
        return
    for what, count, planned in (
        ("transfer groups", len(one.groups), expected.transfer_groups),
        ("entries", len(one.entries), expected.entries),
    ):
        if count != planned:
            message = (
                f"rank {place.rank} registered {count} {what}, the plan expects {planned} (for another model set "
                "expected_layout in a copy of the plan)"
            )
            yield unknown("layout_drift", message, place, [one.seen.where])


def _sizes(one: RankLayout, place: Place) -> Iterator[Finding]:
    """Entries fit their pages, and those of one layer lie side by side inside its page."""
    by_layer: dict[str, list[Entry]] = {}
    for index, entry in enumerate(one.seen.rec.entries):
        at = place.model_copy(update={"layer": entry.layer})
        if entry.entry != index:
            yield fail("wrong_index", f"entry {entry.entry} stands at place {index} of the table", at, [one.seen.where])
        if entry.effective_bytes > entry.page_bytes:
            message = (
                f"entry {index} of {entry.layer}: {entry.effective_bytes} effective bytes, page {entry.page_bytes}"
            )
            yield fail("page_overrun", message, at, [one.seen.where])
        by_layer.setdefault(entry.layer, []).append(entry)
    for layer, entries in by_layer.items():
        at = place.model_copy(update={"layer": layer})
        ordered = sorted(entries, key=lambda entry: entry.storage_offset)
        for left, right in pairwise(ordered):
            if left.storage_offset + left.effective_bytes > right.storage_offset:
                message = f"entries {left.entry} and {right.entry} of {layer} overlap"
                yield fail("entries_overlap", message, at, [one.seen.where])
        used = ordered[-1].storage_offset + ordered[-1].effective_bytes - ordered[0].storage_offset
        if len(ordered) > 1 and used > ordered[-1].page_bytes:
            message = f"the entries of {layer} take {used} bytes, its page has {ordered[-1].page_bytes}"
            yield fail("page_overrun", message, at, [one.seen.where])


def _groups(one: RankLayout, place: Place) -> Iterator[Finding]:
    """A transfer group moves exactly the effective bytes of its entries, or the whole packed block that holds them."""
    for group in one.groups.values():
        members = one.members(group.group)
        effective = sum(entry.effective_bytes for entry in members)
        if group.bytes_per_block != effective and not _whole_block(members, group.bytes_per_block):
            message = (
                f"rank {place.rank}: transfer group {group.group} moves {group.bytes_per_block} bytes a block, "
                f"its entries have {effective}"
            )
            yield fail("bytes_disagree", message, place.model_copy(update={"group": group.group}), [one.seen.where])


def _whole_block(entries: Sequence[Entry], moved: int) -> bool:
    """Whether `moved` bytes are a block in which all entries lie, as where vLLM packs a group's layers into one tensor
    (vLLM 0.33, GLM-5-Next); what else the block holds is moved with them."""
    return {entry.block_stride for entry in entries} == {moved} and all(
        entry.storage_offset % moved + entry.effective_bytes <= moved for entry in entries
    )
