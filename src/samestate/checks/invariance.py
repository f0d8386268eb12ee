"""Whether an engine was seen to compute the same bytes in two kinds of steps: its floor, measured and not assumed.

Seen is what saves read from the engine's blocks. Where the same tokens were computed twice, under two cache salts or
because what was stored was saved again, once in the very steps that are in doubt and once alone in steps like the cold
run's, equal pages show that between these steps nothing rounds otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from samestate.checks.boundary import STATE
from samestate.checks.history import ArmHistory, History, Row
from samestate.checks.layout import RankLayout
from samestate.checks.prefixes import Prefixes
from samestate.checks.scenario import Generation, generations
from samestate.evidence.records import PageSide

PageKey = tuple[int, int, int]
"""Rank, entry, index in the request's block table."""


class Block(NamedTuple):
    """Tokens [start, end), of which one request computed all or a part."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


class Company:
    """Who was in a step."""

    def __init__(self, among: Sequence[Generation]) -> None:
        self._steps: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for one in among:
            for row in one.schedule or ():
                self._steps[one.arm.name, row.n].append(one.op.op)

    def beside(self, one: Generation, rows: Iterable[Row]) -> list[str]:
        """Other operations in steps of `one`."""
        names = {name for row in rows for name in self._steps.get((one.arm.name, row.n), ())}
        return sorted(names - {one.op.op})


class Invariance:
    """What the pages that the candidates saved show. Raises MissingEvidence."""

    def __init__(self, history: History) -> None:
        self._all = generations(history, history.candidates)
        self._prefixes = {arm.name: Prefixes(history, arm) for arm in history.candidates}
        self.company = Company(self._all)

    def shown(self, source: Generation, block: Block, reference: Sequence[Row], *, state: bool) -> bool:
        """Whether the steps in which `source` computed a block gave the bytes that steps like `reference` give.

        Of the source itself or of a request that was in the same steps. `state`: the state at the end of it too.
        """
        steps = covering(source.schedule or (), block)
        for one in self._all:
            mine = covering(one.schedule or (), block)
            same = one.arm.name == source.arm.name and [(row.n, *row.shape) for row in mine] == [
                (row.n, *row.shape) for row in steps
            ]
            if mine and same and any(self._equal(one, other, block, reference, state) for other in self._all):
                return True
        return False

    def _equal(self, one: Generation, other: Generation, block: Block, reference: Sequence[Row], state: bool) -> bool:
        """Whether `other` computed the same block alone, in steps like `reference`, and to the same bytes."""
        theirs = covering(other.schedule or (), block)
        if [row.shape for row in theirs] != [row.shape for row in reference] or self.company.beside(other, theirs):
            return False
        tokens = self._prefixes[one.arm.name].unsalted(one.request or "", block.end)
        if tokens is None or tokens != self._prefixes[other.arm.name].unsalted(other.request or "", block.end):
            return False
        left, right = _saved(one, block), _saved(other, block)
        common = left.keys() & right.keys()
        kinds = {one.arm.ranks[rank].rec.entries[entry].kind for rank, entry, _ in common}
        if {rank for rank, _, _ in common} != one.arm.ranks.keys() or (state and kinds.isdisjoint(STATE)):
            return False
        return all(left[key] == right[key] and len(left[key]) == 1 for key in common)


def covering(rows: Iterable[Row], block: Block) -> list[Row]:
    """Those that computed tokens of the block."""
    return [row for row in rows if row.start < block.end and row.end > block.start]


def _saved(one: Generation, block: Block) -> dict[PageKey, set[str]]:
    """Digests of the pages of a block as its saves read them."""
    found: dict[PageKey, set[str]] = {}
    for save in one.arm.pages.transfers:
        if save.direction != "save" or save.request != one.request or save.rank not in one.arm.ranks:
            continue
        layout = _layout(one.arm, save.rank)
        for row in save.rows(PageSide.SOURCE, "submitted"):
            if layout.holds(row) and block.start < layout.end(row) <= block.end:
                found.setdefault((save.rank, row.entry, row.block_index), set()).add(row.digest)
    return found


def _layout(arm: ArmHistory, rank: int) -> RankLayout:
    return RankLayout(arm.ranks[rank])
