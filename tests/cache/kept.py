"""Places to keep pages in, for tests: each can be opened again, and looked at and damaged behind the stores' backs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import fsspec
from typing_extensions import override

from samestate.cache.base import PageKey, PageStore, Read
from samestate.cache.envelope import Namespace
from samestate.cache.stores.disk import DiskPlace
from samestate.cache.stores.disk_files import file_name
from samestate.cache.stores.object import ObjectPlace
from samestate.cache.stores.place import Address, Manners, Place

NAME = "model tiny, revision 1, ranks 1"
SPACE = Namespace.named(NAME)
OTHER = Namespace.named("model tiny, revision 2, ranks 1")
MIB = 1 << 20


def key(number: int, group: int = 0) -> PageKey:
    """As vLLM's: 32 bytes of a hash, 4 of the group."""
    return PageKey(number.to_bytes(4, "big") * 8 + group.to_bytes(4, "big"))


def page(number: int, size: int = 5000) -> memoryview:
    """Bytes that tell which page they are of."""
    return memoryview((f"page {number} ".encode() * (size // 6 + 1))[:size])


def read(store: PageStore, of: PageKey, size: int = 5000) -> tuple[Read, bytes]:
    """What reading gave, and what then lies in the buffer."""
    into = bytearray(b"\xee" * size)
    return store.read(of, memoryview(into)), bytes(into)


def holds(store: PageStore, number: int, size: int = 5000) -> bool:
    """Whether the page is there and right. Fails where it is served wrong."""
    seen, got = read(store, key(number), size)
    assert seen is not Read.HIT or got == page(number, size)
    return seen is Read.HIT


class Kept(ABC):
    """A kind of place, empty."""

    url: str

    @abstractmethod
    def open(self, manners: Manners | None = None) -> Place:
        """The same place every time."""

    @abstractmethod
    def get(self, of: PageKey) -> bytes | None:
        """What lies there for a page of `SPACE`, envelope included."""

    @abstractmethod
    def put(self, of: PageKey, stored: bytes) -> None:
        """Let this lie there."""

    def store(self, space: Namespace = SPACE) -> PageStore:
        return self.open().store(space)


class OnDisk(Kept):
    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.url = root.as_uri()
        self.has_budget = "budget_bytes" in options
        self._options = options

    @override
    def open(self, manners: Manners | None = None) -> DiskPlace:
        return DiskPlace(self.root, manners=manners, **self._options)

    @override
    def get(self, of: PageKey) -> bytes | None:
        path = self.path(of)
        return path.read_bytes() if path.exists() else None

    @override
    def put(self, of: PageKey, stored: bytes) -> None:
        self.path(of).parent.mkdir(parents=True, exist_ok=True)
        self.path(of).write_bytes(stored)

    def path(self, of: PageKey, space: Namespace = SPACE) -> Path:
        return self.root / "v1" / space.digest.hex() / file_name(of)


class InObjects(Kept):
    """`memory` or `file`, through fsspec."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files, self.root = fsspec.core.url_to_fs(url.removeprefix("object+"))
        if self.files.exists(self.root):
            self.files.rm(self.root, recursive=True)

    @override
    def open(self, manners: Manners | None = None) -> ObjectPlace:
        return ObjectPlace.at(Address(self.url), manners or Manners())

    @override
    def get(self, of: PageKey) -> bytes | None:
        return bytes(self.files.cat_file(self.path(of))) if self.files.exists(self.path(of)) else None

    @override
    def put(self, of: PageKey, stored: bytes) -> None:
        self.files.pipe_file(self.path(of), stored)

    def path(self, of: PageKey) -> str:
        return f"{self.root}/v1/{SPACE.digest.hex()}/{file_name(of)}"
