"""A worker that copies pages between two places in host memory.

Both sides are byte matrices: the device side has one row per block, the tier one row per chunk of
``blocks_per_chunk`` blocks. A job copies, for every (block, entry), the effective bytes of one page.
One thread makes all copies, so jobs finish in the order in which they were submitted.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs


class PageCopies(NamedTuple):
    """Equally long pages of one entry: addresses on both sides, bytes of each page."""

    group: int
    ref: int
    """Position of the entry in its group's references."""
    blocks: np.ndarray
    """Device blocks that the pages belong to."""
    device: np.ndarray
    tier: np.ndarray
    page_bytes: int
    block_stride: int
    """Bytes from a page to the next block's on the device."""


Route = Callable[[list[PageCopies], bool], list[PageCopies]]
"""The copies to make for those of a job; the flag says whether the job is a load."""
Report = Callable[[int, "Future[TransferResult]"], "TransferResult | None"]
"""The result to report for a job whose copies are this future; None: not yet."""


def as_ordered(copies: list[PageCopies], load: bool) -> list[PageCopies]:
    """Copy what the job says."""
    return copies


def when_copied(job_id: int, copied: Future[TransferResult]) -> TransferResult | None:
    """Report a job once all its pages are copied."""
    return copied.result() if copied.done() else None


class TierPage(NamedTuple):
    """One page of a job on the tier's side, for those who watch."""

    group: int
    ref: int
    """Position of the entry in its group's references."""
    position: int
    """Position of the block in the job's part of the group."""
    page: torch.Tensor
    """uint8, the page's effective bytes, a view of the tier."""


class HostWorker(OffloadingWorker):
    """Moves pages between vLLM's cache and a tier in host memory.

    Args:
        kv_caches: vLLM's byte matrices, int8, shape (blocks, page bytes), on the CPU.
        blocks_per_chunk: Blocks in one row of the tier.
        num_chunks: Rows of the tier.

    Attributes:
        route: Asked for every job, in the copying thread, before it is copied.
        report: Asked for every open job when vLLM asks which are finished.

    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        self.route: Route = as_ordered
        self.report: Report = when_copied
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._tier = [
            torch.zeros((num_chunks, t.page_size_bytes * blocks_per_chunk), dtype=torch.int8) for t in kv_caches.tensors
        ]
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestate-copy")
        self._running: dict[int, Future[TransferResult]] = {}

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, src_spec, dst_spec, to_device=False)

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        # vLLM 0.33 waits within the step for an expedited load; one thread already keeps the order.
        return self._submit(job_id, dst_spec, src_spec, to_device=True)

    @override
    def get_finished(self) -> list[TransferResult]:
        reports = [self.report(job_id, copied) for job_id, copied in self._running.items()]
        results = [result for result in reports if result is not None]
        for result in results:
            del self._running[result.job_id]
        return results

    @override
    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._running.keys():
            self._running[job_id].exception()

    @override
    def shutdown(self) -> None:
        self._copier.shutdown(wait=True)
        self._running.clear()

    def tier_pages(self, device: GPULoadStoreSpec, tier: BlockIDsLoadStoreSpec) -> Iterator[TierPage]:
        """Where a job's pages lie in the tier. A view: valid as long as the tier keeps these chunks."""
        start = 0
        for group, (refs, size, first) in enumerate(
            zip(self._refs, device.group_sizes, device.block_indices, strict=True)
        ):
            skip = first % self._blocks_per_chunk
            for position in range(size):
                chunk, inside = divmod(skip + position, self._blocks_per_chunk)
                row = int(tier.block_ids[start + chunk])
                for index, ref in enumerate(refs):
                    whole = self._tier[ref.tensor_idx][row].view(torch.uint8)
                    begin = inside * (whole.numel() // self._blocks_per_chunk)
                    yield TierPage(group, index, position, whole[begin : begin + ref.page_size_bytes])
            start += cdiv(size + skip, self._blocks_per_chunk) if size else 0

    def _submit(self, job_id: int, device: GPULoadStoreSpec, tier: LoadStoreSpec, to_device: bool) -> bool:
        assert isinstance(tier, BlockIDsLoadStoreSpec)
        copies = list(self._page_copies(device, tier))
        self._running[job_id] = self._copier.submit(self._copy, job_id, copies, to_device)
        return True

    def _copy(self, job_id: int, copies: list[PageCopies], to_device: bool) -> TransferResult:
        started = time.monotonic()
        for one in self.route(copies, to_device):
            sources, targets = (one.tier, one.device) if to_device else (one.device, one.tier)
            for target, source in zip(targets, sources, strict=True):
                ctypes.memmove(int(target), int(source), one.page_bytes)
        moved = sum(one.page_bytes * len(one.device) for one in copies)
        return TransferResult(
            job_id=job_id, success=True, transfer_size=moved, transfer_time=time.monotonic() - started
        )

    def _page_copies(self, device: GPULoadStoreSpec, tier: BlockIDsLoadStoreSpec) -> Iterator[PageCopies]:
        """Addresses of all pages of a job, entry by entry.

        A group's first block may lie inside a chunk (``block_indices``); the tier's rows then start
        with blocks that belong to others and are skipped.
        """
        device_start = tier_start = 0
        for group, (refs, size, first) in enumerate(
            zip(self._refs, device.group_sizes, device.block_indices, strict=True)
        ):
            if size == 0:
                continue
            skip = first % self._blocks_per_chunk
            chunks = cdiv(size + skip, self._blocks_per_chunk)
            device_ids = device.block_ids[device_start : device_start + size]
            tier_ids = tier.block_ids[tier_start : tier_start + chunks]
            device_start, tier_start = device_start + size, tier_start + chunks
            for index, ref in enumerate(refs):
                on_device, in_tier = np.empty(size, np.uint64), np.empty(size, np.uint64)
                rows = self._device[ref.tensor_idx]
                compute_sub_block_ptrs(device_ids, 1, on_device, rows)
                compute_sub_block_ptrs(tier_ids, self._blocks_per_chunk, in_tier, self._tier[ref.tensor_idx], skip)
                yield PageCopies(group, index, device_ids, on_device, in_tier, ref.page_size_bytes, rows.stride(0))
