"""Which family of a tier goes when room is needed.

Room is made by families (`family_graph` says what they are): pages and state of a boundary together, children before
parents, and with a family those above it that nothing restorable needs any more. So orphans appear only where a save
failed or a page was damaged, or is still on its way, and they go first.

Two policies say which family goes. ``lru``: the one used longest ago. ``value``: the one with the least expected saving
per byte (Pan et al., Marconi: Prefix Caching for the Era of Hybrid LLMs, MLSys 2025): the likelihood of reuse, which
halves with every `HALF_LIFE` uses of the index and grows with the family's own, times the computation that a hit saves
beyond the longest other prefix, over the bytes that it takes. It is kept as a logarithm: the order of two families then
does not change as time goes on.

Pure Python, no clock, not thread-safe.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count
from typing import Literal, TypeAlias

from typing_extensions import override

from samestate.cache.family_graph import FamilyGraph
from samestate.cache.family_nodes import Family, Member, Node, Score, Want

__all__ = ["Cost", "Family", "FamilyIndex", "Member", "PolicyName", "Want", "tokens"]

PolicyName: TypeAlias = Literal["lru", "value"]
Cost: TypeAlias = Callable[[int, int], float]
"""What computing tokens [start, end) costs, in any unit."""

HALF_LIFE = 1024.0
"""Uses of the index until a family's likelihood of reuse has halved."""
Entry: TypeAlias = tuple[Score, int, Node]
"""What a family is worth, a number that no other entry has, and the family."""


def tokens(start: int, end: int) -> float:
    """The plainest cost: linear layers dominate, so computation grows with tokens."""
    return float(end - start)


def _may_go(node: Node) -> bool:
    return node.children is None and not node.held and bool(node.shape.sizes)


class FamilyIndex(FamilyGraph):
    """See the module.

    Args:
        pages: Groups of which a family needs a page wherever a prefix runs through it.
        states: Groups of which only the last family of a prefix needs its page.
        policy: Which family goes first.
        cost: What a hit saves; only ``value`` asks.

    """

    def __init__(
        self, pages: Collection[int], states: Collection[int], policy: PolicyName = "lru", cost: Cost = tokens
    ) -> None:
        self._policy = policy
        self._cost = cost
        self.evicted = 0
        """Families evicted since the beginning."""
        super().__init__(pages, states)

    @override
    def _clear(self) -> None:
        super()._clear()
        self._queue: list[Entry] = []
        self._stamps = count()

    def hold(self, family: Family) -> None:
        """Do not evict this family, nor those above it. As often as this, `release` must follow."""
        self._nodes[family].held += 1

    def release(self, family: Family) -> None:
        """Take back one `hold`."""
        node = self._nodes[family]
        assert node.held > 0
        node.held -= 1
        self._prune(node)

    def want(self, family: Family, wanted: Want) -> None:
        """Say what else has a word in when this family goes; it counts until something else is said.

        What comes page by page is an orphan until the last page is there: `Want` says how it is spared until then.
        """
        node = self._nodes.get(family)
        if node is not None and node.wanted != wanted:
            node.wanted = wanted
            self._offer(node)

    def touch(self, chain: Iterable[Family], *, reused: bool = False) -> None:
        """A request went through these families; `reused`: it was spared their computation."""
        self._clock += 1
        for family in chain:
            if (node := self._nodes.get(family)) is not None:
                node.used = self._clock
                node.uses += reused
                self._offer(node)

    def evict(self, need: int, beside: Collection[Family] = ()) -> list[Member] | None:
        """Make at least `need` bytes of room: what is to be thrown away, or None and nothing changed.

        Neither `beside` nor what is above it is evicted.
        """
        kept = self._chains_of(beside)
        gone: list[tuple[Node, list[Member]]] = []
        passed: list[Entry] = []
        freed = 0
        while freed < need and (victim := self._pop(kept, passed)) is not None:
            for node in self._with_unneeded_above(victim, kept):
                gone.append((node, self._drop(node)))
                freed += sum(member.size for member in gone[-1][1])
        if freed < need:
            for node, members in reversed(gone):
                self._undrop(node, members)
        for entry in passed:
            heapq.heappush(self._queue, entry)
        if freed < need:
            return None
        for node, _ in gone:
            if node.parent is not None and node.parent.name in self._nodes:
                self._prune(node.parent)
        self.evicted += sum(bool(members) for _, members in gone)
        return [member for _, members in gone for member in members]

    def clear(self) -> None:
        """Forget everything but how much was evicted."""
        self._clear()

    def _drop(self, node: Node) -> list[Member]:
        """Take a family without children out of the index."""
        members = self.members(node.name)
        self._reshape(node, {})
        del self._nodes[node.name]
        node.stamp = -1
        if node.parent is not None:
            node.parent.disown(node)
            self._offer(node.parent)
        return members

    def _undrop(self, node: Node, members: list[Member]) -> None:
        again = self._node(node.name, node.parent.name if node.parent else None, node.end)
        for member in members:
            self.add(member.family, member.group, member.size)
        again.used, again.uses, again.wanted = node.used, node.uses, node.wanted
        self._offer(again)

    # --- the queue ------------------------------------------------------------------------------

    @override
    def _offer(self, node: Node) -> None:
        """Queue a family that may go, with what it is worth now."""
        if not _may_go(node):
            return
        score = self._score(node)
        if node.stamp >= 0 and node.queued <= score:
            return  # It is queued already. What it is worth now is asked again when it is its turn.
        node.stamp, node.queued = next(self._stamps), score
        heapq.heappush(self._queue, (score, node.stamp, node))
        if len(self._queue) > 64 and len(self._queue) > 2 * len(self._nodes):
            self._queue = [entry for entry in self._queue if entry[2].stamp == entry[1]]
            heapq.heapify(self._queue)

    def _pop(self, kept: set[Family], passed: list[Entry]) -> Node | None:
        """The family that goes next."""
        while self._queue:
            entry = heapq.heappop(self._queue)
            node = entry[2]
            if node.stamp != entry[1]:
                continue
            if not _may_go(node):
                node.stamp = -1
                continue
            if node.name in kept:
                passed.append(entry)
                continue
            if (score := self._score(node)) > entry[0]:
                node.queued = score
                heapq.heappush(self._queue, (score, node.stamp, node))
                continue
            node.stamp = -1
            return node
        return None

    def _score(self, node: Node) -> Score:
        """The lowest goes first: orphans, then what is worth least, and last what is asked for."""
        needed = self._needed(node)
        rank = max(node.wanted, int(needed))
        if not needed or self._policy == "lru":
            return (rank, 0.0, node.used)
        size, above = node.shape.size, node.parent
        while above is not None and not self._restorable(above):
            if above.needed_below == 1 and not above.held:
                size += above.shape.size
            above = above.parent
        saved = self._cost(above.end if above else 0, node.end) / max(size, 1)
        value = node.used / HALF_LIFE + math.log2(1 + node.uses) + math.log2(max(saved, 1e-12))
        return (rank, value, node.used)

    def _with_unneeded_above(self, victim: Node, kept: set[Family]) -> Iterator[Node]:
        """The victim, then those above it that nothing restorable needs once it is gone."""
        node: Node | None = victim
        while node is not None:
            above = node.parent
            yield node
            if above is None or above.children is not None or above.held or above.name in kept or self._needed(above):
                return
            node = above

    def _chains_of(self, families: Collection[Family]) -> set[Family]:
        kept = set(families)
        for family in families:
            node = self._nodes.get(family)
            while node is not None and node.parent is not None and node.parent.name not in kept:
                node = node.parent
                kept.add(node.name)
        return kept
