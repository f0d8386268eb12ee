"""Digests of pages where the pages are: on the host by XXH3-128, in threads; on a GPU see `device_digests`.

A page's facts are its digest, how many of its bytes are not zero, and how many still hold the sentinel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from typing_extensions import override

SENTINEL = 0x41
"""Non-zero, and finite in every float type: bf16 12.06, fp32 12.08. A load that leaves it is wrong, not a crash."""
_SENTINEL_WORD = np.uint64(int.from_bytes(bytes([SENTINEL] * 8), "little"))
_THREADS = 2


class PageFacts(NamedTuple):
    """What a page holds."""

    digest: str
    """32 hex digits, comparable between digests of one algorithm."""
    nonzero: int
    sentinel: int
    """Bytes in aligned runs of eight that are all sentinel: a run does not occur by chance."""


class Digester(ABC):
    """Reads and fills pages of one device. Pages are uint8, one dimension, contiguous."""

    algorithm: ClassVar[str]
    """Of the digests: `xxh3-128` or `mix128`."""

    @abstractmethod
    def facts(self, pages: list[torch.Tensor]) -> list[PageFacts]:
        """The facts of each page, in order, as the page is when this is called."""

    def fill(self, pages: list[torch.Tensor]) -> int:
        """Fill each page with the sentinel, done when this returns; bytes written."""
        for page in pages:
            page.fill_(SENTINEL)
        return sum(page.numel() for page in pages)


class HostDigester(Digester):
    """Pages in host memory."""

    algorithm = "xxh3-128"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="samestate-digest")

    @override
    def facts(self, pages: list[torch.Tensor]) -> list[PageFacts]:
        return list(self._threads.map(_host_facts, pages))


def _host_facts(page: torch.Tensor) -> PageFacts:
    import xxhash  # not needed, and perhaps not there, where pages are on a GPU

    raw = page.numpy()
    words = raw[: raw.size // 8 * 8].view(np.uint64)
    return PageFacts(
        xxhash.xxh3_128_hexdigest(raw), int(np.count_nonzero(raw)), 8 * int(np.count_nonzero(words == _SENTINEL_WORD))
    )


def digester_for(device: torch.device) -> Digester:
    """The digester of the pages on a device, CPU or CUDA."""
    if device.type == "cpu":
        return HostDigester()
    from samestate.instruments.device_digests import DeviceDigester

    return DeviceDigester(device)
