"""Loads on CUDA: vLLM's offloading worker, whose loads of small pieces are made by ways of our own.

vLLM's worker (vllm/v1/kv_offload/cpu/gpu_worker.py) hands a list of pieces to the driver's batched copy. `CudaLoads`
stands before its handler of loads and takes the jobs for which that is slow; stores, memory, everything else stays
vLLM's. It promises what that handler promises: a job writes to its blocks after what the compute stream held at its
submission (work that still reads or clears them), after every earlier load, whoever makes it, and is reported once it
is over.

``cuda_loads`` in ``kv_connector_extra_config`` says who loads:

``copy``: vLLM always; the default.
``staged``: always whole spans of the tier's rows into a buffer on the device, and pages from there (`cuda_staged`).
``gather``: always a kernel that reads host memory (`cuda_gather`). On one H200 it was up to 1.4 times as fast as vLLM
    for small pieces, but never reached 0.9 of the bus, and with 64 programs it slowed matrix products beside it 2.3
    times (docs/results/reload-h200.md).
``auto``: staged where pieces are small and spans are large, vLLM elsewhere. Large pieces the driver copies well alone.
    Small spans are no better than the pieces that they stand for: the driver's price for each is what is slow. And the
    kernel takes from what computes meanwhile more than it gives to one load: whoever wants it says ``gather``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult

from samestate.cache.cuda_lanes import Lane, Mark

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler

    from samestate.cache.cuda_gather import JobSize

logger = init_logger(__name__)

OPTION = "cuda_loads"
MODES = ("copy", "auto", "gather", "staged")
COPY_PIECE = 1 << 20
"""``auto`` leaves a job in pieces of at least so many bytes on average to vLLM. Measured: from 64 MiB on staged loads
are faster with pieces of 512 KiB, the driver's copy with pieces of 2 MiB."""
STAGED_SPAN = 256 << 10
"""``auto`` leaves a job to vLLM whose spans have fewer bytes of pages on average: what is true of pieces is true of
them."""
KNOWN = {"6201251b7f7a4e2745425a964e9b24ccbaeb4296def8d8691080db742c24e12c": "0.32.0 and 0.33.0"}
"""SHA-256 of the source of vLLM's handler -> releases that have it. Of it we read `src_tensors`, `dst_tensors`,
`layer_refs_per_group` and `_transfer_events`."""
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
        ValueError: ``gather`` or ``staged`` is asked for and cannot be; one line.

    """
    if mode == "copy":
        return
    inner: Any = getattr(worker, "_load_handler", None)
    loader = _loader(inner, mode)
    if not isinstance(loader, str):
        worker._load_handler = CudaLoads(inner, loader, left_to_copy if mode == "auto" else None)
    elif mode == "auto":
        logger.warning("loads are left to vLLM's worker: %s", loader)
    else:
        raise ValueError(f"kv_connector_extra_config.{OPTION}={mode}: {loader}; say auto or copy")


def left_to_copy(job: JobSize) -> bool:
    """Whether vLLM's copy is good enough for a job, or as good as any."""
    return job.bytes >= job.pieces * COPY_PIECE or job.bytes < job.spans * STAGED_SPAN


def _loader(inner: Any, mode: str) -> Loader | str:
    """Ready for jobs, or why not."""
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
        loader = _made(inner, mode)
        if mode == "auto":
            groups = range(len(inner.layer_refs_per_group))
            if all(left_to_copy(loader.size([int(one == group) for one in groups])) for group in groups):
                return "pieces are large, or no spans of small ones are"
            if loader.unit < 8:
                return f"pages are aligned to {loader.unit} bytes only"
        if not loader.trial(inner.dst_tensors[0].device):
            return "the kernel's trial gave other bytes"
    except Exception as error:  # A compiler that is missing or fails: whatever it raises, vLLM's worker is still there.
        return f"the kernel cannot be made: {(str(error) or type(error).__name__).splitlines()[0]}"
    return loader


def _made(inner: Any, mode: str) -> Loader:
    sides = inner.layer_refs_per_group, inner.src_tensors, inner.dst_tensors
    device = inner.dst_tensors[0].device
    if mode == "gather":
        from samestate.cache.cuda_gather import Gathered

        return Gathered(*sides, Lane(device))
    from samestate.cache.cuda_staged import Staged

    return Staged(*sides, Lane(device), Lane(device))


Follow: TypeAlias = Callable[[Lane], None]
"""Lets a lane go on only behind what a job has to wait for."""


class Loader(Protocol):
    """Makes jobs on lanes of its own, in the order of their submission."""

    @property
    def unit(self) -> int:
        """Bytes that divide every address and length."""

    @property
    def lanes(self) -> Sequence[Lane]:
        """In the order of a job's work; the last writes the blocks."""

    def size(self, sizes: Sequence[int], /) -> JobSize:
        """Of a job with so many blocks of each group."""

    def numbers(self, sizes: Sequence[int], /) -> int:
        """Of the memory that `load` needs."""

    def load(
        self, rows: np.ndarray, blocks: np.ndarray, sizes: Sequence[int], memory: torch.Tensor, follow: Follow, /
    ) -> tuple[Mark, Mark]:
        """Row i goes to block i; groups follow each other. `memory` must stay until the job is over.

        `follow` is called once, outside of lanes, with the one that writes blocks and before it does.

        Returns: where it began, and where it is over.

        """

    def trial(self, device: torch.device, /) -> bool:
        """Whether a small load brought every byte, and no other."""


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
        loader: Of the same tensors.
        by_copy: Whether a job is left to `inner`; None: only one without pages is.

    """

    def __init__(
        self,
        inner: SingleDirectionOffloadingHandler,
        loader: Loader,
        by_copy: Callable[[JobSize], bool] | None,
    ) -> None:
        self._inner = inner
        self._loader = loader
        self._by_copy = by_copy
        self._jobs: deque[_Job] = deque()
        self._last_copied = -1
        """The last job that was left to vLLM."""
        self._tables = [loader.lanes[0].table(_TABLE_NUMBERS)]

    def transfer_async(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        assert isinstance(dst_spec, GPULoadStoreSpec)
        job = self._loader.size(dst_spec.group_sizes)
        if not job.pieces or (self._by_copy is not None and self._by_copy(job)):
            return self._copy(job_id, src_spec, dst_spec)
        memory = self._table(self._loader.numbers(dst_spec.group_sizes))
        try:
            began, ended = self._loader.load(
                src_spec.block_ids, dst_spec.block_ids, dst_spec.group_sizes, memory, self._follow
            )
        except BaseException:
            for lane in self._loader.lanes:  # What is on its way still reads the table.
                lane.drain()
            raise
        self._jobs.append(_Job(job_id, began, ended, job.bytes, memory))
        return True

    def _follow(self, lane: Lane) -> None:
        """Behind the compute stream and the last job that vLLM made; of ours, earlier ones are on the same lane."""
        lane.follow_current()
        if (copied := self._inner._transfer_events.get(self._last_copied)) is not None:
            lane.follow(copied)

    def get_finished(self) -> list[TransferResult]:
        results = []
        while self._jobs and self._jobs[0].ended.query():
            job = self._jobs.popleft()
            seconds = job.began.elapsed_time(job.ended) * 1e-3
            results.append(TransferResult(job.job_id, True, job.bytes, seconds))
            self._loader.lanes[0].give_back(job.began)
            self._loader.lanes[-1].give_back(job.ended)
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
        last = self._loader.lanes[-1]
        last.follow_current()
        with last.entered():  # vLLM's stream waits for the current one: earlier jobs of ours, and compute.
            submitted = bool(self._inner.transfer_async(job_id, src_spec, dst_spec))
        self._last_copied = job_id  # Not before: a job that vLLM refused is none to wait for.
        return submitted

    def _table(self, numbers: int) -> torch.Tensor:
        for index, table in enumerate(self._tables):
            if table.numel() >= numbers:
                return self._tables.pop(index)
        self._tables.clear()  # Smaller ones are not needed beside the larger one.
        return self._loader.lanes[0].table(1 << (max(numbers, _TABLE_NUMBERS) - 1).bit_length())
