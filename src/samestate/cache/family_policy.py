"""Eviction by complete families in the memory tier: vLLM's `CachePolicy` over a `FamilyIndex`.

vLLM's manager (vllm/v1/kv_offload/cpu/manager.py) knows chunks: one page of one group, in one row. It asks a policy for
so many rows; these policies answer with whole families, at times with more rows than were asked for, which the manager
takes. Which family follows which is read off a request's context: vLLM notes there the position of every key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from samestate.cache.family_index import Family, FamilyIndex, PolicyName, Want


class _Chain:
    """A request's families in order, with the boundaries that they end at."""

    def __init__(self) -> None:
        self.families: list[Family] = []
        self.known = 0
        """Keys read so far."""


class FamilyPolicy(CachePolicy):
    """Families, the least recently used first."""

    policy: ClassVar[PolicyName] = "lru"

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._parents: dict[Family, tuple[Family | None, int]] = {}
        """Of families of requests that are not finished: the one before, and the boundary."""
        self._readers: dict[Family, int] = {}
        """How many such requests a family has."""
        self.row_bytes = 1
        self.index = FamilyIndex([], [], self.policy)

    def configure(self, pages: Collection[int], states: Collection[int], row_bytes: int) -> None:
        """Say what the groups are, before the first page. Without it every page is of use wherever it is."""
        assert not self._chunks
        self.row_bytes = row_bytes
        self.index = FamilyIndex(pages, states, self.policy)

    # --- what the manager asks ------------------------------------------------------------------

    @override
    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def has(self, key: OffloadKey) -> bool:
        """Whether a page is there, or on its way."""
        return key in self._chunks

    @override
    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        # vLLM 0.33 passes the request's context too; `on_store_miss` has read it by then.
        family = _family(key)
        self._chunks[key] = chunk
        parent, end = self._parents.get(family, (None, 0))
        moving = not chunk.is_ready or chunk.ref_cnt > 0
        self.index.add(family, get_offload_group_idx(key), self.row_bytes, parent=parent, end=end, hold=moving)
        while parent is not None:
            higher, end = self._parents.get(parent, (None, 0))
            if higher is None or not self.index.link(parent, higher, end):
                break
            parent = higher
        if family in self._readers:
            self.index.want(family, Want.ASKED)

    @override
    def remove(self, key: OffloadKey) -> None:
        # Only after a save or a promotion that failed: it is still held.
        del self._chunks[key]
        self.index.release(_family(key))
        self.index.remove(_family(key), get_offload_group_idx(key))

    @override
    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self.index.touch(dict.fromkeys(map(_family, keys)))

    @override
    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._read(req_context)

    @override
    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        families = dict.fromkeys(_family(key) for group in key_groups for key in group)
        reused = {_family(key) for key in reused_keys}
        self.index.touch(family for family in families if family not in reused)
        self.index.touch((family for family in families if family in reused), reused=True)
        chain = req_context.get_state(_Chain)
        if chain is not None:
            for family in chain.families:
                self._readers[family] = self._readers.get(family, 1) - 1
                if self._readers[family] <= 0:
                    self._readers.pop(family)
                    self._parents.pop(family, None)
                    self.index.want(family, Want.NO)
            chain.families.clear()

    @override
    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        if n == 0:
            return []
        gone = self.index.evict(n * self.row_bytes, list(self._with_above(map(_family, protected))))
        if gone is None:
            return None
        keys = [make_offload_key(member.family, member.group) for member in gone]
        return [(key, self._chunks.pop(key)) for key in keys]

    @override
    def clear(self) -> None:
        self._chunks.clear()
        self._parents.clear()
        self._readers.clear()
        self.index.clear()

    @override
    def mark_evictable(self, key: OffloadKey) -> None:
        self.index.release(_family(key))

    @override
    def mark_non_evictable(self, key: OffloadKey) -> None:
        self.index.hold(_family(key))

    # --- which family follows which -------------------------------------------------------------

    def _read(self, req_context: ReqContext) -> None:
        """Learn the chain of a request, as far as it goes by now."""
        positions = req_context._offload_key_positions
        chain = req_context.get_state(_Chain)
        if chain is None:
            req_context.set_state(chain := _Chain())
        if chain.known == len(positions):
            return
        chain.known = len(positions)
        by_end = {end: _family(key) for key, end in positions.items()}
        above: Family | None = None
        for family in chain.families:
            self._readers[family] -= 1
        chain.families = []
        for end in sorted(by_end):
            family = by_end[end]
            self._parents[family] = (above, end)
            self._readers[family] = self._readers.get(family, 0) + 1
            chain.families.append(family)
            self.index.want(family, Want.ASKED)
            above = family

    def _with_above(self, families: Iterable[Family]) -> Iterator[Family]:
        seen: set[Family] = set()
        for family in families:
            one: Family | None = family
            while one is not None and one not in seen:
                seen.add(one)
                yield one
                one = self._parents.get(one, (None, 0))[0]


class FamilyValuePolicy(FamilyPolicy):
    """Families, those that save least per byte first."""

    policy = "value"


def _family(key: OffloadKey) -> Family:
    return Family(get_offload_block_hash(key))
