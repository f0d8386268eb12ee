"""The smallest connector that is right for a hybrid: a dictionary of pages in each worker's memory.

Load it by name::

    --kv-transfer-config '{"kv_connector": "DictionaryConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samestate.cache.dictionary",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}'

It is there to be read, and to be audited. What is kept, and under which key, is said in `families`. A prefix can be
restored where all its families have their pages and the last one has its state, which exists only where a step ended.

The scheduler's side decides alone what is loaded, saved and dropped. Its orders reach the workers as metadata of a
step; every worker carries them out in order, on its own dictionary, perhaps in another process. What was saved comes
back as worker metadata (`build_connector_worker_meta`, merged over the workers by `aggregate`), and counts as stored
once all workers have said so. `get_finished` could not say it: it speaks of requests, not of saves.

Saves are copied before `wait_for_save` returns, so no block can be used again too early. Loads are copied at once
too, but answered as asynchronous: the request then runs in a later step. A synchronous load is wrong for recurrent
state (vLLM copies the state that a step continues from before it starts the step's loads).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from samestate.cache.dictionary_pages import Dictionary, Watcher, device_pages
from samestate.cache.families import Index, Part, Transfer, geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

LOOKUPS = ("strict", "full")
LOADS = ("async", "sync")


# --- between the two sides ------------------------------------------------------------------------


@dataclass
class Orders(KVConnectorMetadata):
    """One step's work for every worker: loads, then drops, then saves."""

    loads: list[Transfer] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


@dataclass
class Saved(KVConnectorWorkerMetadata):
    """Saves that were carried out, and by how many workers."""

    workers: dict[int, int]
    """By job."""

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> Saved:
        assert isinstance(other, Saved)
        jobs = self.workers.keys() | other.workers.keys()
        return Saved({job: self.workers.get(job, 0) + other.workers.get(job, 0) for job in jobs})


# --- the connector --------------------------------------------------------------------------------


class DictionaryConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. One object in the scheduler, one in every worker.

    ``kv_connector_extra_config``:
        cpu_bytes_to_use: Bytes of all workers' dictionaries together.
        load: ``async``, or ``sync`` to see what a synchronous load does.
        lookup: ``strict``; ``full`` looks up all N tokens and credits one less: the known fault, for tests only.

    Raises:
        ValueError: an option, a parallel setting or a kind of cache that does not fit; one line.

    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.geometry = geometry(kv_cache_config)
        options = dict(self._kv_transfer_config.kv_connector_extra_config)
        capacity = options.pop("cpu_bytes_to_use", 0)
        self._full = _choice(options, "lookup", LOOKUPS) == "full"
        self._async = _choice(options, "load", LOADS) == "async"
        if options:
            raise ValueError(
                f"kv_connector_extra_config: no option {', '.join(options)}; use cpu_bytes_to_use, load, lookup"
            )
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(f"{name}={getattr(parallel, name)}: not supported by DictionaryConnector; make it 1")
        needed = self.geometry.family_bytes(range(len(self.geometry.groups))) * parallel.world_size
        if not isinstance(capacity, int) or capacity < needed:
            raise ValueError(
                f"cpu_bytes_to_use: {capacity!r}; one family takes {needed} bytes over all ranks, give more"
            )
        self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
        self.index = Index(self.geometry, capacity // parallel.world_size, parallel.world_size)
        self._requests: dict[str, Request] = {}
        self._orders = Orders()
        self._jobs = count()
        self.dictionary: Dictionary | None = None
        self.watcher = Watcher()
        self._saved = Saved({})
        self._received = KVConnectorTransferResults()

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        return False

    # --- scheduler ------------------------------------------------------------------------------

    @override
    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    @override
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        restored = len(self._restorable(request)) * self.geometry.interval
        external = restored - num_computed_tokens
        if restored == request.num_tokens:  # only with the fault
            external -= 1
        return (external, self._async) if external > 0 else (0, False)

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        keys = self._restorable(request)
        first = (len(keys) * self.geometry.interval - num_external_tokens) // self.geometry.interval
        groups = range(len(self.geometry.groups))
        self._orders.loads.append(
            self._transfer(next(self._jobs), request, keys, first, groups, blocks.get_block_ids())
        )
        self.index.touch(keys)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        cached = scheduler_output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request, end = self._requests.get(request_id), starts[request_id] + scheduled
            if request is not None and end <= request.num_prompt_tokens and end % self.geometry.interval == 0:
                tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                self._save(request, self._keys(request, end), tables)
        orders, self._orders = self._orders, Orders()
        orders.dropped, self.index.dropped = self.index.dropped, []
        return orders

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        saved = connector_output.kv_connector_worker_meta
        if isinstance(saved, Saved):
            self.index.confirm(saved.workers)

    @override
    def has_pending_push_work(self) -> bool:
        # An idle engine steps on until all workers have said what they saved.
        return self.index.saving

    @override
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del self._requests[request.request_id]
        return False, None

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @override
    def reset_cache(self) -> bool:
        self.index.clear()
        return True

    def _keys(self, request: Request, tokens: int) -> list[bytes]:
        """Keys of the families of the request's first `tokens` tokens."""
        step = self.geometry.interval // self._hash_tokens
        ends = range(step, tokens // self._hash_tokens + 1, step)
        return [bytes(request.block_hashes[end - 1]) for end in ends]

    def _restorable(self, request: Request) -> list[bytes]:
        """Keys of the families to restore: B is C times their number. The last token is left out before the lookup."""
        keys = self._keys(request, request.num_tokens if self._full else request.num_tokens - 1)
        return keys[: self.index.restorable(keys)]

    def _save(self, request: Request, keys: list[bytes], tables: tuple[list[int], ...]) -> None:
        """Order what is missing of a prefix on whose end a step ends, up to the first family that finds no room."""
        for families, key in enumerate(keys, 1):
            wanted = self.index.pages | self.index.states if families == len(keys) else self.index.pages
            job = next(self._jobs)
            claimed = self.index.claim(job, key, wanted, beside=keys)
            if claimed is None:
                break
            if claimed:
                self._orders.saves.append(self._transfer(job, request, keys[:families], families - 1, claimed, tables))
        self.index.touch(keys)

    def _transfer(
        self,
        job: int,
        request: Request,
        keys: list[bytes],
        first: int,
        groups: Iterable[int],
        tables: tuple[list[int], ...],
    ) -> Transfer:
        """The families of `keys` from `first` on, and the state of the last one."""
        parts = []
        for group in groups:
            size, moved = self.geometry.blocks(group), self.geometry.groups[group]
            start = (len(keys) - 1 if moved.is_state else first) * size
            parts.append(Part(group, start, list(tables[moved.engine_group][start : len(keys) * size])))
        return Transfer(job, request.request_id, keys[first:], parts)

    # --- worker ---------------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages = device_pages(self.geometry, self._kv_cache_config, kv_caches)
        self.dictionary = Dictionary(self.geometry, pages, self.watcher)

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self.dictionary is not None
        for load in self._get_connector_metadata().loads:
            try:
                self.dictionary.load(load)
            except KeyError:
                if not self._async:
                    raise
                # A request, not its blocks: ids of blocks say nothing where there are several groups.
                self._received.failed_recving.add(load.request)
            if self._async:
                self._received.finished_recving.add(load.request)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    @override
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    @override
    def wait_for_save(self) -> None:
        assert self.dictionary is not None
        orders = self._get_connector_metadata()
        for key in orders.dropped:
            self.dictionary.drop(key)
        if orders.saves:
            self.dictionary.save(orders.saves)
            self._saved.workers.update((save.job, 1) for save in orders.saves)

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, self._received = self._received, KVConnectorTransferResults()
        return received

    @override
    def build_connector_worker_meta(self) -> Saved | None:
        saved, self._saved = self._saved, Saved({})
        return saved if saved.workers else None


def _choice(options: dict[str, Any], name: str, choices: tuple[str, ...]) -> str:
    chosen = options.pop(name, choices[0])
    if chosen not in choices:
        raise ValueError(f"kv_connector_extra_config.{name}: {chosen!r} is unknown; use {' or '.join(choices)}")
    return str(chosen)
