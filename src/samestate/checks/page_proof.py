"""First look at an arm's page rows: which pages certainly arrived as they were saved, block by block.

Of every set of rows (`page_sets`) only the fingerprint of what was last saved is kept. A set whose fingerprints agree
along its path is equal in every row. All others are suspects: `pages` then judges every row of theirs, and no others.
So time and memory go with the blocks that were saved, and with what is wrong, not with the page rows that are right.
"""

from __future__ import annotations

from collections.abc import Iterator

from samestate.checks.history import ArmHistory, History
from samestate.checks.layout import RankLayout, rank_layouts
from samestate.checks.page_history import Moment, Transfer
from samestate.checks.page_sets import PageSet, PageSets, regular
from samestate.checks.prefixes import Prefixes
from samestate.evidence.records import PageRow, PageSide

Side = tuple[PageSide, Moment]
SetKey = tuple[int, int | None, str | None]
"""Rank, engine group, digest of the prefix that the page ends (None: its tokens are not recorded)."""


def chains(history: History) -> dict[str, str]:
    """Candidate -> the one that began the external cache which it finds: arms that follow each other share one."""
    found: dict[str, str] = {}
    for arm in history.candidates:
        follows = history.follows(arm.name)
        found[arm.name] = found.get(follows, arm.name) if follows is not None else arm.name
    return found


def readable_ranks(arm: ArmHistory) -> set[int]:
    """Ranks whose external tier can be read."""
    return {one.rank for one in arm.pages.transfers for side, _ in one.pages if side is PageSide.STORED}


def moved_all(transfer: Transfer) -> bool:
    """Whether every completion says how much it moved; else it may have moved nothing."""
    return all(done.rec.bytes is not None for done in transfer.completions)


def failed(transfer: Transfer) -> bool:
    """Whether a completion says that it failed."""
    return any(not done.rec.ok for done in transfer.completions)


class Doubts:
    """Keys of an arm's rows: is the set that a row belongs to a suspect?"""

    def __init__(self, suspects: set[SetKey], layout: RankLayout, prefixes: Prefixes, transfer: Transfer) -> None:
        self._suspects, self._layout, self._prefixes, self._transfer = suspects, layout, prefixes, transfer
        self._keys: dict[tuple[int | None, int], SetKey] = {}

    def key(self, row: PageRow) -> SetKey:
        """What the row's set is known by."""
        entry = self._layout.entries.get(row.entry)
        at = (entry.engine_group if entry else None, row.block_index)
        key = self._keys.get(at)
        if key is None:
            end = self._layout.end(row) if entry else 0
            digest = self._prefixes.digest(self._transfer.request, end)
            key = self._keys[at] = (self._transfer.rank, at[0], digest)
        return key

    def about(self, row: PageRow) -> bool:
        """Whether the row must be judged itself."""
        return self.key(row) in self._suspects


class Proof:
    """What the first look at all candidates came to."""

    def __init__(self, history: History) -> None:
        self.chains = chains(history)
        self.suspects: dict[str, set[SetKey]] = {chain: set() for chain in self.chains.values()}
        """By chain: sets to judge row by row."""
        self.equal = 0
        """Rows on paths that agree; all there are, if nothing is in doubt."""
        self.complete = True
        """Every page that a job names has its row."""
        self._saved: dict[str, dict[SetKey, tuple[bytes, ...]]] = {chain: {} for chain in self.suspects}
        for arm in history.candidates:
            self._look(history, arm)

    @property
    def doubtful(self) -> bool:
        """Whether rows must be judged one by one."""
        return not self.complete or any(self.suspects.values())

    def _look(self, history: History, arm: ArmHistory) -> None:
        layouts, prefixes, readable = rank_layouts(arm), Prefixes(history, arm), readable_ranks(arm)
        makers = {rank: PageSets(layout) for rank, layout in layouts.items()}
        chain = self.chains[arm.name]
        suspects, saved = self.suspects[chain], self._saved[chain]
        for transfer in arm.pages.transfers:
            layout = layouts.get(transfer.rank)
            if layout is None:
                continue
            doubts = Doubts(suspects, layout, prefixes, transfer)
            sides = {at: makers[transfer.rank].of(one.rows) for at, one in transfer.pages.items()}
            self.complete &= transfer.submitted is not None and _complete(transfer, layout, sides, readable)
            if not all(regular(sets) for sets in sides.values()):
                suspects.update(doubts.key(row) for sets in sides.values() for one in sets for row in one.rows)
                continue
            follow = self._save if transfer.direction == "save" else self._load
            suspects.update(follow(transfer, sides, doubts, saved))

    def _save(
        self, save: Transfer, sides: dict[Side, list[PageSet]], doubts: Doubts, saved: dict[SetKey, tuple[bytes, ...]]
    ) -> Iterator[SetKey]:
        others = [
            _by_place(sides.get(at, [])) for at in ((PageSide.SOURCE, "completed"), (PageSide.STORED, "completed"))
        ]
        moved, lost = moved_all(save), failed(save)
        for one in sides.get((PageSide.SOURCE, "submitted"), []):
            key = doubts.key(one.rows[0])
            if key[2] is None:
                yield key
                continue
            if lost:
                continue
            if any(other.get(_place(one), one).digests != one.digests for other in others):
                yield key
            before = () if moved else saved.get(key, ())
            saved[key] = before if one.digests in before else (*before, one.digests)
            self.equal += len(one.rows)

    def _load(
        self, load: Transfer, sides: dict[Side, list[PageSet]], doubts: Doubts, saved: dict[SetKey, tuple[bytes, ...]]
    ) -> Iterator[SetKey]:
        stored = _by_place(sides.get((PageSide.STORED, "submitted"), []))
        for one in sides.get((PageSide.DESTINATION, "completed"), []):
            key, sent = doubts.key(one.rows[0]), stored.get(_place(one), one)
            if key[2] is None or sent.digests != one.digests or sent.digests not in saved.get(key, ()):
                yield key
            self.equal += len(one.rows)


def _place(one: PageSet) -> tuple[int | None, int]:
    return one.group, one.block_index


def _by_place(sets: list[PageSet]) -> dict[tuple[int | None, int], PageSet]:
    return {_place(one): one for one in sets}


def _complete(transfer: Transfer, layout: RankLayout, sides: dict[Side, list[PageSet]], readable: set[int]) -> bool:
    """Whether every page that the job's parts name has its row on every side that can be read."""
    expected = set()
    for part in transfer.parts:
        group = layout.engine_group(part.group)
        if group is not None and layout.members(part.group):
            expected |= {(group.group, index) for index in layout.blocks(part)}
    return all(
        expected <= {_place(one) for one in sides.get(at, []) if one.whole}
        for at in transfer.sides(readable=transfer.rank in readable)
    )
