"""Pages from pinned host memory into blocks on a CUDA device, by a kernel that reads host memory itself.

The copy engines pay about a microsecond for every piece; a kernel pays per byte. A job becomes a table of chunks of
at most `CHUNK_BYTES`, in pinned memory too: source, target, length. Few programs walk over it, each with a whole
chunk in flight, so that together they hold far more than the bus needs and far less than the device has.

Both sides are byte matrices, one row per page; pinned memory has one address for host and device on Linux.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.kv_offload.base import CanonicalKVCacheRef

from samestate.cache.cuda_lanes import Lane, Mark

CHUNK_BYTES = 16 << 10
PROGRAMS = 16
"""At most so many at a time, each on a processor of the device that computes nothing meanwhile: 16 reached 41 GB/s on
one H200, 64 reached 43."""
WARPS = 4
WIDE = 16
"""Bytes that a thread reads at once, where addresses and lengths allow it."""
_ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["table", "count", "apart"])
def copy_chunks(
    table: tl.tensor,
    count: tl.tensor,
    apart: tl.tensor,
    element: tl.constexpr,
    word: tl.constexpr,
    wide: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Copy `count` chunks. `table` is the address of int64s: sources, `apart` further on targets, then lengths.

    `wide`: bytes that divide all addresses; lengths are counted in it.
    """
    sources = table.to(tl.pointer_type(tl.int64))
    offsets = tl.arange(0, chunk // word)
    for at in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.multiple_of(tl.load(sources + at).to(tl.pointer_type(element)), wide)
        target = tl.multiple_of(tl.load(sources + apart + at).to(tl.pointer_type(element)), wide)
        inside = offsets < tl.load(sources + 2 * apart + at) * (wide // word)
        data = tl.load(source + offsets, mask=inside, cache_modifier=".cg")
        tl.store(target + offsets, data, mask=inside)


def launch(table: int, count: int, apart: int, unit: int, programs: int) -> None:
    """Copy chunks on the current stream.

    Args:
        table: Address of the first source, int64. Targets lie `apart` numbers further on, then lengths. It must stay
            as it is until the kernel is over.
        count: Chunks.
        apart: At least `count`.
        unit: Bytes that divide every address, and in which lengths are counted: 1, 2, 4, 8 or 16.
        programs: At most so many at a time.

    """
    if not count:
        return
    word = min(unit, 8)
    copy_chunks[(min(programs, count),)](
        table,
        count,
        apart,
        element=_ELEMENTS[word],
        word=word,
        wide=unit,
        chunk=CHUNK_BYTES,
        num_warps=WARPS,
    )


class JobSize(NamedTuple):
    """What a job moves."""

    chunks: int
    pieces: int
    """Pages of single entries."""
    bytes: int
    spans: int = 0
    """Stretches of contiguous memory in which the pages lie; 0: not counted."""

    @classmethod
    def of(cls, blocks: Sequence[JobSize], sizes: Sequence[int]) -> JobSize:
        """Of so many blocks of each group; `blocks`: of one of each."""
        counted = [[size * one for one in block] for block, size in zip(blocks, sizes, strict=True)]
        return cls(*(sum(column) for column in zip((0,) * len(cls._fields), *counted, strict=True)))


class _Group(NamedTuple):
    """Chunks of one block of a group: first row's addresses and distances in bytes, as int64 of equal length."""

    source: np.ndarray
    source_stride: np.ndarray
    target: np.ndarray
    target_stride: np.ndarray
    length: np.ndarray
    """In units."""
    block: JobSize
    """Of one block, all entries together."""


HEAD_CHUNKS = 512
"""Of a job, launched before the rest is described: 150 µs of a fast bus, in which that is done."""


class Gather:
    """Describes jobs between a tier and a device, and launches the kernel for them.

    Args:
        groups: The entries of each group, as vLLM registered them.
        tier: int8, shape (rows, page bytes) each, pinned; one for each of `device`.
        device: int8, shape (blocks, page bytes) each.

    Attributes:
        unit: Bytes that divide every address and length: 1, 2, 4, 8 or 16.

    """

    def __init__(
        self,
        groups: Sequence[Sequence[CanonicalKVCacheRef]],
        tier: Sequence[torch.Tensor],
        device: Sequence[torch.Tensor],
    ) -> None:
        numbers = [one for side in (*tier, *device) for one in (side.data_ptr(), side.stride(0))]
        self.unit = math.gcd(WIDE, *numbers, *(ref.page_size_bytes for refs in groups for ref in refs))
        self._groups = [self._group(refs, tier, device) for refs in groups]

    def size(self, sizes: Sequence[int]) -> JobSize:
        """Of a job with so many blocks of each group."""
        return JobSize.of([group.block for group in self._groups], sizes)

    def numbers(self, sizes: Sequence[int]) -> int:
        """Of the memory for such a job's table."""
        return 3 * self.size(sizes).chunks

    def head(self, sizes: Sequence[int], chunks: int) -> list[int]:
        """The fewest first blocks of a job, group by group, that have so many chunks; all, where it has fewer."""
        taken = []
        for group, size in zip(self._groups, sizes, strict=True):
            wanted = -(-chunks // len(group.length)) if len(group.length) else size
            taken.append(max(0, min(size, wanted)))
            chunks -= taken[-1] * len(group.length)
        return taken

    def describe(self, rows: np.ndarray, blocks: np.ndarray, sizes: Sequence[int], table: np.ndarray) -> None:
        """Fill a job's table, int64, shape (3, chunks). Row i goes to block i; groups follow each other.

        Raises:
            ValueError: rows, blocks, sizes and table do not agree.

        """
        if not len(rows) == len(blocks) == sum(sizes) or table.shape != (3, self.size(sizes).chunks):
            raise ValueError(
                f"{len(rows)} rows, {len(blocks)} blocks, groups of {list(sizes)}, a table of {table.shape}: "
                "a row and a column for each of the groups' pages"
            )
        rows, blocks = rows.astype(np.int64, copy=False), blocks.astype(np.int64, copy=False)
        first = begin = 0
        for group, size in zip(self._groups, sizes, strict=True):
            last, end = first + size, begin + size * len(group.length)
            if begin < end:
                source, target, length = (part[begin:end].reshape(size, -1) for part in table)
                np.multiply(rows[first:last, None], group.source_stride, out=source)
                source += group.source
                np.multiply(blocks[first:last, None], group.target_stride, out=target)
                target += group.target
                length[:] = group.length
            first, begin = last, end

    def launch(self, table: torch.Tensor) -> None:
        """Copy on the current stream. `table`, contiguous, must stay as it is until the kernel is over."""
        launch(table.data_ptr(), table.shape[1], table.shape[1], self.unit, PROGRAMS)

    def trial(self, device: torch.device) -> bool:
        """Compile the kernel and copy a few chunks of pinned memory; whether every byte, and no other, arrived."""
        pinned, guard, length = device.type == "cuda", 64, 2 * CHUNK_BYTES
        source = torch.randint(-128, 128, (length,), dtype=torch.int8)
        source = source.pin_memory() if pinned else source
        target = torch.full((length + 2 * guard,), 7, dtype=torch.int8, device=device)
        starts = [0, CHUNK_BYTES]
        table = torch.tensor(
            [
                [source.data_ptr() + start for start in starts],
                [target.data_ptr() + guard + start for start in starts],
                [CHUNK_BYTES // self.unit] * len(starts),
            ],
            dtype=torch.int64,
        )
        table = table.pin_memory() if pinned else table
        self.launch(table)
        edge = torch.full((guard,), 7, dtype=torch.int8)
        return torch.equal(target.cpu(), torch.cat([edge, source, edge]))

    def _group(
        self, refs: Sequence[CanonicalKVCacheRef], tier: Sequence[torch.Tensor], device: Sequence[torch.Tensor]
    ) -> _Group:
        chunks = []
        for ref in refs:
            rows, blocks = tier[ref.tensor_idx], device[ref.tensor_idx]
            for start in range(0, ref.page_size_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, ref.page_size_bytes - start)
                sides = (rows.data_ptr() + start, rows.stride(0), blocks.data_ptr() + start, blocks.stride(0))
                chunks.append((*sides, size // self.unit))
        source, source_stride, target, target_stride, length = np.array(chunks, np.int64).reshape(-1, 5).T.copy()
        block = JobSize(len(length), len(refs), sum(ref.page_size_bytes for ref in refs))
        return _Group(source, source_stride, target, target_stride, length, block)


class Gathered(Gather):
    """Makes loads by the kernel alone. Arguments besides those of `Gather`: the lane of all kernels."""

    def __init__(
        self,
        groups: Sequence[Sequence[CanonicalKVCacheRef]],
        tier: Sequence[torch.Tensor],
        device: Sequence[torch.Tensor],
        lane: Lane,
    ) -> None:
        super().__init__(groups, tier, device)
        self.lanes = (lane,)

    def load(
        self,
        rows: np.ndarray,
        blocks: np.ndarray,
        sizes: Sequence[int],
        memory: torch.Tensor,
        follow: Callable[[Lane], None],
    ) -> tuple[Mark, Mark]:
        """Row i goes to block i; groups follow each other. `memory`, int64, pinned, must stay until the job is over."""
        (lane,) = self.lanes
        follow(lane)
        began, head = lane.mark(), self.head(sizes, HEAD_CHUNKS)
        first = begin = 0
        with lane.entered():
            for part in (head, [size - taken for size, taken in zip(sizes, head, strict=True)]):
                chunks, last = self.size(part).chunks, first + sum(part)
                table = memory[begin : begin + 3 * chunks].view(3, chunks)
                self.describe(rows[first:last], blocks[first:last], part, table.numpy())
                self.launch(table)
                first, begin = last, begin + 3 * chunks
        return began, lane.mark()
