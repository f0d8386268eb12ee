"""Where pages are kept beyond the memory tier: types and one ABC.

A *page* here is what vLLM's tiering moves as one chunk: the bytes of one offload key (block hash and group) over all
ranks of an engine. A *namespace* is everything that the bytes depend on besides the key; stores never mix namespaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple, NewType

PageKey = NewType("PageKey", bytes)
"""vLLM's `OffloadKey`: block hash, then group index (vllm/v1/kv_offload/base.py)."""


class StoreError(Exception):
    """The store cannot be used now: gone, full, read-only, slow. ``str(error)`` is one line. Never a damaged page."""


class Read(StrEnum):
    """What reading a page gave."""

    HIT = "hit"
    """Present, whole, its checksum right; the bytes are in the caller's buffer."""
    MISS = "miss"
    DAMAGED = "damaged"
    """Present, and short, long, of another key or with a wrong checksum. Never served; the buffer is undefined."""


class Write(StrEnum):
    """What writing a page gave."""

    WRITTEN = "written"
    PRESENT = "present"
    """Somebody wrote this key before: first wins, and theirs stays."""
    NO_ROOM = "no-room"
    """The budget is spent and nothing may be evicted."""


class Groups(NamedTuple):
    """vLLM's cache groups, by what a prefix needs of them."""

    pages: frozenset[int]
    """A page at every boundary."""
    states: frozenset[int]
    """The page at the last boundary."""


class PageInfo(NamedTuple):
    """A page as an administrator sees it."""

    namespace: str
    key: PageKey
    stored_bytes: int
    """With its envelope."""
    last_used: float | None
    """Seconds since the epoch; None where the store does not know."""


class PageStore(ABC):
    """Pages of one namespace in one place. Thread-safe. Every call may block: none is made by the scheduler's thread.

    Every method raises `StoreError` when the place cannot be used; the caller goes on without it.
    """

    namespace: str
    cheap_to_ask: ClassVar[bool] = True
    """Whether `contains` may be called for every prefix that was used, only to see whether something is missing."""

    @abstractmethod
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which pages are there, in the order of `keys`. Presence promises no wholeness: `read` decides."""

    @abstractmethod
    def read(self, key: PageKey, into: memoryview) -> Read:
        """Fill `into`, exactly, and verify before returning `Read.HIT`. A damaged page is removed."""

    @abstractmethod
    def write(self, key: PageKey, page: memoryview) -> Write:
        """Put a page where readers see all of it or none."""

    def touch(self, keys: Sequence[PageKey]) -> None:  # noqa: B027
        """Pages of one prefix, in its order, were used, or one was added to them. Some may not be there.

        A place that evicts the least recently used page so keeps the first one longest: without it the others are of
        no use. Places that cannot be told do nothing.
        """

    def relate(self, keys: Sequence[PageKey]) -> None:  # noqa: B027
        """These pages are of one prefix, in its order; at least one of them is about to be written.

        Places that evict by families want to know before the page is there.
        """

    def describe(self, groups: Groups) -> None:  # noqa: B027
        """Say what the groups of the namespace's keys are. Places that evict by families want to know."""

    @property
    def orphan_bytes(self) -> int | None:
        """Stored bytes that no restorable prefix needs, as counted while pages come and go; None: not counted."""
        return None

    def measure_orphans(self) -> int | None:
        """The same, found by looking at every page; None: the place cannot tell."""
        return None

    @abstractmethod
    def delete(self, keys: Sequence[PageKey]) -> int:
        """Remove pages; how many were there."""

    @abstractmethod
    def scan(self) -> Iterator[PageInfo]:
        """Every page of the namespace, in any order."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Safe to call twice."""
