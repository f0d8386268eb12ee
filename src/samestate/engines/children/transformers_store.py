"""Where snapshots of a transformers cache lie: the local cache, and the external one of host bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256

import torch

from samestate.engines.children.transformers_cache import Layout, Page

Key = tuple[int, bytes]
"""Entry, and digest of salt and tokens up to the end of the page."""


class CacheFull(ValueError):
    """The external cache has no room. One line that says what to do."""


class Prompt:
    """Tokens of one request, and the keys of their pages."""

    def __init__(self, token_ids: Sequence[int], salt: str | None, layout: Layout) -> None:
        self.token_ids = list(token_ids)
        self._layout = layout
        self._salt = sha256((salt or "").encode()).digest()
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def key(self, entry: int, block: int) -> Key:
        """The key of an entry's page in a block: it is of all tokens before its end, not of its own alone."""
        end = (block + 1) * self._layout.interval
        if end not in self._digests:
            tokens = struct.pack(f"<{end}i", *self.token_ids[:end])
            self._digests[end] = sha256(self._salt + tokens).digest()
        return entry, self._digests[end]

    def longest(self, limit: int, holds: Callable[[Key], bool]) -> int:
        """Tokens of the longest prefix within `limit` of which every page is there; 0 without one."""
        layout = self._layout
        for blocks in range(limit // layout.interval, 0, -1):
            needed = (
                self.key(entry.number, block)
                for entry in layout.entries
                for block in (range(blocks - 1, blocks) if entry.axis is None else range(blocks))
            )
            if all(map(holds, needed)):
                return blocks * layout.interval
        return 0


class External:
    """Host bytes by key. Nothing is ever dropped: a cache that is full says so."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._pages: dict[Key, bytes] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    def put(self, key: Key, page: Page) -> None:
        """Copy a page. Raises `CacheFull`."""
        if self._used + page.numel() > self._capacity:
            raise CacheFull(
                f"the external cache is full at {self._capacity} bytes; make engine.external_cache_bytes larger"
            )
        self._used += page.numel()
        self._pages[key] = page.numpy().tobytes()

    def get(self, key: Key) -> Page:
        """A copy of a page. KeyError without one."""
        return torch.frombuffer(bytearray(self._pages[key]), dtype=torch.uint8)

    def last_of(self, entry: int, but: Key) -> Page | None:
        """The page of an entry that was put last under another key."""
        key = next((key for key in reversed(self._pages) if key[0] == entry and key != but), None)
        return None if key is None else self.get(key)


class Local:
    """Snapshots that a reset drops."""

    def __init__(self) -> None:
        self._pages: dict[Key, Page] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    def put(self, key: Key, page: Page) -> None:
        self._pages[key] = page

    def get(self, key: Key) -> Page:
        """The page itself, which nobody writes to: `Layout.restore` copies. KeyError without one."""
        return self._pages[key]

    def clear(self) -> None:
        self._pages.clear()
