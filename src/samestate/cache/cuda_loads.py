"""Loads on CUDA: vLLM's offloading worker, whose loads of small pieces a kernel of ours makes.

vLLM's worker (vllm/v1/kv_offload/cpu/gpu_worker.py) hands a list of pieces to the driver's batched copy. `CudaLoads`
stands before its handler of loads and takes the jobs for which that is slow; stores, memory, everything else stays
vLLM's. It promises what that handler promises: a job begins after what the compute stream held at its submission (work
that still reads or clears the blocks), after every earlier load, whoever makes it, and is reported once it is over.

``cuda_loads`` in ``kv_connector_extra_config`` says who loads: ``copy`` (vLLM always; the default), ``auto`` (the
kernel where pieces are small) or ``gather`` (the kernel always). On one H200 the kernel is up to 1.4 times as fast for
small pieces, slower for large ones, and with 64 programs slowed matrix products beside it 2.3 times
(docs/results/reload-h200.md): which of these weighs more is the operator's to say.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler

    from samestate.cache.cuda_gather import Gather, JobSize

logger = init_logger(__name__)

OPTION = "cuda_loads"
MODES = ("copy", "auto", "gather")
COPY_PIECE = 256 << 10
"""``auto`` leaves a job in pieces of at least so many bytes on average to vLLM. Measured: the kernel is faster at
64 KiB from 16 MiB on, and slower at 512 KiB whatever the job's size."""
KNOWN = {"6201251b7f7a4e2745425a964e9b24ccbaeb4296def8d8691080db742c24e12c": "0.32.0 and 0.33.0"}
"""SHA-256 of the source of vLLM's handler -> releases that have it. Of it we read `src_tensors`, `dst_tensors`,
`layer_refs_per_group` and `_transfer_events`."""
HEAD_CHUNKS = 512
"""Of a job, launched before the rest is described: 150 µs of a fast bus, in which that is done."""
_TABLE_NUMBERS = 3 << 14
"""Of the smallest table that is kept: a load of 256 MiB."""


def require_mode(value: Any) -> str:
    """Raises ValueError, one line."""
    if value not in MODES:
        raise ValueError(f"kv_connector_extra_config.{OPTION}: {value!r} is none of {', '.join(MODES)}")
    return str(value)


def install(worker: CPUOffloadingWorker, mode: str) -> None:
    """Put `CudaLoads` before a fresh worker's loads, or say in the log why it cannot be.

    Raises:
        ValueError: ``gather`` is asked for and cannot be; one line.

    """
    if mode == "copy":
        return
    inner: Any = getattr(worker, "_load_handler", None)
    gather = _gather(inner, by_force=mode == "gather")
    if isinstance(gather, str):
        if mode == "gather":
            raise ValueError(f"kv_connector_extra_config.{OPTION}=gather: {gather}; say auto or copy")
        logger.warning("loads are left to vLLM's worker: %s", gather)
        return
    by_copy = None if mode == "gather" else left_to_copy
    worker._load_handler = CudaLoads(inner, gather, Lane(inner.dst_tensors[0].device), by_copy)


def left_to_copy(job: JobSize) -> bool:
    """Whether vLLM's copy is good enough for a job."""
    return job.bytes >= job.pieces * COPY_PIECE


def _gather(inner: Any, by_force: bool) -> Gather | str:
    """Ready to launch, or why not."""
    try:
        source = hashlib.sha256(inspect.getsource(type(inner)).encode()).hexdigest()
    except (OSError, TypeError):
        source = "none to be read"
    if source not in KNOWN:
        return f"this vLLM's handler of loads is not known (sha256 {source[:12]}…, known: {', '.join(KNOWN.values())})"
    if inner.src_blocks_per_chunk != 1:
        return "chunks hold several blocks"
    if not all(tensor.is_pinned() for tensor in inner.src_tensors):
        return "the memory tier is not pinned"
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from samestate.cache.cuda_gather import Gather

        gather = Gather(inner.layer_refs_per_group, inner.src_tensors, inner.dst_tensors)
        if gather.unit < 8 and not by_force:
            return f"pages are aligned to {gather.unit} bytes only"
        if not gather.trial(inner.dst_tensors[0].device):
            return "the kernel's trial gave other bytes"
    except Exception as error:  # A compiler that is missing or fails: whatever it raises, vLLM's worker is still there.
        return f"the kernel cannot be made: {(str(error) or type(error).__name__).splitlines()[0]}"
    return gather


class Mark(Protocol):
    """A point in a stream."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: Any, /) -> float: ...


class Lane:
    """The stream of all kernels. Jobs on one stream follow each other without being told to."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._free: list[torch.cuda.Event] = []

    def follow_current(self) -> None:
        """Go on after what the current stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def follow(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def entered(self) -> AbstractContextManager[Any]:
        """Make it the current stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        mark = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        mark.record(self._stream)
        return mark

    def give_back(self, *marks: Any) -> None:
        self._free += marks

    def table(self, numbers: int) -> torch.Tensor:
        """New memory for a table."""
        return torch.empty(numbers, dtype=torch.int64, pin_memory=True)


class _Job(NamedTuple):
    job_id: int
    began: Mark
    ended: Mark
    bytes: int
    table: torch.Tensor


class CudaLoads:
    """Stands for `SingleDirectionOffloadingHandler`, from host to device.

    Args:
        inner: vLLM's, for the jobs that are left to it.
        gather: Of the same tensors.
        lane: A stream of its own.
        by_copy: Whether a job is left to `inner`; None: only one without pages is.

    """

    def __init__(
        self,
        inner: SingleDirectionOffloadingHandler,
        gather: Gather,
        lane: Lane,
        by_copy: Callable[[JobSize], bool] | None,
    ) -> None:
        self._inner = inner
        self._gather = gather
        self._lane = lane
        self._by_copy = by_copy
        self._jobs: deque[_Job] = deque()
        self._last_copied = -1
        """The last job that was left to vLLM."""
        self._tables = [lane.table(_TABLE_NUMBERS)]

    def transfer_async(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        assert isinstance(dst_spec, GPULoadStoreSpec)
        job = self._gather.size(dst_spec.group_sizes)
        if not job.chunks or (self._by_copy is not None and self._by_copy(job)):
            return self._copy(job_id, src_spec, dst_spec)
        memory = self._table(3 * job.chunks)
        self._lane.follow_current()
        if (copied := self._inner._transfer_events.get(self._last_copied)) is not None:
            self._lane.follow(copied)
        began = self._lane.mark()
        with self._lane.entered():
            self._launch(src_spec.block_ids, dst_spec.block_ids, dst_spec.group_sizes, memory)
        self._jobs.append(_Job(job_id, began, self._lane.mark(), job.bytes, memory))
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        while self._jobs and self._jobs[0].ended.query():
            job = self._jobs.popleft()
            seconds = job.began.elapsed_time(job.ended) * 1e-3
            results.append(TransferResult(job.job_id, True, job.bytes, seconds))
            self._lane.give_back(job.began, job.ended)
            self._tables.append(job.table)
        return results + self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        for job in self._jobs:
            if job.job_id in job_ids:
                job.ended.synchronize()
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        try:
            for job in self._jobs:
                job.ended.synchronize()
        finally:
            self._jobs.clear()
            self._tables.clear()
            self._inner.shutdown()

    def _copy(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._lane.follow_current()
        self._last_copied = job_id
        with self._lane.entered():  # vLLM's stream waits for the current one: the kernels of earlier jobs, and compute.
            return bool(self._inner.transfer_async(job_id, src_spec, dst_spec))

    def _launch(self, rows: np.ndarray, blocks: np.ndarray, sizes: Sequence[int], memory: torch.Tensor) -> None:
        head = self._gather.head(sizes, HEAD_CHUNKS)
        first = begin = 0
        for part in (head, [size - taken for size, taken in zip(sizes, head, strict=True)]):
            chunks, last = self._gather.size(part).chunks, first + sum(part)
            table = memory[begin : begin + 3 * chunks].view(3, chunks)
            self._gather.describe(rows[first:last], blocks[first:last], part, table.numpy())
            self._gather.launch(table)
            first, begin = last, begin + 3 * chunks

    def _table(self, numbers: int) -> torch.Tensor:
        for index, table in enumerate(self._tables):
            if table.numel() >= numbers:
                return self._tables.pop(index)
        self._tables.clear()  # Smaller ones are not needed beside the larger one.
        return self._lane.table(1 << (max(numbers, _TABLE_NUMBERS) - 1).bit_length())
