"""Pages in a folder, one file each, shared by any number of engines.

::

    ROOT/samestate-pages.json                          says that the folder is ours; without it nothing is done here
    ROOT/v1/tmp/…                                      pages that are being written
    ROOT/v1/<namespace's digest>/namespace.txt         the namespace's name
    ROOT/v1/<namespace's digest>/groups.json, links.txt   how its pages belong together (`disk_families`)
    ROOT/v1/<namespace's digest>/<2 hex>/<key in hex>.page

A page is written under `tmp`, then linked to its name, which fails where somebody was first. Readers see all of it
or none. Nothing is synced: after a power failure a page may be short or hold zeros; its checksum says so, and it goes.
A page's time of modification is when it was last used, to a minute. A folder that vanished, or whose disk is no longer
mounted, is never made anew: it is a `StoreError` until it is back.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from samestate.cache.base import Groups, PageInfo, PageKey, Read, Write
from samestate.cache.envelope import HEADER_BYTES, Namespace, flat, make_header, require_key
from samestate.cache.stores.disk_budget import Budget, PageId, Promise, Use
from samestate.cache.stores.disk_families import FamilyFiles, FamilyTree, chain_of
from samestate.cache.stores.disk_files import NEW_FILE, publish, read_page, unlink, write_all
from samestate.cache.stores.disk_folder import Folder
from samestate.cache.stores.place import Address, Manners, Place, PlacedStore

TOUCH_SECONDS = 60.0
"""How exactly the folder knows when a page was last used."""


class DiskPlace(Place):
    """A folder.

    Args:
        budget_bytes: Of all namespaces together, envelopes included. None: as much as the disk gives.

    Raises:
        StoreError: it is not there and may not be made, or it is a folder of something else.

    """

    def __init__(self, root: Path, budget_bytes: int | None = None, manners: Manners | None = None) -> None:
        self.manners = manners or Manners()
        self.folder = Folder(root, self.manners.create)
        self.shown = self.folder.shown
        self._names: dict[str, str] = {}
        self._files: dict[str, FamilyFiles] = {}
        self.budget: Budget | None = None
        if budget_bytes is not None:
            self.budget = Budget(
                budget_bytes, self.folder.all_pages, self.folder.holds, self._name_of, self.manners.victims
            )
            for namespace in self.folder.namespaces():
                self.plant(namespace.digest.hex(), None)

    def files(self, digest: str) -> FamilyFiles:
        """What lies beside the pages of a namespace, whose digest is given in hex."""
        return self._files.setdefault(digest, FamilyFiles(self.folder.pages_of(digest)))

    def plant(self, digest: str, groups: Groups | None) -> None:
        """Have the budget go by families in this namespace, where it is known what its groups are."""
        files = self.files(digest)
        groups = groups or files.groups()
        if self.budget is not None and groups is not None:
            self.budget.plant(digest, FamilyTree(groups, files))

    @classmethod
    def at(cls, address: Address, manners: Manners) -> DiskPlace:
        """``file:///path[?budget=100GiB]``. Raises ValueError and `StoreError`."""
        budget = address.size("budget")
        address.nothing_left("budget=100GiB")
        if address.host or not address.path.startswith("/"):
            raise ValueError(f"{address.shown}: name the whole path of a folder: file:///path")
        return cls(Path(address.path), budget, manners)

    @override
    def namespaces(self) -> list[Namespace]:
        return sorted(space for space in self.folder.namespaces() if any(self.folder.pages(space.digest.hex())))

    @override
    def store(self, namespace: Namespace, alone: bool = False) -> DiskStore:
        self._names[namespace.digest.hex()] = namespace.name
        return DiskStore(self, namespace, alone)

    @override
    def close(self) -> None:
        pass

    def _name_of(self, digest: str) -> str:
        if digest not in self._names:
            self._names |= {namespace.digest.hex(): namespace.name for namespace in self.folder.namespaces()}
        return self._names.setdefault(digest, Namespace.unnamed(bytes.fromhex(digest)).name)


class DiskStore(PlacedStore):
    """The pages of one namespace in a folder."""

    def __init__(self, place: DiskPlace, namespace: Namespace, alone: bool) -> None:
        super().__init__(place, namespace, alone)
        self._place = place
        self._folder = place.folder
        self._errors = place.folder.errors
        self._digest = namespace.digest.hex()
        self._files = place.files(self._digest)
        self._groups: Groups | None = None

    @override
    def describe(self, groups: Groups) -> None:
        self._groups = groups
        with self._errors:
            self._place.plant(self._digest, groups)

    @property
    @override
    def orphan_bytes(self) -> int | None:
        return self._place.budget.orphan_bytes(self._digest) if self._place.budget else None

    @override
    def measure_orphans(self) -> int | None:
        if (groups := self._files.groups()) is None:
            return None
        with self._errors:
            return FamilyTree(groups, self._files).filled(self._folder.pages(self._digest)).orphan_bytes

    @override
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found = [os.path.exists(self._path(key)) for key in keys]
        if not all(found):
            self._folder.require_there()
        return found

    @override
    def read(self, key: PageKey, into: memoryview) -> Read:
        page = flat(into)
        try:
            # Not to be kept waiting by a pipe that somebody put there.
            file = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self._folder.require_there()
            self._forget(key)
            return Read.MISS
        except OSError as error:
            self._errors.raise_for(error)
        try:
            fault = read_page(file, self._space, key, page)
            if fault is None:
                self._touch(file, key)
                return Read.HIT
        except OSError as error:
            if error.errno == errno.EIO:
                # A bad sector. Left there, it would tell every later reader that the whole disk is broken.
                self._remove_damaged(key)
            self._errors.raise_for(error)
        finally:
            os.close(file)
        self._place.manners.on_damage(self._place.shown, key, fault)
        self._remove_damaged(key)
        return Read.DAMAGED

    @override
    def write(self, key: PageKey, page: memoryview) -> Write:
        page = flat(page)
        require_key(key)
        path, need = self._path(key), HEADER_BYTES + len(page)
        if os.path.exists(path):
            return Write.PRESENT
        if (promise := self._make_room(key, need)) is None:
            return Write.NO_ROOM
        written = None
        try:
            with self._errors:
                done = self._write(path, make_header(self._space, key, page), page)
            written = Use(need, time.time()) if done is Write.WRITTEN else None
            return done
        finally:
            self._settle(promise, written)

    @override
    def touch(self, keys: Sequence[PageKey]) -> None:
        if not keys:
            return
        now = time.time()
        first, last = self._last_used(keys[0], now), self._last_used(keys[-1], now)
        fresh = first >= last > now - TOUCH_SECONDS
        for position, key in enumerate(reversed(keys)):
            if self._place.budget:
                self._place.budget.touch(PageId(self._digest, key), now)
            if not fresh:
                # The first page gets the latest time, so that a restart finds the same order.
                at = int(now * 1e9) + 1000 * position
                with suppress(OSError):
                    os.utime(self._path(key), ns=(at, at))
        # Whoever copied pages here did not know what belongs together.
        if os.path.isdir(self._folder.pages_of(self._digest)):
            self.relate(keys)

    @override
    def relate(self, keys: Sequence[PageKey]) -> None:
        if self._groups is None or not keys:
            return
        with suppress(OSError):  # It costs the order of eviction only; what is wrong with the disk, `write` says.
            if not os.path.isdir(self._folder.pages_of(self._digest)):
                self._folder.make_folders(self._space, self._path(keys[0]))
            links = self._files.learn(chain_of(keys), self._groups)
            if links and self._place.budget:
                self._place.budget.learn(self._digest, links)

    @override
    def delete(self, keys: Sequence[PageKey]) -> int:
        return sum(self._delete(key) for key in keys)

    @override
    def scan(self) -> Iterator[PageInfo]:
        for key, use in self._folder.pages(self._digest):
            yield PageInfo(self.namespace, key, use.stored_bytes, use.last_used)

    def _path(self, key: PageKey) -> str:
        return self._folder.path_of(PageId(self._digest, key))

    def _write(self, path: str, header: bytes, page: memoryview) -> Write:
        tmp = self._folder.new_tmp()
        try:
            file = os.open(tmp, NEW_FILE, 0o666)
        except FileNotFoundError:
            self._folder.make_folders(self._space, path)
            file = os.open(tmp, NEW_FILE, 0o666)
        try:
            try:
                write_all(file, [memoryview(header), page])
            finally:
                os.close(file)
            try:
                return publish(tmp, path)
            except FileNotFoundError:
                self._folder.make_folders(self._space, path)
                return publish(tmp, path)
        finally:
            with suppress(OSError):
                unlink(tmp)

    def _make_room(self, key: PageKey, need: int) -> Promise | None:
        if self._place.budget is None:
            return Promise(PageId(self._digest, key), need, {})
        promise = self._place.budget.claim(PageId(self._digest, key), need)
        try:
            with self._errors:
                for victim in promise.victims if promise else ():
                    unlink(self._folder.path_of(victim))
        except BaseException:
            self._settle(promise, None)
            raise
        return promise

    def _settle(self, promise: Promise | None, written: Use | None) -> None:
        if self._place.budget and promise:
            self._place.budget.settle(promise, written)

    def _touch(self, file: int, key: PageKey) -> None:
        if self._place.manners.only_looking:
            return
        now = time.time()
        if self._place.budget:
            self._place.budget.touch(PageId(self._digest, key), now)
        if now - os.fstat(file).st_mtime > TOUCH_SECONDS:
            # In a folder that is read-only, others then see an older time.
            with suppress(OSError):
                os.utime(file)

    def _last_used(self, key: PageKey, otherwise: float) -> float:
        try:
            return os.stat(self._path(key)).st_mtime
        except OSError:
            return otherwise

    def _delete(self, key: PageKey) -> bool:
        with self._errors:
            there = unlink(self._path(key))
        if not there:
            self._folder.require_there()
        self._forget(key)
        return there

    def _remove_damaged(self, key: PageKey) -> None:
        if not self._place.manners.keep_damaged:
            with suppress(OSError):
                unlink(self._path(key))
            self._forget(key)

    def _forget(self, key: PageKey) -> None:
        if self._place.budget:
            self._place.budget.forget(PageId(self._digest, key))
