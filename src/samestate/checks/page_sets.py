"""Page rows of one side of a job, by block: what checks compare as one thing as long as nothing is wrong with it.

A job moves whole blocks, so its rows are sets with one row for every entry of an engine group, mostly one set after
the other. A whole set has a fingerprint, and one comparison then stands for all its rows. Whatever is not so regular,
and whatever does not agree, is judged row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

from samestate.checks.layout import RankLayout
from samestate.evidence.records import Entry, PageRow


class PageSet(NamedTuple):
    """Rows of one block of one engine group."""

    group: int | None
    """Engine group; None: of an entry that was never registered."""
    block_index: int
    block: int
    rows: list[PageRow]
    whole: bool
    """One row of each of the group's entries, all of one registered block. Else it is a single row."""
    digests: bytes
    """Fingerprint of the rows' entries and digests, in order: equal only for the same. Empty unless whole."""


class PageSets:
    """Puts the rows of one rank into sets. `wanted` says which entries count; rows of others are left out."""

    def __init__(self, layout: RankLayout, wanted: Callable[[Entry], bool] = lambda entry: True) -> None:
        self._blocks = layout.seen.rec.num_blocks
        self._wanted = {index: entry.engine_group for index, entry in layout.entries.items() if wanted(entry)}
        self._other = layout.entries.keys() - self._wanted.keys()
        self._members: dict[int, list[int]] = {}
        for index, group in self._wanted.items():
            self._members.setdefault(group, []).append(index)
        for members in self._members.values():
            members.sort()
        self._last: tuple[Sequence[PageRow], list[PageSet]] | None = None

    def of(self, rows: Sequence[PageRow]) -> list[PageSet]:
        """The sets of `rows`, in the order of their first rows. The same list of rows gives the same sets."""
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, self._sets(rows))
        return self._last[1]

    def _sets(self, rows: Sequence[PageRow]) -> list[PageSet]:
        if self._other:
            rows = [row for row in rows if row.entry not in self._other]
        sets: list[PageSet] = []
        at = 0
        while at < len(rows):
            members = self._members.get(self._wanted.get(rows[at].entry, -1), [])
            one = self._whole(rows[at : at + len(members)])
            if one is None:
                return self._scattered(rows)
            sets.append(one)
            at += len(members)
        return sets

    def _whole(self, rows: Sequence[PageRow]) -> PageSet | None:
        """The rows as one whole set; None when they are none."""
        if not rows:
            return None
        first = rows[0]
        group = self._wanted.get(first.entry)
        entries = [one.entry for one in rows]
        if (
            group is None
            or first.block >= self._blocks
            or sorted(entries) != self._members[group]
            or {(one.block_index, one.block) for one in rows} != {(first.block_index, first.block)}
        ):
            return None
        text = "\n".join([one.digest for one in rows])
        digests = sha256(f"{entries} {text}".encode()).digest()
        return PageSet(group, first.block_index, first.block, list(rows), True, digests)

    def _scattered(self, rows: Sequence[PageRow]) -> list[PageSet]:
        """Sets of rows that do not come block by block."""
        found: dict[tuple[int | None, int], list[PageRow]] = {}
        for row in rows:
            found.setdefault((self._wanted.get(row.entry), row.block_index), []).append(row)
        sets: list[PageSet] = []
        for (group, _), of_block in found.items():
            one = self._whole(of_block)
            alone = (PageSet(group, row.block_index, row.block, [row], False, b"") for row in of_block)
            sets.extend([one] if one else alone)
        return sets


def regular(sets: Sequence[PageSet]) -> bool:
    """Whether every set is whole and no block of a group comes twice."""
    return all(one.whole for one in sets) and len({(one.group, one.block_index) for one in sets}) == len(sets)
