"""Pages in an object store, through fsspec: one object each, under the names that `disk` gives to files.

A page is put with the driver's exclusive creation: the first writer wins, and readers see all of it or none. Where a
driver cannot create exclusively, it is looked first; then of two at the same moment the last wins, and both are whole.
How long a call may take, and how often it is tried, is the driver's affair. Room is the bucket's: give it a lifetime
rule. When a page was last used is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from uuid import uuid4

import fsspec
from typing_extensions import override

from samestate.cache.base import PageInfo, PageKey, Read, StoreError, Write
from samestate.cache.envelope import (
    FORMAT,
    HEADER_BYTES,
    Namespace,
    checksum,
    flat,
    header_fault,
    make_header,
    page_fault,
    require_key,
)
from samestate.cache.stores.disk_files import file_name, key_of
from samestate.cache.stores.place import Address, Manners, Place, PlacedStore, is_digest, named_or_lost

LOCAL = {"file", "local"}
BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
"""Where a put is seen whole or not at all."""
NAME_OBJECT = "namespace.txt"
ASKED_AT_ONCE = 16

_one_writer = threading.Lock()
"""`memory://` looks, and then creates."""


class ObjectPlace(Place):
    """A bucket, or a part of one.

    Args:
        url: As fsspec takes it: ``s3://bucket/prefix``.

    """

    def __init__(self, url: str, shown: str, manners: Manners | None = None, **options: Any) -> None:
        self.shown = shown
        self.manners = manners or Manners()
        with self.errors():
            self.files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        self._root = f"{str(root).rstrip('/')}/v{FORMAT}"
        protocols = self.files.protocol
        self.is_local = bool(LOCAL & {protocols} if isinstance(protocols, str) else LOCAL & set(protocols))
        self.creation: AbstractContextManager[object] = _one_writer if "memory" in protocols else nullcontext()
        self.askers = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="samestate-object")

    @classmethod
    def at(cls, address: Address, manners: Manners) -> ObjectPlace:
        """``object+s3://bucket/prefix``; the driver finds keys and endpoints as it always does. Raises ValueError."""
        address.nothing_left("none: the driver reads its own environment and files")
        protocol = address.scheme.removeprefix("object+")
        if protocol not in LOCAL | BUCKETS | {"memory"}:
            known = ", ".join(sorted(LOCAL | BUCKETS | {"memory"}))
            raise ValueError(f"{address.shown}: pages may be seen half-written there; use one of {known}")
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise ValueError(f"{address.shown}: {error}") from None
        return cls(address.shown.removeprefix("object+"), address.shown, manners)

    @override
    def namespaces(self) -> list[Namespace]:
        with self.errors():
            try:
                paths = self.files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            digests = [path.rstrip("/").rpartition("/")[2] for path in paths]
            return sorted(self._namespace(digest) for digest in digests if is_digest(digest))

    @override
    def store(self, namespace: Namespace, alone: bool = False) -> ObjectStore:
        return ObjectStore(self, namespace, alone)

    @override
    def close(self) -> None:
        self.askers.shutdown(wait=False, cancel_futures=True)

    def folder(self, namespace: Namespace) -> str:
        return f"{self._root}/{namespace.digest.hex()}"

    def create(self, path: str, content: bytes) -> bool:
        """Whether it was not there."""
        if self.is_local:
            return self._create_file(path, content)
        with self.creation:
            try:
                self.files.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):
                if self.files.exists(path):
                    return False
                self.files.pipe_file(path, content)
        return True

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Drivers raise what they like; all of it becomes `StoreError`."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(f"{self.shown}: {why}") from error

    def _create_file(self, path: str, content: bytes) -> bool:
        self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        tmp = f"{path}.{uuid4().hex}"
        try:
            self.files.pipe_file(tmp, content)
            self.files.link(tmp, path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                self.files.rm_file(tmp)
        return True

    def _namespace(self, digest: str) -> Namespace:
        try:
            name = self.files.cat_file(f"{self._root}/{digest}/{NAME_OBJECT}")
        except FileNotFoundError:
            name = None
        return named_or_lost(digest, name)


class ObjectStore(PlacedStore):
    """The pages of one namespace in an object store."""

    cheap_to_ask = False

    def __init__(self, place: ObjectPlace, namespace: Namespace, alone: bool) -> None:
        super().__init__(place, namespace, alone)
        self._place = place
        self._folder = place.folder(namespace)
        self._named = False

    @override
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        with self._place.errors():
            return list(self._place.askers.map(self._is_there, [self._path(key) for key in keys]))

    @override
    def read(self, key: PageKey, into: memoryview) -> Read:
        page = flat(into)
        with self._place.errors():
            try:
                stored = self._place.files.cat_file(self._path(key))
            except FileNotFoundError:
                return Read.MISS
        fault = self._fill(stored, key, page)
        if fault is None:
            return Read.HIT
        self._place.manners.on_damage(self._place.shown, key, fault)
        if not self._place.manners.keep_damaged:
            with suppress(StoreError):
                self.delete([key])
        return Read.DAMAGED

    @override
    def write(self, key: PageKey, page: memoryview) -> Write:
        page = flat(page)
        require_key(key)
        path = self._path(key)
        with self._place.errors():
            if self._is_there(path):
                return Write.PRESENT
            if not self._named:
                self._place.create(f"{self._folder}/{NAME_OBJECT}", self.namespace.encode())
                self._named = True
            whole = b"".join((make_header(self._space, key, page), page))
            return Write.WRITTEN if self._place.create(path, whole) else Write.PRESENT

    @override
    def delete(self, keys: Sequence[PageKey]) -> int:
        there = [key for key, found in zip(keys, self.contains(keys), strict=True) if found]
        removed = 0
        with self._place.errors():
            for key in there:
                with suppress(FileNotFoundError):
                    self._place.files.rm_file(self._path(key))
                    removed += 1
        return removed

    @override
    def scan(self) -> Iterator[PageInfo]:
        with self._place.errors():
            found = self._place.files.find(self._folder, detail=True)
        for path, info in found.items():
            if (key := key_of(path.rpartition("/")[2])) is not None:
                yield PageInfo(self.namespace, key, int(info.get("size") or 0), None)

    def _path(self, key: PageKey) -> str:
        return f"{self._folder}/{file_name(key)}"

    def _is_there(self, path: str) -> bool:
        try:
            self._place.files.info(path)
        except FileNotFoundError:
            return False
        return True

    def _fill(self, stored: bytes, key: PageKey, page: memoryview) -> str | None:
        if len(stored) != HEADER_BYTES + len(page):
            return f"{len(stored)} bytes, not {HEADER_BYTES + len(page)}"
        header = stored[:HEADER_BYTES]
        if fault := header_fault(header, self._space, key, len(page)):
            return fault
        page[:] = memoryview(stored)[HEADER_BYTES:]
        return page_fault(header, checksum(page))
