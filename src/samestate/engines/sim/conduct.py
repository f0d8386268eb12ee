"""How connector, workers and cache manager behave. This conduct is right; a fault is a subclass with other methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from samestate.engines.sim.blocks import Key, Place, Pool, Sequence
from samestate.engines.sim.state import ATTENTION, STATE_GROUPS
from samestate.engines.sim.tier import Shelf, Tier, Victim, oldest
from samestate.evidence.records import TransferGroup

Slot = tuple[int, int]
"""Group, and index in the request's block table."""


class Hit(NamedTuple):
    """What an external lookup found."""

    boundary: int
    """B, as the connector will describe it; not above the local tokens: nothing is to be loaded."""
    credited: int
    """p."""
    pages: Mapping[Slot, Key]
    """What is loaded where, and which key it is stored under."""


class Landing(NamedTuple):
    """Bytes that a load writes into one rank's memory."""

    block: int
    offset: int
    page: bytes


class Conduct:
    """The hooks, in the order in which a request meets them."""

    acts_on: ClassVar[Mapping[str, int]] = {}
    """Of a fault: the rank or the group that it acts on, where that is one. For whoever judges findings, never for
    checks."""

    # --- lookup ---------------------------------------------------------------------------------

    def local_tokens(self, sequence: Sequence, pool: Pool) -> int:
        """Tokens of the longest local prefix that leaves the last token to compute."""
        return sequence.longest(0, len(sequence.tokens) - 1, lambda group, slot: pool.holds(sequence.key(group, slot)))

    def lookup_tokens(self, tokens: int) -> int:
        """Of a request's `tokens`, how many the external lookup may cover: never the last one."""
        return tokens - 1

    def external_key(self, sequence: Sequence, group: int, slot: int) -> Key:
        """The key of a page in the external tier."""
        return sequence.key(group, slot)

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        """The longest prefix in the tier."""
        limit = self.lookup_tokens(len(sequence.tokens))
        return self.hit(sequence, local, self.stored_tokens(sequence, local, limit, tier))

    def stored_tokens(self, sequence: Sequence, local: int, limit: int, tier: Tier) -> int:
        """Tokens within `limit` for which, with the `local` ones, every group has its pages."""
        return sequence.longest(
            local // sequence.block_size, limit, lambda group, slot: self.external_key(sequence, group, slot) in tier
        )

    def hit(self, sequence: Sequence, local: int, boundary: int) -> Hit:
        """A hit of [local, boundary), with all its pages."""
        first, slots = local // sequence.block_size, boundary // sequence.block_size
        wanted: list[Slot] = [(ATTENTION, slot) for slot in range(first, slots)]
        wanted += [(group, slots - 1) for group in STATE_GROUPS] if slots else []
        pages = {at: self.external_key(sequence, *at) for at in wanted}
        # vLLM subtracts one after a load of the whole prompt, with no thought of recurrent state.
        return Hit(boundary, min(boundary, len(sequence.tokens) - 1), pages)

    # --- loads ----------------------------------------------------------------------------------

    def loads_on(self, rank: int) -> bool:
        """Whether a rank takes part in loads."""
        return True

    def load_succeeds(self, request: str) -> bool:
        """Whether the copy of a load works."""
        return True

    def credited_after_failure(self, hit: Hit, local: int) -> int:
        """p of a request whose load failed: it computes again what did not arrive."""
        return local

    def fetch(self, rank: int, place: Place, key: Key, tier: Tier) -> bytes | None:
        """What the tier gives for a key; None: nothing."""
        return tier.get(key, rank)

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        """What a load puts in place for `page`; None puts nothing and reports success."""
        return page

    def lands(self, rank: int, place: Place, page: bytes) -> list[Landing]:
        """Where the bytes of a page go."""
        return [Landing(place.block, 0, page)]

    def late(self, rank: int) -> bool:
        """Whether the bytes arrive only after the load was reported as done, and its step has run."""
        return False

    def within_step(self) -> bool:
        """Whether a load runs within the step that uses it, after that step read the state."""
        return False

    # --- computation ----------------------------------------------------------------------------

    def chunk_start(self, sequence: Sequence, start: int) -> int:
        """The first token of the chunk that goes on from `start`."""
        return start

    def source_state(self, sequence: Sequence, start: int, tokens: int, fresh: bytes, page: bytes) -> bytes:
        """The state page from which a chunk of `tokens` tokens goes on; `fresh` is that of no tokens."""
        return page

    def fed(self, sequence: Sequence, place_in_batch: int, tokens: list[int]) -> list[int]:
        """The tokens of a chunk that the recurrence is given."""
        return tokens

    def first_drafts(self, sequence: Sequence) -> int:
        """Draft tokens in a request's first step after a load."""
        return 0

    def kept_drafts(self, request: str, accepted: int, drafted: int) -> int:
        """After how many of a step's accepted drafts the state is kept."""
        return accepted

    # --- saves ----------------------------------------------------------------------------------

    def saves(self, sequence: Sequence, complete: list[Place], start: int, end: int) -> dict[Place, Key]:
        """What is saved after a step over [start, end), which completed the pages `complete`."""
        return {place: self.external_key(sequence, place.group, place.slot) for place in complete}

    def saves_at_end(self, sequence: Sequence) -> dict[Place, Key]:
        """What is saved when a request is over."""
        return {}

    def skips(self, key: Key, tier: Tier) -> bool:
        """Whether a page is not saved, since its key is there."""
        return key in tier

    def due(self, due_ns: int) -> int:
        """When a save whose completion is held back until `due_ns` is reported as done."""
        return due_ns

    def waits_for_saves(self, block: int) -> bool:
        """Whether a block's new owner waits for the save that still reads it."""
        return True

    def save_succeeds(self, job: int) -> bool:
        """Whether a put works."""
        return True

    def stored(self, rank: int, place: Place, key: Key, page: bytes) -> bytes:
        """What the tier keeps of a page."""
        return page

    def publishes_failed(self) -> bool:
        """Whether the keys of a put that failed are found afterwards."""
        return False

    def preempted(self, blocks: list[int]) -> None:
        """These blocks were taken from a request that still wants them."""

    # --- the rest -------------------------------------------------------------------------------

    def registers(self, groups: list[TransferGroup]) -> list[TransferGroup]:
        """What a rank registers of its transfer groups."""
        return groups

    def victim(self) -> Victim:
        """Which key goes when the tier is full."""
        return oldest

    def begins_with(self, shelf: Shelf, arm: str, capacity: int) -> Tier:
        """The tier that an engine finds when it starts."""
        return shelf.tier(arm, capacity)

    def forgets(self) -> bool:
        """Whether a reset of the local cache resets it."""
        return True

    def counts(self, counter: str, amount: int) -> int:
        """By how much a counter grows."""
        return amount
