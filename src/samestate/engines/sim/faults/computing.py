"""Faults of the computation that goes on from a state. Transfers are right: only tokens, or steps, show them."""

from __future__ import annotations

from samestate.engines.sim.blocks import Sequence
from samestate.engines.sim.conduct import Conduct, Hit
from samestate.engines.sim.tier import Tier


class _AfterHits(Conduct):
    """Knows which requests were credited external tokens, and how many."""

    def __init__(self) -> None:
        self.credited: dict[str, int] = {}

    def search(self, sequence: Sequence, local: int, tier: Tier) -> Hit:
        hit = super().search(sequence, local, tier)
        if hit.boundary > local:
            self.credited[sequence.request] = hit.credited
        return hit


class LastTokenTail(_AfterHits):
    """A hit that leaves one token drops it."""

    def source_state(self, sequence: Sequence, start: int, tokens: int, fresh: bytes, page: bytes) -> bytes:
        tail = tokens == 1 and self.credited.get(sequence.request) == start
        return bytes([page[0] ^ 1]) + page[1:] if tail else page


class FreshState(_AfterHits):
    """After a hit the recurrence begins anew."""

    def source_state(self, sequence: Sequence, start: int, tokens: int, fresh: bytes, page: bytes) -> bytes:
        return fresh if self.credited.get(sequence.request) == start else page


class FedTwice(Conduct):
    """A chunk takes up the last two tokens of the one before."""

    def chunk_start(self, sequence: Sequence, start: int) -> int:
        return max(start - 2, 0)


class WrongGrid(Conduct):
    """Requests after the first in a batch leave their chunk's last tokens out of the state."""

    def fed(self, sequence: Sequence, place_in_batch: int, tokens: list[int]) -> list[int]:
        return tokens[:-2] if place_in_batch and len(tokens) > 2 else tokens


class AcceptedRowsPermuted(Conduct):
    """The state is kept after as many drafts as were accepted in the step before, whosever it was."""

    def __init__(self) -> None:
        self._before = 0

    def kept_drafts(self, request: str, accepted: int, drafted: int) -> int:
        kept, self._before = self._before, accepted
        return kept
