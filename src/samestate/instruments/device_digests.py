"""Digests of pages by the device that holds them; only the facts come to the host.

**mix128**, the digest. A page is read as little-endian 64-bit words w₀ … wₙ₋₁, the last one padded with zero bytes.
Two lanes, each with an odd γ and a mix of its own, compute modulo 2⁶⁴

    S = Σ mix(wᵢ xor γ·(i+1))        lane = mix(S xor γ·bytes)

and the digest is both lanes, 32 hex digits. Each mix is a bijection in which every input bit flips about half of the
output bits (the finalizers of splitmix64 and murmur3). Sums commute: however a GPU orders them, the digest is the same.

Certain: pages of one length that differ within one word have different digests, in either lane alone, since only one
term of the sum differs; so have pages of equal sums and different lengths.

Expected: everything else (words swapped, a run shifted, zeros added, a page for another) changes several terms to mixed
values of other inputs. Taken as random, both lanes agree with probability 2⁻¹²⁸: about 10⁻²⁷ for any two of 10⁶ pages.

Not cryptographic: it finds accidents; an adversary can make two pages with one digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from typing_extensions import override

from samestate.instruments.digests import SENTINEL, Digester, PageFacts

SENTINEL_WORD = int.from_bytes(bytes([SENTINEL] * 8), "little")
_BATCH_BYTES = 32 << 20
"""Of pages in one pass of `torch_sums`, which needs about four times as much for intermediate values."""

SumsOf: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""From pages to int64, shape (pages, 4), on their device: both lanes' S, non-zero bytes, sentinel words."""


class Lane(NamedTuple):
    """γ, and the steps of the mix: xor with a right shift, times, xor with a right shift, times, xor with a shift."""

    gamma: int
    shift_1: int
    times_1: int
    shift_2: int
    times_2: int
    shift_3: int


LANES = (
    Lane(0x9E3779B97F4A7C15, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31),
    Lane(0xD1B54A32D192ED03, 33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33),
)


class DeviceDigester(Digester):
    """Pages in the memory of a CUDA device, digested there: by the Triton kernel, or torch operations without Triton.

    Order: the digest stream waits for what the current stream held when `facts` was called, and nothing waits for the
    digest stream but the caller. So work already queued goes on beside it, and the pages cannot be rewritten by work
    that the caller queues, since `facts` returns only after they were read.

    Pages in host memory get the same digest from the CPU: both sides of a transfer can be compared.
    """

    algorithm = "mix128"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._sums_of: SumsOf = torch_sums
        if find_spec("triton"):
            from samestate.instruments.triton_digests import triton_sums

            self._sums_of = triton_sums

    @override
    def facts(self, pages: list[torch.Tensor]) -> list[PageFacts]:
        if not pages or not pages[0].is_cuda:
            return page_facts(pages, torch_sums)
        queued = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(queued)
            return page_facts(pages, self._sums_of)

    @override
    def fill(self, pages: list[torch.Tensor]) -> int:
        written = super().fill(pages)
        torch.cuda.current_stream(self._device).synchronize()
        return written


def page_facts(pages: Sequence[torch.Tensor], sums_of: SumsOf) -> list[PageFacts]:
    """The facts of pages on one device, after its current stream has computed them.

    Raises:
        ValueError: a page is not uint8 in one dimension and contiguous, or lies on another device than the first.

    """
    if not pages:
        return []
    for page in pages:
        if page.dtype != torch.uint8 or page.dim() != 1 or not page.is_contiguous() or page.device != pages[0].device:
            raise ValueError(
                f"page {page.dtype} {tuple(page.shape)} stride {page.stride()} on {page.device}: "
                f"pass uint8 in one dimension, contiguous, all on {pages[0].device}"
            )
    sums = sums_of(pages).cpu().numpy()
    digests = _hex(sums[:, :2].view(np.uint64), np.array([page.numel() for page in pages], np.uint64))
    return [
        PageFacts(digest, nonzero, 8 * words)
        for digest, (nonzero, words) in zip(digests, sums[:, 2:].tolist(), strict=True)
    ]


def host_mix128(raw: np.ndarray) -> str:
    """mix128 of bytes in host memory (uint8, one dimension), by numpy: what every other implementation must equal."""
    words = np.frombuffer(raw.tobytes() + bytes(-raw.size % 8), "<u8")
    at = np.arange(1, words.size + 1, dtype=np.uint64)
    sums = [_mix(words ^ at * np.uint64(lane.gamma), lane).sum(dtype=np.uint64) for lane in LANES]
    return _hex(np.array([sums]), np.array([raw.size], np.uint64))[0]


def _hex(sums: np.ndarray, sizes: np.ndarray) -> list[str]:
    """Digests from S, uint64 (pages, 2), and lengths in bytes, uint64 (pages)."""
    lanes = [_mix(sums[:, at] ^ sizes * np.uint64(lane.gamma), lane).tolist() for at, lane in enumerate(LANES)]
    return [f"{first:016x}{second:016x}" for first, second in zip(*lanes, strict=True)]


def _mix(words: np.ndarray, lane: Lane) -> np.ndarray:
    words = (words ^ words >> np.uint64(lane.shift_1)) * np.uint64(lane.times_1)
    words = (words ^ words >> np.uint64(lane.shift_2)) * np.uint64(lane.times_2)
    return words ^ words >> np.uint64(lane.shift_3)


def torch_sums(pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums by torch operations, on any device. Pages are gathered in batches of one length: any alignment."""
    sums = torch.empty((len(pages), 4), dtype=torch.int64, device=pages[0].device)
    for batch in _batches([page.numel() for page in pages]):
        raw = torch.stack([pages[index] for index in batch])
        padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % 8))
        words = padded.view(torch.int64)
        at = torch.arange(1, words.shape[1] + 1, device=words.device)
        sums[batch] = torch.stack(
            [
                *(_mix_in_place(words ^ at * _signed(lane.gamma), lane).sum(1) for lane in LANES),
                torch.count_nonzero(padded, dim=1),
                torch.count_nonzero(words == SENTINEL_WORD, dim=1),
            ],
            dim=1,
        )
    return sums


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of equally long pages, of about `_BATCH_BYTES` together."""
    of_size: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        of_size.setdefault(size, []).append(index)
    for size, indices in of_size.items():
        step = max(1, _BATCH_BYTES // max(1, size))
        for start in range(0, len(indices), step):
            yield indices[start : start + step]


def _mix_in_place(words: torch.Tensor, lane: Lane) -> torch.Tensor:
    words ^= _right(words, lane.shift_1)
    words *= _signed(lane.times_1)
    words ^= _right(words, lane.shift_2)
    words *= _signed(lane.times_2)
    words ^= _right(words, lane.shift_3)
    return words


def _right(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift as if unsigned: torch shifts the sign in."""
    shifted = words >> by
    shifted &= (1 << (64 - by)) - 1
    return shifted


def _signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
