"""How a block's pages lie in its row of the memory tier, and how they go through a slab of `cuda_staged`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef

from samestate.cache.cuda_gather import CHUNK_BYTES, WIDE

GAP_SHARE = 8
"""Bytes between pages are copied too as long as a span has so many times more bytes of pages."""


class Span(NamedTuple):
    """Contiguous host memory of a row; the address is row 0's."""

    start: int
    end: int
    stride: int
    refs: list[CanonicalKVCacheRef]


class _Run(NamedTuple):
    """A piece of a span, at most a slab long, and the pages' chunks in it; addresses are those of row and block 0."""

    source: int
    stride: int
    bytes: int
    chunks: list[tuple[int, int, int, int]]
    """Offset in the run, target, its stride, bytes."""


class Part(NamedTuple):
    """What of a group's blocks goes through the buffer together; a block takes at most a slab. int64 throughout."""

    group: int
    bytes: int
    """That a block takes in a slab."""
    steps: np.ndarray
    """Offset of each block in a slab."""
    source: np.ndarray
    source_stride: np.ndarray
    place: np.ndarray
    """Offset of each run in the block's place in the slab."""
    size: np.ndarray
    """Of each run, in bytes."""
    offset: np.ndarray
    """Of each chunk in the block's place."""
    target: np.ndarray
    target_stride: np.ndarray
    length: np.ndarray
    """Of each chunk, in units."""


def spans(refs: Sequence[CanonicalKVCacheRef], tier: Sequence[torch.Tensor]) -> list[Span]:
    """Pages that lie beside each other in every row, with small gaps between them."""
    found: list[Span] = []
    before, pages = None, 0
    for ref in sorted(refs, key=lambda ref: tier[ref.tensor_idx].data_ptr()):
        rows = tier[ref.tensor_idx]
        start, stride = rows.data_ptr(), rows.stride(0)
        end = start + ref.page_size_bytes
        # Of another allocation, what lies between may be no memory at all.
        kind = rows.untyped_storage().data_ptr(), stride
        if kind == before:
            span = found[-1]
            covered = pages + max(0, end - max(start, span.end))
            longer = max(end, span.end)
            if GAP_SHARE * (longer - span.start - covered) <= covered and longer - span.start <= stride:
                found[-1], pages = Span(span.start, longer, stride, [*span.refs, ref]), covered
                continue
        found.append(Span(start, end, stride, [ref]))
        before, pages = kind, ref.page_size_bytes
    return found


def _runs(span: Span, tier: Sequence[torch.Tensor], device: Sequence[torch.Tensor], slab_bytes: int) -> Iterator[_Run]:
    """The span in equal pieces, of which none is longer than a slab."""
    whole = span.end - span.start
    step = round_up(-(-whole // -(-whole // slab_bytes)))
    for start in range(span.start, span.end, step):
        end = min(start + step, span.end)
        chunks = []
        for ref in span.refs:
            page, blocks = tier[ref.tensor_idx].data_ptr(), device[ref.tensor_idx]
            first, last = max(start, page), min(end, page + ref.page_size_bytes)
            for at in range(first, last, CHUNK_BYTES):
                size = min(CHUNK_BYTES, last - at)
                chunks.append((at - start, blocks.data_ptr() + at - page, blocks.stride(0), size))
        if chunks:
            yield _Run(start, span.stride, end - start, chunks)


def _packed(runs: Sequence[_Run], slab_bytes: int) -> Iterator[list[_Run]]:
    """In their order, as many together as a slab holds."""
    some: list[_Run] = []
    for run in runs:
        if some and sum(round_up(one.bytes) for one in some) + round_up(run.bytes) > slab_bytes:
            yield some
            some = []
        some.append(run)
    if some:
        yield some


def parts(
    group: int,
    refs: Sequence[CanonicalKVCacheRef],
    tier: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    slab_bytes: int,
    unit: int,
) -> list[Part]:
    """All of a group's block, in as few parts as slabs of that size allow."""
    runs = [run for span in spans(refs, tier) for run in _runs(span, tier, device, slab_bytes)]
    return [_part(group, some, unit, slab_bytes) for some in _packed(runs, slab_bytes)]


def _part(group: int, runs: Sequence[_Run], unit: int, slab_bytes: int) -> Part:
    places, moves, chunks = [], [], []
    taken = 0
    for run in runs:
        places.append(taken)
        moves.append((run.source, run.stride, run.bytes))
        chunks += [(taken + offset, *sides, size // unit) for offset, *sides, size in run.chunks]
        taken += round_up(run.bytes)
    source, source_stride, size = np.array(moves, np.int64).T.copy()
    offset, target, target_stride, length = np.array(chunks, np.int64).T.copy()
    place = np.array(places, np.int64)
    steps = np.arange(slab_bytes // taken, dtype=np.int64) * taken
    return Part(group, taken, steps, source, source_stride, place, size, offset, target, target_stride, length)


def round_up(size: int) -> int:
    """To a place where a thread may read `WIDE` bytes at once."""
    return -(-size // WIDE) * WIDE
