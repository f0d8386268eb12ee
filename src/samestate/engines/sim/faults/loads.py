"""Faults of loads: which bytes arrive, where, on which rank, and when."""

from __future__ import annotations

from typing import ClassVar

from samestate.engines.sim.blocks import Key, Place, Sequence
from samestate.engines.sim.conduct import Conduct, Hit, Landing
from samestate.engines.sim.state import ATTENTION, CONV_BYTES, NULL_BLOCK, RECURRENT, SECOND, STATE_GROUPS
from samestate.engines.sim.tier import Tier
from samestate.evidence.records import TransferGroup


class _Others(Conduct):
    """Knows which keys were saved, in order."""

    def __init__(self) -> None:
        self.saved: list[Key] = []

    def stored(self, rank: int, place: Place, key: Key, page: bytes) -> bytes:
        if rank == 0:
            self.saved.append(key)
        return page

    def other(self, key: Key, tier: Tier) -> Key | None:
        """The last key of the same group that is another, and still there."""
        return next((one for one in reversed(self.saved) if one[0] == key[0] and one != key and one in tier), None)


class StalePage(_Others):
    """One group's state is the one that was saved last for other tokens."""

    acts_on: ClassVar = {"group": RECURRENT}

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        other = self.other(key, tier) if place.group == RECURRENT else None
        return tier.pages(other)[rank] if other else super().fetch(rank, place, key, tier)


class ReadDuringEviction(_Others):
    """The slot that a state is read from changes hands while it is read."""

    other_page: bytes | None = None

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        other = self.other(key, tier)
        self.other_page = tier.pages(other)[rank] if other else None
        return super().fetch(rank, place, key, tier)

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return self.other_page if group in STATE_GROUPS and self.other_page else page


class SecondReload(_Others):
    """The first load of a state leaves its slot to another's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[tuple[int, Key]] = set()

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        again = (rank, key) in self._taken
        self._taken.add((rank, key))
        other = self.other(key, tier) if again and place.group in STATE_GROUPS else None
        return tier.pages(other)[rank] if other else super().fetch(rank, place, key, tier)


class CrossedRequests(Conduct):
    """Requests that load in one step are given each other's states."""

    def __init__(self) -> None:
        self._waiting: dict[Key, Key] = {}
        self._last: list[Key] = []

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit = super().search(sequence, local, tier)
        states = [key for (group, _), key in hit.pages.items() if group in STATE_GROUPS]
        if states and self._last and not set(states) & set(self._last):
            self._waiting.update(zip(states, self._last, strict=True))
            self._waiting.update(zip(self._last, states, strict=True))
            states = []
        self._last = states
        return hit

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        self._last = []
        other = self._waiting.pop(key, key) if rank == 0 else self._waiting.get(key, key)
        return super().fetch(rank, place, other, tier)


class ZeroPage(Conduct):
    acts_on: ClassVar = {"group": RECURRENT}

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return bytes(len(page)) if group == RECURRENT else page


class MissingGroup(Conduct):
    """One recurrent group is in no load."""

    acts_on: ClassVar = {"group": SECOND}
    left_out: tuple[int, ...] = (SECOND,)

    def hit(self, sequence: Sequence, local: int, boundary: int) -> Hit:
        hit = super().hit(sequence, local, boundary)
        return hit._replace(pages={at: key for at, key in hit.pages.items() if at[0] not in self.left_out})


class AttentionOnly(MissingGroup):
    acts_on: ClassVar = {}
    left_out = STATE_GROUPS


class MissingEntry(Conduct):
    """The convolution's window of one layer is not copied."""

    acts_on: ClassVar = {"group": RECURRENT}

    def lands(self, rank: int, place: Place, page: bytes) -> list[Landing]:
        skipped = CONV_BYTES if place.group == RECURRENT else 0
        return [Landing(place.block, skipped, page[skipped:])]


class EarlyLoadComplete(Conduct):
    def late(self, rank: int) -> bool:
        return True


class SwallowedLoadFailure(Conduct):
    """The load fails, and p stays what was hoped for."""

    def load_succeeds(self, request: str) -> bool:
        return False

    def credited_after_failure(self, hit: Hit, local: int) -> int:
        return hit.credited


class SilentRecompute(Conduct):
    def load_succeeds(self, request: str) -> bool:
        return False


# --- layout ---------------------------------------------------------------------------------------


class SwappedLayers(Conduct):
    """The states of the two recurrent layers change places."""

    def __init__(self) -> None:
        self._other: dict[tuple[int, int], bytes] = {}

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        swapped = {RECURRENT: SECOND, SECOND: RECURRENT}.get(place.group)
        if swapped is not None:
            self._other[rank, place.group] = tier.pages((swapped, key[1]))[rank]
        return super().fetch(rank, place, key, tier)

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return self._other.get((rank, group), page)


class HalvesSwapped(Conduct):
    acts_on: ClassVar = {"group": ATTENTION}

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        half = len(page) // 2
        return page[half:] + page[:half] if group == ATTENTION else page


class ShortCopy(Conduct):
    acts_on: ClassVar = {"group": RECURRENT}

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return page[: len(page) // 2] if group == RECURRENT else page


class NeighbourWrite(Conduct):
    """A state is also written to the block after its own."""

    def lands(self, rank: int, place: Place, page: bytes) -> list[Landing]:
        landings = super().lands(rank, place, page)
        return [*landings, Landing(place.block + 1, 0, page)] if place.group == SECOND else landings


class WideColumn(Conduct):
    """The column of a state is counted in attention pages, which are wider: the null block's comes out."""

    def lands(self, rank: int, place: Place, page: bytes) -> list[Landing]:
        return [Landing(NULL_BLOCK if place.group in STATE_GROUPS else place.block, 0, page)]


class FirstShapeOnly(SilentRecompute):
    """All groups are registered with the first one's bytes, and loads fail."""

    def registers(self, groups: list[TransferGroup]) -> list[TransferGroup]:
        first = groups[0].bytes_per_block
        return [
            TransferGroup(
                group=one.group,
                engine_group=one.engine_group,
                entries=one.entries,
                bytes_per_block=first,
                tokens_per_block=one.tokens_per_block,
            )
            for one in groups
        ]


# --- ranks ----------------------------------------------------------------------------------------


class RankZeroShard(Conduct):
    """State is taken for what all ranks share, and kept once."""

    acts_on: ClassVar = {"rank": 1}

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        return tier.get(key, 0 if place.group in STATE_GROUPS else rank)


class SilentRank(Conduct):
    acts_on: ClassVar = {"rank": 1}

    def loads_on(self, rank: int) -> bool:
        return rank != 1


class RankNamesDiffer(Conduct):
    """Rank 1 asks for names that nobody wrote."""

    acts_on: ClassVar = {"rank": 1}

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        return None if rank == 1 else super().fetch(rank, place, key, tier)
