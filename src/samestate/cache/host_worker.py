"""A worker that copies pages between two places in host memory.

Both sides are byte matrices: the device side has one row per block, the tier one row per chunk of
``blocks_per_chunk`` blocks. A job copies, for every (block, entry), the effective bytes of one page.

One thread makes all copies, so jobs are copied in the order in which they were submitted. A small load that finds
nothing before it is copied where it is submitted: its request then goes on a step earlier, and no thread need wake.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from typing_extensions import override
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


INLINE_BYTES = 2 << 20
"""So much of a step's loads may be copied where they are submitted, while the engine waits: for a millisecond at most.
On two busy processors it takes 0.4 ms, and 0.8 in the worst twentieth; twice as much takes 3.4 there."""


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


class _Entry(NamedTuple):
    """Where the pages of one reference lie, on both sides: addresses and distances in bytes, as numpy's, to add up."""

    ref: int
    """Position in its group's references."""
    page_bytes: int
    block_stride: int
    device: np.uint64
    device_stride: np.uint64
    tier: np.uint64
    tier_stride: np.uint64
    """From a row to the next."""
    tier_step: np.uint64
    """From a block to the next, inside a row."""


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


def own_no_name(region: SharedOffloadRegion) -> None:
    """Have the region not remove its file's name at its end, where the scheduler did so once all had it open."""
    if not Path(region.mmap_path).exists():
        region._creator = False


class HostWorker(OffloadingWorker):
    """Moves pages between vLLM's cache and a tier in host memory.

    Args:
        kv_caches: vLLM's byte matrices, int8, shape (blocks, page bytes), on the CPU.
        blocks_per_chunk: Blocks in one row of the tier.
        num_chunks: Rows of the tier.
        region: Where the tier lies, for others to read and fill; None: memory of its own. It is released at shutdown.

    Attributes:
        route: Asked for every job, in the copying thread, before it is copied. It may take its time.
        report: Asked for every open job when vLLM asks which are finished.
        inline_bytes: Of loads that are copied where they are submitted, between two calls of `get_finished`.

    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        region: SharedOffloadRegion | None = None,
    ) -> None:
        self.route: Route = as_ordered
        self.report: Report = when_copied
        self.inline_bytes = INLINE_BYTES
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._region = region
        widths = [t.page_size_bytes * blocks_per_chunk for t in kv_caches.tensors]
        if region is None:
            self._tier = [torch.zeros((num_chunks, width), dtype=torch.int8) for width in widths]
        else:
            self._tier = [region.create_next_worker_view(width) for width in widths]
        self._entries = [[self._entry(index, ref) for index, ref in enumerate(refs)] for refs in self._refs]
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestate-copy")
        self._running: dict[int, Future[TransferResult]] = {}
        self._inlined = 0
        """Bytes, since `get_finished` was called."""
        self._last: Future[TransferResult] | None = None
        """The last job of the copying thread. Once it is over, all are, reported or not."""

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, src_spec, dst_spec, to_device=False)

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        # vLLM 0.33 waits within the step for an expedited load; the order is kept as it is.
        return self._submit(job_id, dst_spec, src_spec, to_device=True)

    @override
    def get_finished(self) -> list[TransferResult]:
        self._inlined = 0
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
        if self._region is not None:
            self._tier.clear()
            own_no_name(self._region)
            self._region.cleanup()
            self._region = None

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
        size = _bytes_of(copies)
        idle = self._last is None or self._last.done()
        if to_device and idle and self.route is as_ordered and self._inlined + size <= self.inline_bytes:
            self._inlined += size
            self._running[job_id] = self._copied(job_id, copies)
        else:
            self._last = self._running[job_id] = self._copier.submit(self._copy, job_id, copies, to_device)
        return True

    def _copied(self, job_id: int, copies: list[PageCopies]) -> Future[TransferResult]:
        """Load at once. What goes wrong is told when the job is asked for, as by the copying thread."""
        copied: Future[TransferResult] = Future()
        try:
            copied.set_result(self._copy(job_id, copies, to_device=True))
        except Exception as error:
            copied.set_exception(error)
        return copied

    def _copy(self, job_id: int, copies: list[PageCopies], to_device: bool) -> TransferResult:
        started = time.monotonic()
        for one in self.route(copies, to_device):
            sources, targets = (one.tier, one.device) if to_device else (one.device, one.tier)
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, one.page_bytes)
        return TransferResult(
            job_id=job_id,
            success=True,
            transfer_size=_bytes_of(copies),
            transfer_time=time.monotonic() - started,
        )

    def _entry(self, position: int, ref: CanonicalKVCacheRef) -> _Entry:
        device, tier = self._device[ref.tensor_idx], self._tier[ref.tensor_idx]
        numbers = (
            *(device.data_ptr(), device.stride(0)),
            *(tier.data_ptr(), tier.stride(0), tier.shape[1] // self._blocks_per_chunk),
        )
        return _Entry(position, ref.page_size_bytes, device.stride(0), *map(np.uint64, numbers))

    def _page_copies(self, device: GPULoadStoreSpec, tier: BlockIDsLoadStoreSpec) -> Iterator[PageCopies]:
        """Addresses of all pages of a job, entry by entry.

        A group's first block may lie inside a chunk (``block_indices``); the tier's rows then start
        with blocks that belong to others and are skipped.
        """
        device_start = tier_start = 0
        all_blocks, all_rows = device.block_ids.astype(np.uint64), tier.block_ids.astype(np.uint64)
        for group, (entries, size, first) in enumerate(
            zip(self._entries, device.group_sizes, device.block_indices, strict=True)
        ):
            if size == 0:
                continue
            skip = first % self._blocks_per_chunk
            chunks = cdiv(size + skip, self._blocks_per_chunk)
            blocks = all_blocks[device_start : device_start + size]
            rows, inside = all_rows[tier_start : tier_start + chunks], None
            if self._blocks_per_chunk > 1:
                chunk, inside = np.divmod(np.arange(skip, skip + size, dtype=np.uint64), self._blocks_per_chunk)
                rows = rows[chunk.astype(np.intp)]
            for entry in entries:
                on_device, in_tier = blocks * entry.device_stride, rows * entry.tier_stride
                on_device += entry.device
                in_tier += entry.tier
                if inside is not None:
                    in_tier += inside.astype(np.uint64) * entry.tier_step
                ids = device.block_ids[device_start : device_start + size]
                yield PageCopies(group, entry.ref, ids, on_device, in_tier, entry.page_bytes, entry.block_stride)
            device_start, tier_start = device_start + size, tier_start + chunks


def _bytes_of(copies: list[PageCopies]) -> int:
    return sum(one.page_bytes * len(one.device) for one in copies)
