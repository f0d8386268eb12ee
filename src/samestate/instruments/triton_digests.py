"""mix128 by a Triton kernel: each page is read once, where it lies, and nothing of its size is allocated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from samestate.instruments.device_digests import LANES, SENTINEL_WORD

_BLOCK = 512
"""Words that a program holds at a time."""
_TILE = 4096
"""Words that a program reads."""


@triton.jit
def _mix(
    x: tl.tensor,
    shift_1: tl.constexpr,
    times_1: tl.constexpr,
    shift_2: tl.constexpr,
    times_2: tl.constexpr,
    shift_3: tl.constexpr,
) -> tl.tensor:
    x ^= x >> shift_1
    x *= times_1
    x ^= x >> shift_2
    x *= times_2
    return x ^ (x >> shift_3)


@triton.jit
def _nonzero_bytes(x: tl.tensor) -> tl.tensor:
    """The top bit of each byte, if any of its bits is set; then all counted in the top byte."""
    top = (((x & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | x) & 0x8080808080808080
    return ((top >> 7) * 0x0101010101010101) >> 56


@triton.jit
def _sums(
    pages: tl.tensor,
    sums: tl.tensor,
    sentinel: tl.constexpr,
    gamma_a: tl.constexpr,
    shift_a1: tl.constexpr,
    times_a1: tl.constexpr,
    shift_a2: tl.constexpr,
    times_a2: tl.constexpr,
    shift_a3: tl.constexpr,
    gamma_b: tl.constexpr,
    shift_b1: tl.constexpr,
    times_b1: tl.constexpr,
    shift_b2: tl.constexpr,
    times_b2: tl.constexpr,
    shift_b3: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Program (page, tile): the sums over one tile of one page; nothing where the page has ended.

    `pages` holds the addresses of all pages, then their lengths in bytes; `sums` four numbers for each program.
    """
    address = tl.load(pages + tl.program_id(0))
    size = tl.load(pages + tl.num_programs(0) + tl.program_id(0))
    words = size // 8
    data = address.to(tl.pointer_type(tl.uint64))
    first = tl.program_id(1).to(tl.int64) * tile
    a = tl.zeros([block], tl.uint64)
    b = tl.zeros([block], tl.uint64)
    nonzero = tl.zeros([block], tl.uint64)
    left = tl.zeros([block], tl.uint64)
    for start in range(first, tl.minimum(first + tile, words), block):
        at = start + tl.arange(0, block)
        inside = at < words
        word = tl.load(data + at, mask=inside, other=0)
        key = (at + 1).to(tl.uint64)
        mixed_a = _mix(word ^ (key * gamma_a), shift_a1, times_a1, shift_a2, times_a2, shift_a3)
        mixed_b = _mix(word ^ (key * gamma_b), shift_b1, times_b1, shift_b2, times_b2, shift_b3)
        a += tl.where(inside, mixed_a, 0)
        b += tl.where(inside, mixed_b, 0)
        nonzero += _nonzero_bytes(word)
        left += (word == sentinel).to(tl.uint64)

    # The last word of a page that is no multiple of eight: program 0 adds it.
    offset = words * 8 + tl.arange(0, 8)
    end = tl.where(tl.program_id(1) == 0, size, words * 8)
    byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + offset, mask=offset < end, other=0)
    word = tl.sum(byte.to(tl.uint64) << (8 * tl.arange(0, 8)).to(tl.uint64), 0)
    key = (words + 1).to(tl.uint64)
    mixed_a = _mix(word ^ (key * gamma_a), shift_a1, times_a1, shift_a2, times_a2, shift_a3)
    mixed_b = _mix(word ^ (key * gamma_b), shift_b1, times_b1, shift_b2, times_b2, shift_b3)
    rest = words * 8 < end

    out = sums + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 4
    tl.store(out, (tl.sum(a, 0) + tl.where(rest, mixed_a, 0)).to(tl.int64, bitcast=True))
    tl.store(out + 1, (tl.sum(b, 0) + tl.where(rest, mixed_b, 0)).to(tl.int64, bitcast=True))
    tl.store(out + 2, (tl.sum(nonzero, 0) + _nonzero_bytes(word)).to(tl.int64, bitcast=True))
    tl.store(out + 3, tl.sum(left, 0).to(tl.int64, bitcast=True))


def triton_sums(pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums by the kernel; a page whose address is no multiple of eight is copied first, on its device."""
    aligned = [page if page.data_ptr() % 8 == 0 else page.clone() for page in pages]
    device = pages[0].device
    places = [[page.data_ptr() for page in aligned], [page.numel() for page in aligned]]
    where = torch.from_numpy(np.array(places, np.int64)).to(device)
    tiles = max(1, triton.cdiv(max(page.numel() for page in pages), 8 * _TILE))
    sums = torch.empty((len(pages), tiles, 4), dtype=torch.int64, device=device)
    _sums[len(pages), tiles](where, sums, SENTINEL_WORD, *LANES[0], *LANES[1], block=_BLOCK, tile=_TILE)
    return sums.sum(1)
