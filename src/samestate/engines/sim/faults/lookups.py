"""Faults of the lookup: what is found, how much of it is credited, under which keys, and what counters say of it."""

from __future__ import annotations

from samestate.engines.sim.blocks import Key, Pool, Sequence
from samestate.engines.sim.conduct import Conduct, Hit
from samestate.engines.sim.state import ATTENTION, STATE_GROUPS
from samestate.engines.sim.tier import Tier
from samestate.evidence.records import EXTERNAL_HITS, EXTERNAL_QUERIES


class FullLookup(Conduct):
    """Looks up the whole prompt; the last token is subtracted only after retrieval (B = N, p = N-1)."""

    def lookup_tokens(self, tokens: int) -> int:
        return tokens


class UnalignedCredit(Conduct):
    """Credits tokens of the block after B, some of which were found."""

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit = super().search(sequence, local, tier)
        beyond = min(hit.boundary + sequence.block_size // 2, len(sequence.tokens) - 1)
        return hit._replace(credited=beyond) if hit.boundary > local else hit


class ZeroSuffix(FullLookup):
    """Credits N: the next token is sampled from what was restored."""

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit = super().search(sequence, local, tier)
        return hit._replace(credited=hit.boundary)


class BoundaryDip(Conduct):
    """The last snapshot of a prompt whose length is a multiple of C cannot be matched."""

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        if len(sequence.tokens) % sequence.block_size == 0:
            return Hit(local, local, {})
        return super().search(sequence, local, tier)


class BlockRoundUp(Conduct):
    """Counts whole blocks, the last one of the prompt too; the state that is there is put at their end."""

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit, size = super().search(sequence, local, tier), sequence.block_size
        rounded = -(-len(sequence.tokens) // size) * size
        if hit.boundary <= local or rounded == hit.boundary:
            return hit
        moved = {
            (group, rounded // size - 1 if group in STATE_GROUPS else slot): key
            for (group, slot), key in hit.pages.items()
        }
        return Hit(rounded, len(sequence.tokens) - 1, moved)


class PastSharedPrefix(Conduct):
    """Takes the state of another prompt's farther boundary, where the two share their attention pages up to here."""

    def __init__(self) -> None:
        self._seen: list[Sequence] = []

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit = super().search(sequence, local, tier)
        first, limit = local // sequence.block_size, (len(sequence.tokens) - 1) // sequence.block_size
        full = first
        while full < limit and self.external_key(sequence, ATTENTION, full) in tier:
            full += 1
        farther = self._farther(sequence, full, tier) if full > first else None
        self._seen.append(sequence)
        if farther is None:
            return hit
        found = self.hit(sequence, local, full * sequence.block_size)
        states = {(group, full - 1): self.external_key(farther[0], group, farther[1]) for group in STATE_GROUPS}
        return found._replace(pages={**found.pages, **states})

    def _farther(self, sequence: Sequence, slots: int, tier: Tier) -> tuple[Sequence, int] | None:
        """Another request that begins alike, and a later slot at which it left its states."""
        for other in self._seen:
            if other.key(ATTENTION, slots - 1) != sequence.key(ATTENTION, slots - 1):
                continue
            for slot in range(slots, other.prompt // other.block_size):
                if all(self.external_key(other, group, slot) in tier for group in STATE_GROUPS):
                    return other, slot
        return None


class JointTruncation(Conduct):
    """Cuts the hit to the blocks that attention has, state or no state."""

    def stored_tokens(self, sequence: Sequence, local: int, limit: int, tier: Tier) -> int:
        full = local // sequence.block_size
        while full < limit // sequence.block_size and self.external_key(sequence, ATTENTION, full) in tier:
            full += 1
        return full * sequence.block_size

    def hit(self, sequence: Sequence, local: int, boundary: int) -> Hit:
        hit = super().hit(sequence, local, boundary)
        return hit._replace(pages={at: key for at, key in hit.pages.items() if at[0] == ATTENTION})

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        right = Conduct().search(sequence, local, tier)
        found = super().search(sequence, local, tier)
        return right if right.boundary == found.boundary else found


class AttachChangesLookup(Conduct):
    """The local lookup asks attention alone."""

    def local_tokens(self, sequence: Sequence, pool: Pool) -> int:
        limit, full = (len(sequence.tokens) - 1) // sequence.block_size, 0
        while full < limit and pool.holds(sequence.key(ATTENTION, full)):
            full += 1
        return full * sequence.block_size


class StoredNeverServed(Conduct):
    """Never finds anything."""

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        return Hit(local, local, {})


class ThirdSighting(Conduct):
    """Finds a prompt from its third request on."""

    def __init__(self) -> None:
        self._sightings: dict[bytes, int] = {}

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit = super().search(sequence, local, tier)
        last = sequence.hashed(max(hit.boundary // sequence.block_size - 1, 0), sequence.salt)
        seen = self._sightings[last] = self._sightings.get(last, 0) + 1
        return hit if seen > 1 else Hit(local, local, {})


class SyncLoad(Conduct):
    """Loads within the step, after its state was read."""

    def within_step(self) -> bool:
        return True


class DraftsInFirstBatch(Conduct):
    """The first step after a load holds a draft."""

    def first_drafts(self, sequence: Sequence) -> int:
        return 1


# --- keys -----------------------------------------------------------------------------------------


class SaltIgnored(Conduct):
    """The key has no salt in it."""

    def external_key(self, sequence: Sequence, group: int, slot: int) -> Key:
        return group, sequence.hashed(slot, "")


class ShortHash(Conduct):
    """Of the hash nothing is left but the block's number: prompts of the same length meet."""

    def external_key(self, sequence: Sequence, group: int, slot: int) -> Key:
        return group, slot.to_bytes(4)


# --- metrics --------------------------------------------------------------------------------------


class HitsSilent(Conduct):
    def counts(self, counter: str, amount: int) -> int:
        return 0 if counter == EXTERNAL_HITS else amount


class HitsOvercounted(Conduct):
    def counts(self, counter: str, amount: int) -> int:
        return 2 * amount if counter == EXTERNAL_HITS else amount


class QueriesDoubled(Conduct):
    def counts(self, counter: str, amount: int) -> int:
        return 2 * amount if counter == EXTERNAL_QUERIES else amount
