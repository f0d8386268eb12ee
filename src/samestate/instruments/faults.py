"""Faults on a real engine: small patches of one connector, or of the worker behind it.

A patch of vLLM's own inner functions belongs to the source it was written against. Unknown source is
refused, so that a faulty run is never a run in which the fault silently did nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from samestate.evidence.records import BatchSource
from samestate.instruments.layout import recurrent_blocks
from samestate.instruments.schedule import batch, states_at

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class FaultError(ValueError):
    """The fault cannot act here; one line with the reason."""


class Audited(NamedTuple):
    """One connector under audit. A worker's has registered its caches."""

    inner: OffloadingConnector
    role: KVConnectorRole
    config: KVCacheConfig


class Undo(ExitStack):
    """Patches that end together."""

    def patch(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of this one object until closed."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)


class LiveFault(ABC):
    """A fault; one object for as long as it is armed."""

    roles: ClassVar[tuple[KVConnectorRole, ...]]
    """Whose connectors it acts on."""

    @abstractmethod
    def act(self, on: Audited, undo: Undo) -> None:
        """Act on a connector of one of `roles`. Raises `FaultError` for unknown source or worker."""


def source_sha256(function: Callable[..., object]) -> str:
    """SHA-256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


class _OneTokenMore:
    """A request that claims one more token, so that a lookup over N-1 becomes one over N."""

    def __init__(self, request: object) -> None:
        self._request = request

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens) + 1  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


_LOOKUP_SOURCES = {
    "ea21cfd48f26d70b99f65a97eb7772b11847b7f9d4931f51ed649db9178bdbed": "vLLM 0.32.0",
    "0da21047e88b5554c3c7a61bb5bfe5f34abf7e03235d3ab7b3e3a257062ea21a": "vLLM 0.33.0",
}


def require_known_lookup(fault: str) -> None:
    """Raise `FaultError` where the connector's lookup is not one that `fault` was written for."""
    digest = source_sha256(OffloadingConnectorScheduler._lookup_complete_chunks)
    if digest not in _LOOKUP_SOURCES:
        raise FaultError(f"fault {fault!r}: unknown source of _lookup_complete_chunks, sha256 {digest}")


class FullLookup(LiveFault):
    """Look up all N tokens; vLLM then credits N-1 for a full asynchronous hit.

    `_lookup_complete_chunks` subtracts the last token before it rounds down to C
    (offloading/scheduler.py). Undoing that matters only where N is a multiple of C. vLLM never saves
    the recurrent state of such a whole prompt, since it would never load it; the fault saves it too.
    """

    roles = (KVConnectorRole.SCHEDULER,)

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        require_known_lookup("full-lookup")
        _look_up_every_token(on.inner.scheduler, undo)
        _save_state_of_whole_prompts(on, undo)


def _look_up_every_token(scheduler: OffloadingConnectorScheduler, undo: Undo) -> None:
    lookup = scheduler._lookup_complete_chunks
    interval = max(group.tokens_per_chunk for group in scheduler.config.kv_group_configs)

    def faulty(req_status: RequestOffloadState, max_num_new_tokens: int | None = None) -> int | None:
        request = req_status.req
        if request.num_tokens % interval:
            return lookup(req_status, max_num_new_tokens)
        req_status.req = _OneTokenMore(request)
        try:
            return lookup(req_status, max_num_new_tokens)
        finally:
            req_status.req = request

    undo.patch(scheduler, "_lookup_complete_chunks", faulty)


def _save_state_of_whole_prompts(on: Audited, undo: Undo) -> None:
    """Hand the state at N to the connector, in the way vLLM hands over other boundary states."""
    on_new_request, build_connector_meta = on.inner.on_new_request, on.inner.build_connector_meta
    recurrent = recurrent_blocks(on.config)
    prompt_tokens: dict[str, int] = {}

    def remember(request: Request) -> None:
        prompt_tokens[request.request_id] = request.num_prompt_tokens
        on_new_request(request)

    def build(output: SchedulerOutput) -> KVConnectorMetadata:
        state = output.kv_connector_block_state
        step = batch(output, 0, BatchSource.CONNECTOR)
        for row in step.rows if step and state else ():
            end = row.start + row.scheduled
            block_ids = state.get_block_ids(row.request)
            if end != prompt_tokens.get(row.request) or block_ids is None:
                continue
            offers = state.boundary_state_offloads.setdefault(row.request, [])
            offers += [(group, block, end) for group, block in states_at(end, block_ids, recurrent)]
        return build_connector_meta(output)

    undo.patch(on.inner, "on_new_request", remember)
    undo.patch(on.inner, "build_connector_meta", build)


class _FreshBlock(NamedTuple):
    """As much of a block as the connector looks at before it orders a load."""

    block_id: int
    is_null: bool
    block_hash: None = None


def _unhashed(blocks: Sequence[KVCacheBlock]) -> list[_FreshBlock]:
    """vLLM hashes the blocks of a synchronous hit at once, and the connector loads only unhashed ones."""
    return [_FreshBlock(block.block_id, block.is_null) for block in blocks]


class SyncLoad(LiveFault):
    """Answer a hit as synchronous, and load within the step that already uses the state.

    vLLM's preprocess_mamba copies the hit's state into the running block before it calls start_load_kv
    (v1/worker/gpu_model_runner.py): the right bytes arrive, after the wrong ones were copied.
    """

    roles = (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    POLL_SECONDS = 0.0002

    @override
    def act(self, on: Audited, undo: Undo) -> None:
        if on.role is KVConnectorRole.SCHEDULER:
            self._answer_at_once(on.inner, undo)
        else:
            self._load_within_the_step(on.inner, undo)

    def _answer_at_once(self, inner: OffloadingConnector, undo: Undo) -> None:
        look_up, order = inner.get_num_new_matched_tokens, inner.update_state_after_alloc

        def faulty(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
            return look_up(request, num_computed_tokens)[0], False

        def ordered(request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
            order(request, KVCacheBlocks(tuple(map(_unhashed, blocks.blocks))), num_external_tokens)

        undo.patch(inner, "get_num_new_matched_tokens", faulty)
        undo.patch(inner, "update_state_after_alloc", ordered)

    def _load_within_the_step(self, inner: OffloadingConnector, undo: Undo) -> None:
        start, worker = inner.start_load_kv, inner.connector_worker

        def faulty(*args: object, **kwargs: object) -> None:
            start(*args, **kwargs)
            loading = {job.req_id for job in inner._get_connector_metadata().load_jobs.values()}
            while loading:
                # Not passed on: vLLM knows no receiving for a request that it already runs.
                loading -= worker.get_finished(set())[1]
                time.sleep(self.POLL_SECONDS)

        undo.patch(inner, "start_load_kv", faulty)
