"""The external tier, and the shelf on which tiers outlive their engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from samestate.engines.sim.blocks import Key

Victim = Callable[[Iterable[Key]], Key]


def oldest(keys: Iterable[Key]) -> Key:
    """The key that was used longest ago."""
    return next(iter(keys))


class Tier:
    """One page per rank under each key, least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Bytes over all ranks."""
        self._used = 0
        self._pages: OrderedDict[Key, list[bytes]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def stored(self) -> list[Key]:
        """All keys, the one used longest ago first."""
        return list(self._pages)

    def pages(self, key: Key) -> list[bytes]:
        """A key's pages by rank; this is no use of it."""
        return self._pages[key]

    def put(self, key: Key, pages: list[bytes], victim: Victim = oldest) -> None:
        """Store the pages of all ranks; what is there under the key is replaced."""
        self.drop(key)
        self._pages[key] = pages
        self._used += sum(map(len, pages))
        while self._used > self.capacity:
            self.drop(victim(self._pages))

    def drop(self, key: Key) -> None:
        """Forget a key, if it is there."""
        self._used -= sum(map(len, self._pages.pop(key, [])))

    def get(self, key: Key, rank: int) -> bytes:
        """Raises KeyError for what is not there."""
        self._pages.move_to_end(key)
        return self._pages[key][rank]


class Shelf:
    """Tiers by arm, for engines that find what an earlier one stored."""

    def __init__(self, follows: Mapping[str, str | None]) -> None:
        """`follows`: arm -> the arm whose tier it finds, in a new engine; None: an empty one."""
        self._follows = dict(follows)
        self._tiers: dict[str, Tier] = {}

    def tier(self, arm: str, capacity: int) -> Tier:
        """The tier with which an arm begins."""
        before = self._follows.get(arm)
        return self.keep(arm, self._tiers[before] if before in self._tiers else Tier(capacity))

    def last(self) -> Tier | None:
        """The tier that was put here last."""
        return next(reversed(self._tiers.values()), None)

    def keep(self, arm: str, tier: Tier) -> Tier:
        self._tiers[arm] = tier
        return tier
