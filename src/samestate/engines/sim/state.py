"""The simulated model: its settings, its ranks' memory, and what it computes there."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from samestate.engines.base import EngineError, EngineSpec
from samestate.evidence.records import EntryKind, Scalar

VOCABULARY = 4096
"""Large, so that a few output tokens are hardly ever the same: `non-vacuity` counts distinct ones."""
EOS = 2
FIRST_TEXT = 3
"""Ids below are special and never sampled; byte b of a text is token ``FIRST_TEXT + b``."""

ATTENTION, RECURRENT, SECOND = 0, 1, 2
"""Engine groups; the transfer groups have the same numbers."""
STATE_GROUPS = (RECURRENT, SECOND)
NULL_BLOCK = 0
SLOT_BYTES = 2
WINDOW = 4
"""Tokens that the convolution looks back."""
CONV_BYTES = WINDOW * SLOT_BYTES
STATE_BYTES = 8
STATE_PAGE = CONV_BYTES + STATE_BYTES
"""Of a state page: the convolution's window, then the recurrence's state."""
PRIME = 2**61 - 1
PREFILL = 64
"""From so many tokens on it takes less time to remember a result than to have it again."""


class Part(NamedTuple):
    """One entry: a state tensor of one layer within the page of its group."""

    group: int
    layer: str
    kind: EntryKind
    offset: int
    """Bytes from the page's beginning."""
    size: int


class Settings(NamedTuple):
    """The settings that the simulation knows, by vLLM's names."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    tensor_parallel_size: int
    num_gpu_blocks: int
    """Block 0, the null block, included."""
    num_speculative_tokens: int
    eagle_block_drop: int
    """1: as with drafts of EAGLE or MTP, a hit gives up its last whole block."""

    @classmethod
    def of(cls, spec: EngineSpec) -> Settings:
        """Read `spec`; serve arguments win. Raises EngineError for a value that is no count."""
        given: dict[str, Scalar] = dict(spec.settings)
        words = " ".join(spec.serve_args).replace("=", " ").split()
        given.update(
            (flag.removeprefix("--").replace("-", "_"), int(value))
            for flag, value in pairwise(words)
            if flag.startswith("--") and value.isdigit()
        )

        def count(name: str, default: int, least: int = 1) -> int:
            value = given.get(name)
            if value is None:
                return default
            if type(value) is not int or value < least:
                raise EngineError(f"engine.settings.{name}: must be a positive whole number, not {value!r}")
            return value

        block_size, max_model_len = count("block_size", 16), count("max_model_len", 8192)
        two_requests = 1 + 2 * len(STATE_GROUPS) * 2 * -(-max_model_len // block_size)
        return cls(
            block_size,
            max_model_len,
            count("max_num_batched_tokens", 8192),
            count("max_num_seqs", 128),
            count("tensor_parallel_size", 1),
            count("num_gpu_blocks_override", two_requests),
            count("num_speculative_tokens", 0, least=0),
            count("eagle_block_drop", 0, least=0),
        )

    @property
    def page_bytes(self) -> int:
        """All groups' pages, padded to the largest, as vLLM does."""
        return max(map(self.effective_bytes, (ATTENTION, *STATE_GROUPS)))

    def effective_bytes(self, group: int) -> int:
        """Bytes of a page that computation reads."""
        return self.block_size * SLOT_BYTES if group == ATTENTION else STATE_PAGE

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every rank's entries, in order."""
        conv, recurrent = EntryKind.CONV, EntryKind.RECURRENT
        return (
            Part(ATTENTION, "layers.1.attention", EntryKind.ATTENTION, 0, self.effective_bytes(ATTENTION)),
            Part(RECURRENT, "layers.0.recurrent", conv, 0, CONV_BYTES),
            Part(RECURRENT, "layers.0.recurrent", recurrent, CONV_BYTES, STATE_BYTES),
            Part(SECOND, "layers.2.recurrent", conv, 0, CONV_BYTES),
            Part(SECOND, "layers.2.recurrent", recurrent, CONV_BYTES, STATE_BYTES),
        )


class Rank:
    """One worker: its memory, ``num_gpu_blocks`` pages, and its shard of the model."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self._block_size = settings.block_size
        self._shard = rank % 15 * VOCABULARY + 1  # non-zero: an empty slot is no token; a slot has 16 bits
        self._factor = 6_364_136_223_846_793_005 % PRIME + rank
        self.memory = [bytearray(settings.page_bytes) for _ in range(settings.num_gpu_blocks)]

    def clear(self, block: int) -> None:
        self.memory[block][:] = bytes(len(self.memory[block]))

    def write(self, block: int, page: bytes, offset: int = 0) -> None:
        self.memory[block][offset : offset + len(page)] = page

    def state(self, block: int) -> bytes:
        """The state page in a block."""
        return bytes(self.memory[block][:STATE_PAGE])

    @property
    def fresh(self) -> bytes:
        """The state page of no tokens at all."""
        return bytes(CONV_BYTES) + self._shard.to_bytes(STATE_BYTES)

    def advance(self, group: int, page: bytes, tokens: Sequence[int]) -> bytes:
        """The state page after `tokens`, from the one before them. Invertible in every argument."""
        late = (*array("H", page[:CONV_BYTES]), *tokens)
        recurred = _recurred if len(tokens) < PREFILL else _prefilled
        state = recurred(int.from_bytes(page[CONV_BYTES:]), self._factor + group, late)
        return array("H", late[-WINDOW:]).tobytes() + state.to_bytes(STATE_BYTES)

    def attend(self, tokens: Sequence[int], start: int, attention: Sequence[int]) -> None:
        """Write the slots of `tokens`, the first of which is token `start`."""
        slots = array("H", [self._shard + token for token in tokens]).tobytes()
        done = 0
        while done < len(tokens):
            slot, offset = divmod(start + done, self._block_size)
            fits = min(self._block_size - offset, len(tokens) - done)
            self.write(attention[slot], slots[done * SLOT_BYTES : (done + fits) * SLOT_BYTES], offset * SLOT_BYTES)
            done += fits

    def read_out(self, end: int, attention: Sequence[int], states: Mapping[int, int]) -> bytes:
        """What this shard adds to the logits after `end` tokens. `states`: block by state group."""
        digest = blake2b(digest_size=16)
        for block in states.values():
            digest.update(self.memory[block][:STATE_PAGE])
        full, rest = divmod(end, self._block_size)
        size = self._block_size * SLOT_BYTES
        pages = map(self.memory.__getitem__, attention[:full])
        digest.update(b"".join(pages if size >= STATE_PAGE else [page[:size] for page in pages]))
        if rest:
            digest.update(self.memory[attention[full]][: rest * SLOT_BYTES])
        return digest.digest()


def _recurred(state: int, factor: int, late: tuple[int, ...]) -> int:
    """The recurrence's state after all of `late` but its first `WINDOW` tokens, which were there before."""
    for token, before in zip(late[WINDOW:], late, strict=False):
        state = (state * factor + token + before + 1) % PRIME
    return state


_prefilled = lru_cache(maxsize=256)(_recurred)
"""Both arms, and every request of a prompt, go through the same tokens from the same state."""
