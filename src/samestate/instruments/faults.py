"""Faults on a real engine: small patches of one connector object, pinned by source hash.

A patch belongs to the source it was written against. Unknown source is refused, so that a
faulty run is never a run in which the fault silently did nothing.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import MambaSpec

from samestate.evidence.records import BatchSource
from samestate.instruments.schedule import batch

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class FaultError(ValueError):
    """The fault cannot act here; one line with the reason."""


def arm_fault(name: str, inner: KVConnectorBase_V1, role: KVConnectorRole) -> None:
    """Arm fault `name` on the audited connector.

    Raises:
        FaultError: unknown name, a connector it does not fit, or unknown source.

    """
    if name not in _FAULTS:
        raise FaultError(f"fault {name!r}: not available on vLLM; use one of {', '.join(sorted(_FAULTS))}")
    _FAULTS[name](inner, role)


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


_LOOKUP_SOURCES = {"ea21cfd48f26d70b99f65a97eb7772b11847b7f9d4931f51ed649db9178bdbed": "vLLM 0.32.0"}


def _full_lookup(inner: KVConnectorBase_V1, role: KVConnectorRole) -> None:
    """Look up all N tokens; vLLM then credits N-1 for a full asynchronous hit.

    `_lookup_complete_chunks` subtracts the last token before it rounds down to C
    (offloading/scheduler.py). Undoing that matters only where N is a multiple of C. vLLM never saves
    the recurrent state of such a whole prompt, since it would never load it; the fault saves it too.
    """
    if not isinstance(inner, OffloadingConnector):
        raise FaultError(f"fault 'full-lookup': needs an OffloadingConnector inside, not {type(inner).__name__}")
    if role is not KVConnectorRole.SCHEDULER:
        return
    digest = source_sha256(OffloadingConnectorScheduler._lookup_complete_chunks)
    if digest not in _LOOKUP_SOURCES:
        raise FaultError(f"fault 'full-lookup': unknown source of _lookup_complete_chunks, sha256 {digest}")
    _look_up_every_token(inner.scheduler)
    _save_state_of_whole_prompts(inner)


def _look_up_every_token(scheduler: OffloadingConnectorScheduler) -> None:
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

    scheduler._lookup_complete_chunks = faulty


def _save_state_of_whole_prompts(inner: OffloadingConnector) -> None:
    """Hand the state at N to the connector, in the way vLLM hands over other boundary states."""
    on_new_request, build_connector_meta = inner.on_new_request, inner.build_connector_meta
    recurrent = {
        index: group.kv_cache_spec.block_size
        for index, group in enumerate(inner._kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, MambaSpec)
    }
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
            offers += [
                (group, block_ids[group][end // size - 1], end) for group, size in recurrent.items() if end % size == 0
            ]
        return build_connector_meta(output)

    inner.on_new_request, inner.build_connector_meta = remember, build


_FAULTS: dict[str, Callable[[KVConnectorBase_V1, KVConnectorRole], None]] = {"full-lookup": _full_lookup}
