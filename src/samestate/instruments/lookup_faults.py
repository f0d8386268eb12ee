"""Faults in what is found of a prompt: what a connector answers, and what the local lookup does beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_group_idx

from samestate.instruments.faults import Audited, LiveFault, Undo, require_known_lookup
from samestate.instruments.layout import recurrent_blocks

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


class SchedulerFault(LiveFault):
    """Acts on the connector in the scheduler."""

    roles = (KVConnectorRole.SCHEDULER,)


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


class AttachChangesLookup(SchedulerFault):
    """With a connector attached the local lookup no longer asks for states: a hit ends where attention's pages do."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        def without_asking(
            manager: type[MambaManager],
            /,
            *,
            max_length: int,
            kv_cache_group_ids: list[int],
            block_pool: BlockPool,
            kv_cache_spec: KVCacheSpec,
            **others: object,
        ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
            blocks = max_length // kv_cache_spec.block_size
            return tuple(
                [block_pool.null_block] * blocks for _ in kv_cache_group_ids
            ), blocks * kv_cache_spec.block_size

        undo.patch(MambaManager, "find_longest_cache_hit", classmethod(without_asking))


class OrphanAttention(SchedulerFault):
    """The tier has dropped every state and kept the attention pages, which nothing can use any more."""

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        manager = on.inner.scheduler.manager
        look_up, recurrent = manager.lookup, recurrent_blocks(on.config)

        def without_states(key: OffloadKey, req_context: ReqContext) -> LookupResult:
            return LookupResult.MISS if get_offload_group_idx(key) in recurrent else look_up(key, req_context)

        undo.patch(manager, "lookup", without_states)
