"""Faults of saves and of the tier: what is stored, under which key, when, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from samestate.engines.sim.blocks import Key, Place, Sequence
from samestate.engines.sim.conduct import Conduct
from samestate.engines.sim.state import ATTENTION, NULL_BLOCK, RECURRENT, SECOND, STATE_GROUPS
from samestate.engines.sim.tier import Shelf, Tier, Victim


class NullBlockSaved(Conduct):
    acts_on: ClassVar = {"group": RECURRENT}

    def saves(self, sequence: Sequence, complete: list[Place], start: int, end: int) -> dict[Place, Key]:
        wanted = super().saves(sequence, complete, start, end)
        return {
            place._replace(block=NULL_BLOCK) if place.group == RECURRENT else place: key
            for place, key in wanted.items()
        }


class ScratchSaved(Conduct):
    """Where no step ended on a boundary, the block that runs is saved for it."""

    def saves(self, sequence: Sequence, complete: list[Place], start: int, end: int) -> dict[Place, Key]:
        wanted = super().saves(sequence, complete, start, end)
        last = end // sequence.block_size - 1
        if end % sequence.block_size and end == sequence.prompt and last >= 0:
            scratch = sequence.state_blocks(end)
            missing = range(max(last - 1, 0), last + 1)
            wanted |= {
                Place(group, slot, block): self.external_key(sequence, group, slot)
                for slot in missing
                if sequence.tables[RECURRENT][slot] == NULL_BLOCK
                for group, block in scratch.items()
            }
        return wanted


class TrimmedKey(Conduct):
    """The state is saved when the request is over, under the last boundary of its prompt."""

    def saves(self, sequence: Sequence, complete: list[Place], start: int, end: int) -> dict[Place, Key]:
        wanted = super().saves(sequence, complete, start, end)
        return {place: key for place, key in wanted.items() if place.group == ATTENTION}

    def saves_at_end(self, sequence: Sequence) -> dict[Place, Key]:
        last = (sequence.prompt - 1) // sequence.block_size - 1
        if last < 0:
            return {}
        blocks = sequence.state_blocks(sequence.computed)
        return {Place(group, last, block): self.external_key(sequence, group, last) for group, block in blocks.items()}


class OverwrittenBeforeRead(Conduct):
    """New owners of a block do not wait for the save that still reads it."""

    def waits_for_saves(self, block: int) -> bool:
        return False


class PreemptedStale(Conduct):
    """The same, for blocks that a preempted request had to give up."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def preempted(self, blocks: list[int]) -> None:
        self._blocks.update(blocks)

    def waits_for_saves(self, block: int) -> bool:
        return block not in self._blocks


class EarlyComplete(Conduct):
    def due(self, due_ns: int) -> int:
        return 0


class UnsavedGroup(Conduct):
    """What is stored of one group is nothing."""

    acts_on: ClassVar = {"group": SECOND}

    def stored(self, rank: int, place: Place, key: Key, page: bytes) -> bytes:
        return bytes(len(page)) if place.group == SECOND else page


class FailedPutVisible(Conduct):
    def save_succeeds(self, job: int) -> bool:
        return False

    def publishes_failed(self) -> bool:
        return True


class DuplicateKeepsDamage(Conduct):
    """A state is damaged when it is stored first; what is saved again is dropped, and reported as done."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, Key], bytes] = {}

    def skips(self, key: Key, tier: Tier) -> bool:
        return False

    def stored(self, rank: int, place: Place, key: Key, page: bytes) -> bytes:
        if place.group == ATTENTION:
            return page
        return self._kept.setdefault((rank, key), bytes([page[0] ^ 1]) + page[1:])


# --- tiers and eviction -----------------------------------------------------------------------------


class RestartCorrupt(Conduct):
    """What an earlier engine stored comes back with other bytes."""

    def begins_with(self, shelf: Shelf, arm: str, capacity: int) -> Tier:
        tier = super().begins_with(shelf, arm, capacity)
        for key in tier.stored():
            if key[0] in STATE_GROUPS:
                tier.put(key, [page[-1:] + page[:-1] for page in tier.pages(key)])
        return tier


class ResetKeepsExternal(Conduct):
    """What should begin empty finds the tier of before."""

    def begins_with(self, shelf: Shelf, arm: str, capacity: int) -> Tier:
        last = shelf.last()
        return shelf.keep(arm, last) if last is not None else super().begins_with(shelf, arm, capacity)


class ResetKeepsLocal(Conduct):
    def forgets(self) -> bool:
        return False


class FragmentEviction(Conduct):
    """Every second page goes first, whosever it is."""

    def victim(self) -> Victim:
        def second(keys: Iterable[Key]) -> Key:
            known = list(keys)
            return known[-2] if len(known) > 1 else known[0]

        return second


class OrphanAttention(Conduct):
    """There is room for one state of each group, however much for attention."""

    def __init__(self) -> None:
        self._states: dict[int, Key] = {}

    def saves(self, sequence: Sequence, complete: list[Place], start: int, end: int) -> dict[Place, Key]:
        wanted = super().saves(sequence, complete, start, end)
        self._states |= {place.group: key for place, key in wanted.items() if place.group in STATE_GROUPS}
        return wanted

    def stored_tokens(self, sequence: Sequence, local: int, limit: int, tier: Tier) -> int:
        for key in [key for key in tier.stored() if key[0] in STATE_GROUPS and self._states.get(key[0]) != key]:
            tier.drop(key)
        return super().stored_tokens(sequence, local, limit, tier)
