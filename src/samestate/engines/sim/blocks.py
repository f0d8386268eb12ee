"""Requests in flight, their block tables and prefix hashes, and the pool that the blocks come from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import NamedTuple

from samestate.engines.base import EngineError, Generation
from samestate.engines.sim.state import ATTENTION, NULL_BLOCK, STATE_GROUPS
from samestate.evidence.canonical import sha256_hex

Key = tuple[int, bytes]
"""Group and hash of the whole token prefix that a block ends."""
OUT_OF_BLOCKS = "out of cache blocks: raise num_gpu_blocks_override or shorten the prompt"


class Place(NamedTuple):
    """One page of a job: where it is in the request's table, and which block that is."""

    group: int
    slot: int
    block: int


def chunk_end(start: int, prompt_tokens: int, block: int, limit: int, *, drops_last: bool = False) -> int:
    """Where vLLM ends the prefill chunk that begins at `start` (``_mamba_block_aligned_split``).

    At most `limit` tokens; never past the last multiple of `block` at or below
    ``prompt_tokens - 1`` without a stop there; with `drops_last` (EAGLE, MTP) that is one below the last multiple
    at or below `prompt_tokens`. Without shared-prefix stops.
    """
    end = min(prompt_tokens, start + limit)
    if end < prompt_tokens:
        aligned = end // block * block
        if aligned > start or block <= limit:
            end = aligned
    stops = [(prompt_tokens // block - 1) * block if drops_last else (prompt_tokens - 1) // block * block]
    if start % block:
        stops.append((start // block + 1) * block)
    return min((stop for stop in stops if start < stop < end), default=end)


class Pool:
    """Block ids, reused in the order in which they became free; a cached block stays until then."""

    def __init__(self, blocks: int) -> None:
        self._free: dict[int, None] = dict.fromkeys(range(NULL_BLOCK + 1, blocks))
        self._users: dict[int, int] = {}
        self._by_key: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Raises EngineError when none is left."""
        if not self._free:
            raise EngineError(OUT_OF_BLOCKS)
        block = next(iter(self._free))
        del self._free[block]
        self._users[block] = 1
        if key := self._key_of.pop(block, None):
            del self._by_key[key]
        return block

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def file(self, key: Key, block: int) -> None:
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def holds(self, key: Key) -> bool:
        return key in self._by_key

    def hit(self, key: Key) -> int:
        """The cached block of `key`, shared from now on."""
        block = self._by_key[key]
        if block in self._free:
            del self._free[block]
            self._users[block] = 0
        self._users[block] += 1
        return block

    def forget(self) -> None:
        self._by_key.clear()
        self._key_of.clear()


class Sequence:
    """A request in flight: tokens, prefix hashes of its full blocks, block tables of all groups."""

    def __init__(
        self,
        request: str,
        tokens: list[int],
        output_tokens: int,
        block_size: int,
        salt: str | None,
        *,
        drops_last: bool = False,
    ) -> None:
        self.request = request
        self._drops_last = drops_last
        self.salt = sha256_hex(salt.encode()) if salt else ""
        self.tokens = tokens
        self.prompt = len(tokens)
        self.output_tokens = output_tokens
        self.block_size = block_size
        self.computed = 0
        self.cached: int | None = None
        """p of the first admission."""
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self.tables: tuple[list[int], ...] = ([], [], [])
        self._hashes: dict[str, list[bytes]] = {}

    @property
    def attention(self) -> list[int]:
        return self.tables[ATTENTION]

    def key(self, group: int, slot: int) -> Key:
        return group, self.hashed(slot, self.salt)

    def hashed(self, slot: int, salt: str) -> bytes:
        """Hash of all tokens up to the end of block `slot`, under `salt`."""
        hashes = self._hashes.setdefault(salt, [])
        while len(hashes) <= slot:
            first = len(hashes) * self.block_size
            block = array("H", self.tokens[first : first + self.block_size]).tobytes()
            before = hashes[-1] if hashes else salt.encode()
            hashes.append(blake2b(before + block, digest_size=16).digest())
        return hashes[slot]

    def longest(self, first: int, limit: int, held: Callable[[int, int], bool]) -> int:
        """Tokens of the longest whole-block prefix within `limit` whose pages from slot `first` on
        and whose states are `held`, by group and slot; 0 if none. Not the last whole block, where that is dropped."""
        if self._drops_last:
            limit = min(limit, (len(self.tokens) // self.block_size - 1) * self.block_size)
        full = first
        while full < limit // self.block_size and held(ATTENTION, full):
            full += 1
        slots = (slot for slot in range(full, first, -1) if all(held(group, slot - 1) for group in STATE_GROUPS))
        return next(slots, 0) * self.block_size

    def needs(self, end: int) -> int:
        """Blocks to take for the tokens before `end`."""
        slots = -(-end // self.block_size)
        states = (self.tables[group][slots - 1 : slots] for group in STATE_GROUPS)
        return max(slots - len(self.attention), 0) + sum(state in ([], [NULL_BLOCK]) for state in states)

    def grow(self, end: int, take: Callable[[], int]) -> None:
        """Blocks for the tokens before `end`; of the state tables only the slot that `end` falls in."""
        slots = -(-end // self.block_size)
        while len(self.attention) < slots:
            self.attention.append(take())
        for group in STATE_GROUPS:
            table = self.tables[group]
            table.extend([NULL_BLOCK] * (slots - len(table)))
            if table[slots - 1] == NULL_BLOCK:
                table[slots - 1] = take()

    def place(self, group: int, slot: int) -> Place:
        return Place(group, slot, self.tables[group][slot])

    def state_blocks(self, tokens: int) -> dict[int, int]:
        """By state group, the block that holds or will hold the state after `tokens`."""
        slot = max(tokens - 1, 0) // self.block_size
        return {group: self.tables[group][slot] for group in STATE_GROUPS}

    def give_up(self) -> list[int]:
        """All its blocks, which it has no more; nothing of it is computed then."""
        blocks = [block for table in self.tables for block in table]
        self.tables, self.computed = ([], [], []), 0
        return blocks

    def take_token(self, token: int, logprob: float, eos: int, ignore_eos: bool) -> None:
        """An output token; it may be the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token == eos and not ignore_eos:
            self.finish = "stop"
        elif len(self.logprobs) == self.output_tokens:
            self.finish = "length"

    def answer(self) -> Generation:
        # The simulated runner-up is known from the choice alone, as the choice is from the state.
        margins = [1 + chosen for chosen in self.logprobs]
        ids = self.tokens[self.prompt :]
        return Generation(self.request, ids, self.logprobs, self.finish, self.cached, margins=margins)
