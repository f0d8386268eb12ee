"""Faults in what a connector answers: how much of a prompt it finds, under which keys, and what is counted of it."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from copy import copy
from inspect import signature
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.metrics.stats import PrefixCacheStats

from samestate.instruments.faults import Audited, FaultError, LiveFault, Undo, require_known_lookup
from samestate.instruments.layout import recurrent_blocks

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.request import Request


class SchedulerFault(LiveFault):
    """Acts on the connector in the scheduler."""

    roles = (KVConnectorRole.SCHEDULER,)


# --- how much is found ----------------------------------------------------------------------------


class AnswerFault(SchedulerFault):
    """Answers another number of tokens than were found. What was found is loaded."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        look_up, order = on.inner.get_num_new_matched_tokens, on.inner.update_state_after_alloc
        recurrent = recurrent_blocks(on.config)
        self.interval = max(recurrent.values())
        found: dict[str, tuple[int, int]] = {}
        """By request: tokens that were local, and tokens found beyond them."""

        def answer(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
            matched, is_async = look_up(request, num_computed_tokens)
            if matched is None:
                return matched, is_async
            found[request.request_id] = num_computed_tokens, matched
            said = self.said(request, num_computed_tokens, matched)
            return said, is_async and bool(said)

        def ordered(request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
            local, matched = found.pop(request.request_id, (0, num_external_tokens))
            if num_external_tokens > matched:
                blocks = _state_where_it_is_read(blocks, recurrent, local + matched)
            order(request, blocks, min(matched, num_external_tokens))

        undo.patch(on.inner, "get_num_new_matched_tokens", answer)
        undo.patch(on.inner, "update_state_after_alloc", ordered)

    @abstractmethod
    def said(self, request: Request, local: int, matched: int) -> int:
        """Tokens to answer for `matched` ones beyond the local ones."""


def _state_where_it_is_read(blocks: KVCacheBlocks, recurrent: dict[int, int], end: int) -> KVCacheBlocks:
    """vLLM allocates one state block, in the slot of the credited end; a load of [0, end) must fill that one."""
    tables = [list(group) for group in blocks.blocks]
    for group, size in recurrent.items():
        tables[group][end // size - 1] = next(block for block in reversed(tables[group]) if not block.is_null)
    return KVCacheBlocks(tuple(tables))


class UnalignedCredit(AnswerFault):
    """Credits tokens beyond the last state, since attention can be had in smaller pieces."""

    PIECE = 16
    """Tokens of a page of attention, as the connector sees it."""

    @override
    def said(self, request: Request, local: int, matched: int) -> int:
        rest = request.num_tokens - 1 - local - matched
        return matched + rest // self.PIECE * self.PIECE if matched else 0


class BlockRoundUp(AnswerFault):
    """Turns the blocks that hold the prompt into tokens, and is cut to N-1: an index says 48 for a prompt of 40."""

    @override
    def said(self, request: Request, local: int, matched: int) -> int:
        return request.num_tokens - 1 - local if matched else 0


class BoundaryDip(AnswerFault):
    """Finds nothing for a prompt that ends on a boundary: its last snapshot was filed where nobody looks."""

    @override
    def said(self, request: Request, local: int, matched: int) -> int:
        return 0 if request.num_tokens % self.interval == 0 else matched


class StoredNeverServed(AnswerFault):
    """Stores everything and finds nothing, as with a drafter whose last chunk is always left out."""

    @override
    def said(self, request: Request, local: int, matched: int) -> int:
        return 0


class ThirdSighting(AnswerFault):
    """Finds a prefix from its third request on: the second one only teaches the cache that it is shared."""

    def __init__(self) -> None:
        self._sightings = Counter[bytes]()

    @override
    def said(self, request: Request, local: int, matched: int) -> int:
        beginning = bytes(request.block_hashes[0]) if request.block_hashes else b""
        self._sightings[beginning] += 1
        return matched if self._sightings[beginning] > 2 else 0


class _Unloaded(NamedTuple):
    """A block that the connector takes for one without anything to load."""

    block_id: int
    is_null: bool = True
    block_hash: None = None


class JointTruncation(SchedulerFault):
    """Cuts the hit to what attention has, whether or not a state was kept there; then no state is loaded."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        require_known_lookup("joint-truncation")
        scheduler, order = on.inner.scheduler, on.inner.update_state_after_alloc
        lookup = scheduler._lookup_complete_chunks
        recurrent = recurrent_blocks(on.config)
        interval = max(recurrent.values())

        def of_attention(req_status: RequestOffloadState, max_num_new_tokens: int | None = None) -> int | None:
            groups = scheduler._lookup_groups, scheduler._sliding_window_groups
            scheduler._lookup_groups, scheduler._sliding_window_groups = scheduler._full_attention_groups, ()
            try:
                found = lookup(req_status, max_num_new_tokens)
            finally:
                scheduler._lookup_groups, scheduler._sliding_window_groups = groups
            local = req_status.num_locally_computed_tokens
            whole = (req_status.req.num_tokens - 1) // interval * interval
            return found and max(0, min(found, whole - local))

        def ordered(request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
            status = scheduler._req_status[request.request_id]
            end = status.num_locally_computed_tokens + num_external_tokens
            tables = list(blocks.blocks)
            for config, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
                if not num_external_tokens or config.group_idx not in recurrent:
                    continue
                key = state.offload_keys[end // config.tokens_per_chunk - 1]
                if scheduler.manager.lookup(key, status.req_context) is LookupResult.MISS:
                    tables[config.group_idx] = [_Unloaded(block.block_id) for block in tables[config.group_idx]]
            order(request, KVCacheBlocks(tuple(tables)), num_external_tokens)

        undo.patch(scheduler, "_lookup_complete_chunks", of_attention)
        undo.patch(on.inner, "update_state_after_alloc", ordered)


class OrphanAttention(SchedulerFault):
    """The tier has dropped every state and kept the attention pages, which nothing can use any more."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        manager = on.inner.scheduler.manager
        look_up, recurrent = manager.lookup, recurrent_blocks(on.config)

        def without_states(key: OffloadKey, req_context: ReqContext) -> LookupResult:
            return LookupResult.MISS if get_offload_group_idx(key) in recurrent else look_up(key, req_context)

        undo.patch(manager, "lookup", without_states)


# --- under which keys -----------------------------------------------------------------------------


class _Rekeyed:
    """A request as the connector sees it, with other block hashes."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


class _Unsalted(_Rekeyed):
    """Without its cache salt."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._twin = copy(request)
        self._twin.cache_salt = None
        self._twin.block_hashes = []

    @property
    def block_hashes(self) -> list[BlockHash]:
        self._twin.update_block_hashes()  # the twin has the same list of tokens
        return self._twin.block_hashes


class _Shortened(_Rekeyed):
    """With hashes of so few bits that none is left to tell two prompts apart: only the position is."""

    @property
    def block_hashes(self) -> list[BlockHash]:
        return [BlockHash(position.to_bytes(32, "big")) for position, _ in enumerate(self._request.block_hashes)]


class KeyFault(SchedulerFault):
    """Gives requests that come while it is armed other keys, for saves and lookups alike."""

    seen_as: ClassVar[type[_Rekeyed]]

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        scheduler = on.inner.scheduler
        on_new_request = scheduler.on_new_request

        def rekeyed(request: Request) -> None:
            on_new_request(request)
            scheduler._req_status[request.request_id].req = self.seen_as(request)

        undo.patch(scheduler, "on_new_request", rekeyed)


class SaltIgnored(KeyFault):
    """Leaves the cache salt out of the key."""

    seen_as = _Unsalted


class ShortHash(KeyFault):
    """Cuts keys to a few bits (here to none), and two prompts meet."""

    seen_as = _Shortened


# --- what is counted, and what a reset does -------------------------------------------------------


class CounterFault(SchedulerFault):
    """Counts other numbers of what the connector was asked for and found."""

    queries = hits = 1
    """How often each token is counted."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        record = PrefixCacheStats.record
        if "hits_by_source" not in signature(record).parameters:
            raise FaultError("a fault of counters needs a vLLM that says where a connector's hits came from")

        def counted(stats: PrefixCacheStats, num_tokens: int, num_hits: int, *rest: object, **more: object) -> None:
            # Only a connector's hits come with their source; the local cache is counted by another class's object.
            own = "hits_by_source" in more
            more = more | {"hits_by_source": None} if own else more
            times = (self.queries, self.hits) if own else (1, 1)
            record(stats, num_tokens * times[0], num_hits * times[1], *rest, **more)

        undo.patch(PrefixCacheStats, "record", counted)


class HitsSilent(CounterFault):
    """The hit counter stays at 0."""

    hits = 0


class HitsOvercounted(CounterFault):
    """The hit counter counts every prefix twice."""

    hits = 2


class QueriesDoubled(CounterFault):
    """The query counter counts every request twice."""

    queries = 2


class ResetKeepsLocal(SchedulerFault):
    """A reset of the local cache is confirmed and changes nothing."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        undo.patch(BlockPool, "reset_prefix_cache", lambda pool: True)
