"""Pages from pinned host memory into blocks on a CUDA device, by way of a small buffer on the device.

In an engine a row of the memory tier is contiguous host memory that holds the pages of all tensors of a block
(vllm/v1/kv_offload/cpu/shared_offload_region.py, `create_next_worker_view`). So a block is fetched by few large
copies of its row's *spans*, which the copy engine makes at the bus's full rate, and the device scatters the pages from
the buffer by the kernel of `cuda_gather`, at the rate of its own memory.

The buffer is a ring of slabs. One lane fills them, the other empties them: while a slab is scattered the next ones are
filled, and a slab is filled again only behind its scatter. Bytes between pages that were copied with a span stay in
the buffer: the kernel's table names pages only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import CanonicalKVCacheRef

from samestate.cache.cuda_gather import CHUNK_BYTES, WIDE, JobSize, launch
from samestate.cache.cuda_lanes import Lane, Mark
from samestate.cache.cuda_spans import Part, parts, round_up, spans

SLABS = 4
SLAB_BYTES = 16 << 20
"""300 µs of a fast bus; a slab costs the host some 100 µs of calls, and it must stay ahead. A multiple of `WIDE`."""
TAIL_BYTES = 2 << 20
"""Towards a job's end slabs are filled by half of what is left, down to so much: the last is scattered alone."""
PROGRAMS = 64
"""Of the scattering kernel, at most so many at a time, as in `cuda_gather`; it is short. Measured: with 32 it takes
longer, and matrix products beside it do too."""


class _Stretch(NamedTuple):
    """Consecutive blocks of a job, of one part: they fill slabs one after the other."""

    part: Part
    first: int
    last: int
    slab: int
    """Number of the first slab."""
    each: int
    """Blocks in a slab."""
    places: np.ndarray
    """Address of each block's place in the ring, as a column."""
    moves: int
    chunks: int
    """Where the tables begin in the job's memory: sources, targets, lengths of either."""


class _Fill(NamedTuple):
    """One slab's share of a stretch: blocks counted from the stretch's first."""

    stretch: _Stretch
    first: int
    last: int
    slab: int


class Staged:
    """Makes loads between a tier and a device by way of a buffer.

    Args:
        groups: The entries of each group, as vLLM registered them.
        tier: int8, shape (rows, page bytes) each, pinned; one for each of `device`.
        device: int8, shape (blocks, page bytes) each.
        feed: Fills the buffer.
        lane: Empties it into the blocks.
        slabs: In the ring.
        slab_bytes: Of each.

    Attributes:
        unit: Bytes that divide every address and length: 1, 2, 4, 8 or 16.
        lanes: In the order of a job's work.

    """

    def __init__(
        self,
        groups: Sequence[Sequence[CanonicalKVCacheRef]],
        tier: Sequence[torch.Tensor],
        device: Sequence[torch.Tensor],
        feed: Lane,
        lane: Lane,
        slabs: int | None = None,
        slab_bytes: int | None = None,
    ) -> None:
        self.lanes = (feed, lane)
        self._slabs, self._slab_bytes = slabs or SLABS, slab_bytes or SLAB_BYTES
        if self._slab_bytes % WIDE:
            raise ValueError(f"slab_bytes: {self._slab_bytes} is no multiple of {WIDE}")
        numbers = [one for side in (*tier, *device) for one in (side.data_ptr(), side.stride(0))]
        self.unit = math.gcd(WIDE, *numbers, *(ref.page_size_bytes for refs in groups for ref in refs))
        self._ring = torch.empty(self._slabs * self._slab_bytes, dtype=torch.int8, device=device[0].device)
        feed.follow_current()  # Whose work may have used the same memory before.
        self._filled = [feed.signal() for _ in range(self._slabs)]
        self._emptied = [lane.signal() for _ in range(self._slabs)]
        slots = np.arange(2 * self._slabs) % self._slabs
        self._slots: np.ndarray = self._ring.data_ptr() + slots * self._slab_bytes
        """Address of each slab, the ring twice over: a stretch may go past its end."""
        self._next = 0
        """Number of the slab to be filled next, over all jobs."""
        self._parts: list[Part] = []
        self._sizes: list[JobSize] = []
        for number, refs in enumerate(groups):
            found = parts(number, refs, tier, device, self._slab_bytes, self.unit)
            self._parts += found
            chunks = sum(len(part.length) for part in found)
            size = sum(ref.page_size_bytes for ref in refs)
            self._sizes.append(JobSize(chunks, len(refs), size, len(spans(refs, tier))))

    def size(self, sizes: Sequence[int]) -> JobSize:
        """Of a job with so many blocks of each group."""
        return JobSize.of(self._sizes, sizes)

    def numbers(self, sizes: Sequence[int]) -> int:
        """Of the memory for such a job's tables."""
        return sum(3 * sizes[part.group] * (len(part.size) + len(part.length)) for part in self._parts)

    def load(
        self,
        rows: np.ndarray,
        blocks: np.ndarray,
        sizes: Sequence[int],
        memory: torch.Tensor,
        follow: Callable[[Lane], None],
    ) -> tuple[Mark, Mark]:
        """Row i goes to block i; groups follow each other.

        First a slab, then the rest of the ring, then ring by ring: copies are on their way before their kernels, and
        what follows, are described. Described at once, a job would leave the bus idle meanwhile. The first copies wait
        for nothing but room: they write to the buffer, and host memory that is loaded from is written by nobody.

        Args:
            rows: Of the tier.
            blocks: Of the device.
            sizes: Blocks of each group.
            memory: int64, pinned; it must stay as it is until the job is over.
            follow: Lets the lane that writes blocks wait for what it has to.

        Returns: where the first copy began, and where the last kernel is over.

        Raises:
            ValueError: rows, blocks and sizes do not agree.

        """
        if not len(rows) == len(blocks) == sum(sizes):
            raise ValueError(f"{len(rows)} rows, {len(blocks)} blocks, groups of {list(sizes)}: one of each for each")
        rows, blocks = rows.astype(np.int64, copy=False), blocks.astype(np.int64, copy=False)
        feed, lane = self.lanes
        began, numbers = feed.mark(), memory.numpy()
        filled: list[_Stretch] = []
        for number, stretches in enumerate(self._cut(sizes)):
            if number > 1 or self._slabs == 1:  # The first two fill the ring together.
                self._scatter(filled, blocks, memory)
                filled = []
            for stretch in stretches:
                self._describe_moves(stretch, rows, numbers)
            self._feed(stretches, memory)
            if not number:
                follow(lane)
            filled += stretches
        self._scatter(filled, blocks, memory)
        return began, lane.mark()

    def _cut(self, sizes: Sequence[int]) -> Iterator[list[_Stretch]]:
        """The job's first slab, the rest of the ring, and then pieces that fill the ring once."""
        some: list[_Stretch] = []
        begin, until, further = 0, self._next + 1, max(self._slabs - 1, 1)
        for part in self._parts:
            start = sum(sizes[: part.group])
            last = start + sizes[part.group]
            while start < last:
                left, each = last - start, self._slab_bytes // part.bytes
                if left > each:
                    count = each * min((left - 1) // each, until - self._next)
                else:
                    count = each = left if left * part.bytes <= TAIL_BYTES else -(-left // 2)
                split = begin + 3 * count * len(part.size)
                places = self._places(part, count, each)
                some.append(_Stretch(part, start, start + count, self._next, each, places, begin, split))
                start, self._next = start + count, self._next - (-count // each)
                begin = split + 3 * count * len(part.length)
                if self._next == until:
                    yield some
                    some, until, further = [], until + further, self._slabs
        if some:
            yield some

    def _places(self, part: Part, count: int, each: int) -> np.ndarray:
        first = self._next % self._slabs
        slots = self._slots[first : first + -(-count // each)]
        return (slots[:, None] + part.steps[:each]).reshape(-1, 1)[:count]

    def _describe_moves(self, stretch: _Stretch, rows: np.ndarray, numbers: np.ndarray) -> None:
        part, count = stretch.part, stretch.last - stretch.first
        source, target, size = numbers[stretch.moves : stretch.chunks].reshape(3, count, -1)
        np.multiply(rows[stretch.first : stretch.last, None], part.source_stride, out=source)
        source += part.source
        np.add(stretch.places, part.place, out=target)
        size[:] = part.size

    def _describe_chunks(self, stretch: _Stretch, blocks: np.ndarray, numbers: np.ndarray) -> None:
        part, count = stretch.part, stretch.last - stretch.first
        end = stretch.chunks + 3 * count * len(part.length)
        source, target, length = numbers[stretch.chunks : end].reshape(3, count, -1)
        np.add(stretch.places, part.offset, out=source)
        np.multiply(blocks[stretch.first : stretch.last, None], part.target_stride, out=target)
        target += part.target
        length[:] = part.length

    def _feed(self, stretches: Sequence[_Stretch], memory: torch.Tensor) -> None:
        feed, _ = self.lanes
        with feed.entered():
            for fill in chain.from_iterable(map(_fills, stretches)):
                stretch, slot = fill.stretch, fill.slab % self._slabs
                runs = len(stretch.part.size)
                begin, apart = stretch.moves + fill.first * runs, (stretch.last - stretch.first) * runs
                count = (fill.last - fill.first) * runs
                feed.follow(self._emptied[slot])
                self._move(*(memory[at : at + count] for at in range(begin, begin + 3 * apart, apart)))
                feed.record(self._filled[slot])

    def _scatter(self, stretches: Sequence[_Stretch], blocks: np.ndarray, memory: torch.Tensor) -> None:
        """Describe the chunks of slabs that are filled, and empty them."""
        numbers = memory.numpy()
        for stretch in stretches:
            self._describe_chunks(stretch, blocks, numbers)
        _, lane = self.lanes
        with lane.entered():
            for fill in chain.from_iterable(map(_fills, stretches)):
                stretch, slot = fill.stretch, fill.slab % self._slabs
                chunks = len(stretch.part.length)
                begin, apart = stretch.chunks + fill.first * chunks, (stretch.last - stretch.first) * chunks
                lane.follow(self._filled[slot])
                self._launch(memory.data_ptr() + 8 * begin, (fill.last - fill.first) * chunks, apart)
                lane.record(self._emptied[slot])

    def _move(self, source: torch.Tensor, target: torch.Tensor, size: torch.Tensor) -> None:
        # In any order, as vLLM's handler lets its own loads be read, and for the same reason.
        ops.swap_blocks_batch(source, target, size, is_src_access_order_any=True)

    def _launch(self, table: int, count: int, apart: int) -> None:
        launch(table, count, apart, self.unit, PROGRAMS)

    def trial(self, device: torch.device) -> bool:
        """Load a few made-up rows through small slabs; whether every byte, and no other, arrived."""
        pinned, blocks, page = device.type == "cuda", 7, CHUNK_BYTES + self.unit
        row = 3 * page
        store = torch.randint(-128, 128, (blocks, row), dtype=torch.int8)
        store = store.pin_memory() if pinned else store
        tier = [store[:, :page], store[:, 2 * page :]]
        target = torch.full((2, blocks, page), 7, dtype=torch.int8, device=device)
        refs = [CanonicalKVCacheRef(index, page) for index in range(2)]
        small = type(self)([refs], tier, list(target), *self.lanes, 2, 2 * round_up(page))
        memory = self.lanes[0].table(small.numbers([blocks - 1]))
        places = np.arange(blocks - 1)
        try:
            _, ended = small.load(places, places[::-1] + 1, [blocks - 1], memory, lambda lane: lane.follow_current())
            ended.synchronize()
        except BaseException:
            for lane in self.lanes:  # Copies of a trial whose kernel cannot be made still use its buffer.
                lane.drain()
            raise
        expected = torch.full((2, blocks, page), 7, dtype=torch.int8)
        for index, side in enumerate(tier):
            expected[index, 1:] = side[: blocks - 1].flip(0)
        return torch.equal(target.cpu(), expected)


def _fills(stretch: _Stretch) -> Iterator[_Fill]:
    blocks = stretch.last - stretch.first
    for number, first in enumerate(range(0, blocks, stretch.each)):
        yield _Fill(stretch, first, min(first + stretch.each, blocks), stretch.slab + number)
