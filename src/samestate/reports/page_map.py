"""Which pages each load brought, by rank and transfer group. The checks judge; this shows.

A page is compared with what was last saved for the same tokens, entry and rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Transfer
from samestate.checks.prefixes import Prefixes
from samestate.evidence.records import PageRow, PageSide
from samestate.plans.scenarios import CANDIDATE

MAX_SAVED_BLOCKS = 512
"""Beyond so many blocks a prompt, those that were saved and not loaded are not looked up."""
NOTES_SHOWN = 6


class PageState(StrEnum):
    """What became of a page; the worst of a block's entries is shown."""

    POISON = "poison left"
    DIFFERS = "differs from what was saved"
    MISSING = "loaded, not read"
    UNSAVED = "loaded, not saved in this run"
    EQUAL = "loaded, equal to what was saved"
    SAVED = "saved, not loaded"
    NONE = "neither"


_WORST_FIRST = list(PageState)


class Run(NamedTuple):
    """Blocks [first, last] of a request that look alike."""

    first: int
    last: int
    state: PageState
    entries: int
    """Entries in this state, of the worst block."""
    of: int
    """Entries of the group."""


class GroupRow(NamedTuple):
    """One transfer group of one rank."""

    rank: int
    group: int
    kinds: str
    tokens_per_block: int
    runs: list[Run]


class PageMap(NamedTuple):
    """What one request loaded."""

    arm: str
    case: str
    op: str
    blocks: int
    rows: list[GroupRow]
    notes: list[str]


@dataclass(slots=True)
class _Loaded:
    """What one request loaded on one rank."""

    states: dict[tuple[int, int], PageState] = field(default_factory=dict)
    """By entry and block index."""
    notes: list[str] = field(default_factory=list)


def page_maps(history: History) -> list[PageMap]:
    """One map for each request that loaded, arm by arm in time order; none where no page was read."""
    history.arm(CANDIDATE)
    arms = (arm for arm in history.arms.values() if arm.pages.transfers)
    return [one for arm in arms for one in _Mapper(history, arm).maps()]


def require_page_maps(history: History) -> tuple[list[PageMap], str]:
    """The maps, or none and why."""
    try:
        return page_maps(history), ""
    except MissingEvidence as missing:
        return [], str(missing)


class _Mapper:
    def __init__(self, history: History, arm: ArmHistory) -> None:
        self._arm = arm
        self._layouts = rank_layouts(arm)
        self._prefixes = Prefixes(history, arm)
        self._saved: dict[tuple[int, int, str], str] = {}
        """By rank, entry and digest of the tokens: digest of what was last saved."""
        self._loaded: dict[str, dict[int, _Loaded]] = {}
        """By request and rank."""

    def maps(self) -> list[PageMap]:
        for transfer in self._arm.pages.transfers:
            layout = self._layouts.get(transfer.rank)
            if layout is None:
                continue
            if transfer.direction == "save":
                self._save(transfer, layout)
            else:
                self._load(transfer, layout)
        return [self._map(request, ranks) for request, ranks in self._loaded.items()]

    def _save(self, save: Transfer, layout: RankLayout) -> None:
        if any(not done.rec.ok for done in save.completions):
            return
        for row in save.rows(PageSide.SOURCE, "submitted"):
            digest = self._digest(save.request, layout, row)
            if digest is not None:
                self._saved[save.rank, row.entry, digest] = row.digest

    def _load(self, load: Transfer, layout: RankLayout) -> None:
        loaded = self._loaded.setdefault(load.request, {}).setdefault(load.rank, _Loaded())
        for page in (page for part in load.parts for page in layout.pages(part)):
            loaded.states[page] = PageState.MISSING
        for row in load.rows(PageSide.DESTINATION, "completed"):
            if not layout.holds(row):
                continue
            state = self._state(load, layout, row)
            loaded.states[row.entry, row.block_index] = state
            if state not in (PageState.EQUAL, PageState.UNSAVED):
                effective = layout.entries[row.entry].effective_bytes
                left = f", {row.sentinel:,} of {effective:,} bytes still hold the poison" if row.sentinel else ""
                loaded.notes.append(f"rank {load.rank}: {layout.name(row)}: {state.value}{left}")
        for entry, block in load.guards.rec.changed if load.guards else ():
            loaded.notes.append(
                f"rank {load.rank}: guarded block {block} of entry {entry} changed, no page of the load"
            )

    def _state(self, load: Transfer, layout: RankLayout, row: PageRow) -> PageState:
        if row.sentinel:
            return PageState.POISON
        digest = self._digest(load.request, layout, row)
        saved = self._saved.get((load.rank, row.entry, digest)) if digest else None
        if saved is None:
            return PageState.UNSAVED
        return PageState.EQUAL if saved == row.digest else PageState.DIFFERS

    def _digest(self, request: str, layout: RankLayout, row: PageRow) -> str | None:
        return self._prefixes.digest(request, layout.end(row)) if layout.holds(row) else None

    # --- drawing ------------------------------------------------------------------------------

    def _map(self, request: str, ranks: dict[int, _Loaded]) -> PageMap:
        tokens = self._prompt_tokens(request)
        rows = [row for rank, loaded in sorted(ranks.items()) for row in self._rows(rank, loaded, request, tokens)]
        notes = [note for _, loaded in sorted(ranks.items()) for note in loaded.notes]
        more = [f"{len(notes) - NOTES_SHOWN:,} more pages"] if len(notes) > NOTES_SHOWN else []
        blocks = max((run.last + 1 for row in rows for run in row.runs), default=0)
        place = self._prefixes.place(request)
        return PageMap(
            self._arm.name, place.case or "?", self._prefixes.name(request), blocks, rows, [*notes[:NOTES_SHOWN], *more]
        )

    def _prompt_tokens(self, request: str) -> int:
        op = self._prefixes.place(request).op
        return next((seen.rec.prompt_tokens for seen in self._arm.started if seen.rec.op == op), 0)

    def _rows(self, rank: int, loaded: _Loaded, request: str, tokens: int) -> Iterator[GroupRow]:
        layout = self._layouts[rank]
        for group in sorted(layout.groups):
            members, engine_group = layout.members(group), layout.engine_group(group)
            if engine_group is None or not members:
                continue
            size = engine_group.tokens_per_block
            mine = {entry.entry for entry in members}
            last = max((block for entry, block in loaded.states if entry in mine), default=-1)
            blocks = max(last + 1, tokens // size if tokens // size <= MAX_SAVED_BLOCKS else 0)
            cells = []
            for block in range(blocks):
                states = [
                    loaded.states.get((entry, block))
                    or self._unloaded(rank, entry, request, (block + 1) * size, tokens)
                    for entry in mine
                ]
                worst = min(states, key=_WORST_FIRST.index)
                cells.append((worst, states.count(worst)))
            kinds = ", ".join(sorted({entry.kind.value for entry in members}))
            yield GroupRow(rank, group, kinds, size, list(_runs(cells, len(mine))))

    def _unloaded(self, rank: int, entry: int, request: str, end: int, tokens: int) -> PageState:
        if end > tokens or tokens // max(end, 1) > MAX_SAVED_BLOCKS:
            return PageState.NONE
        digest = self._prefixes.digest(request, end)
        return PageState.SAVED if digest and (rank, entry, digest) in self._saved else PageState.NONE


def _runs(cells: list[tuple[PageState, int]], of: int) -> Iterator[Run]:
    block = 0
    for (state, entries), alike in groupby(cells):
        count = len(list(alike))
        yield Run(block, block + count - 1, state, entries, of)
        block += count
