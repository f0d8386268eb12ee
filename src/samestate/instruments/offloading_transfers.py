"""Transfers of vLLM's own `OffloadingConnector`, whatever its spec."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from samestate.cache.host_worker import HostWorker
from samestate.evidence.records import EntryKind, TransferGroup, TransferPart
from samestate.evidence.stream import StreamWriter
from samestate.instruments.jobs import JobAdapter, part_of
from samestate.instruments.layout import engine_groups
from samestate.instruments.pages import Layout
from samestate.instruments.transfers import Guard

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.kv_cache_interface import KVCacheConfig


class OffloadingAdapter(JobAdapter):
    """Adapter for vLLM's own `OffloadingConnector`, whatever its spec.

    It stands between vLLM and the spec's worker (`OffloadingWorker`, a public ABC), so that it
    sees each job when it is handed to the copy engine and when it is reported as done.
    """

    def __init__(
        self,
        inner: OffloadingConnector,
        config: KVCacheConfig,
        rank: int,
        stream: StreamWriter,
        guard: Guard,
        save_delay_ms: int,
    ) -> None:
        super().__init__(config, rank, stream, guard, save_delay_ms)
        self._inner = inner
        self._groups: list[TransferGroup] = []
        self._requests: dict[int, str] = {}
        self._loads: set[int] = set()
        self._tier: HostWorker | None = None

    @override
    def watch(self) -> None:
        spec = self._inner.connector_worker.spec
        get_worker = spec.get_worker

        def watched(kv_caches: CanonicalKVCaches) -> OffloadingWorker:
            worker = get_worker(kv_caches)
            self._guard(lambda: self._describe(kv_caches))
            self._tier = worker if isinstance(worker, HostWorker) else None
            return WatchedWorker(worker, self, self._guard)

        spec.get_worker = watched

    @override
    def watch_pages(self, layout: Layout, poison: bool) -> None:
        self.audit_pages(layout, list(get_offloading_group_ids(self._config)), self._tier, poison)

    @override
    def groups(self) -> list[TransferGroup]:
        return self._groups

    @override
    def step(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, OffloadingConnectorMetadata)
        for jobs in (metadata.load_jobs, metadata.store_jobs):
            self._requests.update((job_id, job.req_id) for job_id, job in jobs.items())

    def load_submitted(self, job: int, source: LoadStoreSpec, destination: GPULoadStoreSpec) -> None:
        parts = self._parts(destination)
        recurrent = [p.boundary for p in parts if self._kinds[p.group] is EntryKind.RECURRENT]
        boundary = max(recurrent or [p.boundary for p in parts], default=None) if self._whole_blocks else None
        self._loads.add(job)
        self.load_began(job, self._requests.get(job, ""), boundary, parts, source, destination)

    def save_submitted(self, job: int, source: GPULoadStoreSpec, target: LoadStoreSpec) -> None:
        self.save_began(job, self._requests.get(job), self._parts(source), source, target)

    def completed(self, result: TransferResult) -> None:
        job = result.job_id
        self.ended(job, load=job in self._loads, ok=result.success, moved=result.transfer_size)
        self._requests.pop(job, None)
        self._loads.discard(job)

    def waited(self, jobs: set[int], waited_ns: int) -> None:
        # The blocks may be reused as soon as this returns: read them now, not when the job is reported.
        for job in jobs & self._requests.keys():
            self.read_pages(job, load=job in self._loads)
        self.waited_for(sorted(jobs), waited_ns)

    def _describe(self, kv_caches: CanonicalKVCaches) -> None:
        by_engine_group = engine_groups(self._config)
        moved = [by_engine_group[i] for i in get_offloading_group_ids(self._config)]
        spec = self._inner.connector_worker.spec
        self._groups = [
            TransferGroup(
                group=index,
                engine_group=group.group,
                entries=len(refs),
                bytes_per_block=sum(ref.page_size_bytes for ref in refs),
                tokens_per_block=tokens,
            )
            for index, (group, refs, tokens) in enumerate(
                zip(moved, kv_caches.group_data_refs, spec.tokens_per_block, strict=True)
            )
        ]
        self._kinds = [group.entry_kind for group in moved]
        # With hashes finer than blocks a load may end inside a block, which a job does not say.
        self._whole_blocks = all(spec.tokens_per_hash == tokens for tokens in spec.tokens_per_block)

    def _parts(self, spec: GPULoadStoreSpec) -> list[TransferPart]:
        sides = zip(self._groups, spec.group_sizes, spec.block_indices, strict=True)
        return [part_of(group, int(first), int(size)) for group, size, first in sides if size]


class WatchedWorker(OffloadingWorker):
    """Delegates every call to the spec's worker and tells the adapter; holds back save completions when asked to."""

    def __init__(self, worker: OffloadingWorker, adapter: OffloadingAdapter, guard: Guard) -> None:
        self.worker = worker
        self._adapter = adapter
        self._guarded = guard
        self._held: list[TransferResult] = []
        """Finished, but not reported yet."""
        self.due: dict[int, float] = {}
        """When a delayed save may be reported, monotonic seconds."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.worker, name)

    def _guard(self, observation: Callable[[], None]) -> None:
        if self._adapter.watching:
            self._guarded(observation)

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._guard(lambda: self._adapter.save_submitted(job_id, src_spec, dst_spec))
        if self._adapter.save_delay_ms:
            self.due[job_id] = time.monotonic() + self._adapter.save_delay_ms / 1000
        return self.worker.submit_store(job_id, src_spec, dst_spec)

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **options: object) -> bool:
        self._guard(lambda: self._adapter.load_submitted(job_id, src_spec, dst_spec))
        return self.worker.submit_load(job_id, src_spec, dst_spec, **options)

    @override
    def get_finished(self) -> list[TransferResult]:
        self._held += self.worker.get_finished()
        now = time.monotonic()
        results = [result for result in self._held if self.due.get(result.job_id, 0.0) <= now]
        self._held = [result for result in self._held if self.due.get(result.job_id, 0.0) > now]
        for result in results:
            self.due.pop(result.job_id, None)
            self._guard(partial(self._adapter.completed, result))
        return results

    @override
    def wait(self, job_ids: set[int]) -> None:
        started = time.monotonic()
        self.worker.wait(job_ids)
        last_due = max((self.due[job] for job in job_ids & self.due.keys()), default=started)
        time.sleep(max(0.0, last_due - time.monotonic()))
        waited_ns = int((time.monotonic() - started) * 1e9)
        self._guard(lambda: self._adapter.waited(job_ids, waited_ns))

    @override
    def shutdown(self) -> None:
        self.worker.shutdown()
