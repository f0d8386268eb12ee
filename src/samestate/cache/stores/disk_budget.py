"""What a folder may hold: which pages lie there, how many bytes they take, and which go when room is needed.

Where it is known how the pages of a namespace belong together (`disk_families`), whole families go, children before
parents. Elsewhere pages go one by one.

Each process has its own view. It sees what others wrote when it reads the folder again: at the start, and whenever it
wrote a sixteenth of the budget itself. So with n engines on one folder the budget may be overdrawn by n sixteenths.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from samestate.cache.base import PageInfo, PageKey
from samestate.cache.envelope import Namespace
from samestate.cache.family_nodes import Family
from samestate.cache.stores.disk_families import FamilyTree
from samestate.cache.stores.place import Victims

SCANS_PER_BUDGET = 16


class PageId(NamedTuple):
    """A page of a folder."""

    namespace: str
    """The digest, in hex."""
    key: PageKey


class Use(NamedTuple):
    """What a page takes, and when it was last used."""

    stored_bytes: int
    last_used: float
    """Seconds since the epoch."""


class Promise(NamedTuple):
    """Room for a page that is being written."""

    page: PageId
    need: int
    """Bytes."""
    victims: dict[PageId, Use]
    """Whoever writes the page removes them first. A scan may still see them."""


class Budget:
    """Bytes for pages, and which of them are there. Thread-safe; no lock is held while `read_folder` runs.

    Args:
        limit: Bytes, envelopes included.
        read_folder: Every page that lies there now.
        is_there: Whether a page lies there now; asked under the lock, where a write and a removal have met.
        name_of: A namespace's name, for its digest in hex.
        victims: Asked what goes; see `Victims`.

    """

    def __init__(
        self,
        limit: int,
        read_folder: Callable[[], Mapping[PageId, Use]],
        is_there: Callable[[PageId], bool],
        name_of: Callable[[str], str],
        victims: Victims,
    ) -> None:
        self._limit = limit
        self._read_folder = read_folder
        self._is_there = is_there
        self._name_of = name_of
        self._victims = victims
        self._lock = threading.Lock()
        self._pages: OrderedDict[PageId, Use] = OrderedDict()
        """The least recently used first."""
        self._held = 0
        """Bytes of `_pages`."""
        self._promises: list[Promise] = []
        """Of pages that are being written. What was promised or chosen counts here, whatever a scan finds of it."""
        self._since_scan = 0
        self._changed: set[PageId] | None = None
        """What came or went while the folder is being read; None: it is not being read."""
        self._trees: dict[str, FamilyTree] = {}
        """By namespace, where it is known how its pages belong together."""
        self.scan()

    @property
    def held(self) -> int:
        """Bytes of the pages that are known to be there."""
        return self._held

    def claim(self, page: PageId, need: int) -> Promise | None:
        """Promise room for a page; `settle` must follow. None: there is no room."""
        if self._since_scan >= self._limit / SCANS_PER_BUDGET:
            self.scan()
        with self._lock:
            missing = self._held + sum(promise.need for promise in self._promises) + need - self._limit
            chosen = self._choose(missing) if missing > 0 else []
            if chosen is None:
                return None
            promise = Promise(page, need, {victim: self._pages[victim] for victim in chosen})
            self._promises.append(promise)
            for victim in chosen:
                self._put(victim, None)
            return promise

    def settle(self, promise: Promise, written: Use | None) -> None:
        """A promise is over: its page was written, or it was not."""
        page = promise.page
        with self._lock:
            self._promises.remove(promise)
            if self._changed is not None:
                self._changed |= {page, *promise.victims}
            for victim, use in promise.victims.items():
                held = victim in self._pages
                if held and not self._is_there(victim):
                    self._put(victim, None)  # It was written again, and that one was removed.
                elif not held and written is None and self._is_there(victim):
                    self._put(victim, use)  # It could not be removed.
            if written is not None:
                self._since_scan += written.stored_bytes
                if self._is_there(page):  # Somebody may have deleted it before it was settled.
                    self._put(page, written)

    def touch(self, page: PageId, now: float) -> None:
        """It was used."""
        with self._lock:
            if (use := self._pages.get(page)) is not None:
                use = self._pages[page] = use._replace(last_used=now)
                self._pages.move_to_end(page)
                self._plan(page, use)

    def forget(self, page: PageId) -> None:
        """It was not there, or was removed. Where somebody has written it since, it stays."""
        with self._lock:
            if not self._is_there(page):
                self._put(page, None)

    def plant(self, namespace: str, tree: FamilyTree) -> None:
        """From now on this namespace, given by its digest in hex, goes by families. The tree is empty but for links."""
        with self._lock:
            if namespace not in self._trees:
                self._trees[namespace] = tree
                for page, use in self._pages.items():
                    if page.namespace == namespace:
                        tree.add(page.key, *use)

    def learn(self, namespace: str, links: Iterable[tuple[Family, Family]]) -> None:
        """Families of a namespace, with their parents."""
        with self._lock:
            if (tree := self._trees.get(namespace)) is not None:
                tree.learn(links)

    def orphan_bytes(self, namespace: str) -> int | None:
        """Of a namespace that goes by families. Waits for nobody: a scheduler asks."""
        tree = self._trees.get(namespace)
        return tree.orphan_bytes if tree is not None else None

    def scan(self) -> None:
        """Read the folder again, unless another thread is doing so."""
        with self._lock:
            if self._changed is not None:
                return
            self._changed = set()
            self._since_scan = 0
        try:
            found = dict(self._read_folder())
        except BaseException:
            with self._lock:
                self._changed = None
            raise
        with self._lock:
            self._take_over(found, self._changed)
            self._changed = None

    def _take_over(self, found: dict[PageId, Use], changed: set[PageId]) -> None:
        """Go by what a scan found, but for what came or went meanwhile, or is about to. The lock is held."""
        for promise in self._promises:
            changed |= {promise.page, *promise.victims}
        for page in changed:
            found.pop(page, None)
            if (known := self._pages.get(page)) is not None:
                found[page] = known
        for page, use in found.items():
            if (known := self._pages.get(page)) is not None and known.last_used > use.last_used:
                found[page] = use._replace(last_used=known.last_used)
        for tree in self._trees.values():
            with suppress(OSError):  # Another time.
                tree.catch_up()
        for page in self._pages.keys() - found.keys():
            self._plan(page, None)
        before = self._pages
        self._pages = OrderedDict(sorted(found.items(), key=lambda item: item[1].last_used))
        for page, use in self._pages.items():
            if page not in before:
                self._plan(page, use)
        self._held = sum(use.stored_bytes for use in found.values())
        for tree in self._trees.values():
            with suppress(OSError):
                tree.tidy()

    def _put(self, page: PageId, use: Use | None) -> None:
        """What is known of a page from now on; used just now, or not there. The lock is held."""
        if self._changed is not None:
            self._changed.add(page)
        if (before := self._pages.pop(page, None)) is not None:
            self._held -= before.stored_bytes
        if use is not None:
            self._pages[page] = use
            self._held += use.stored_bytes
        self._plan(page, use)

    def _plan(self, page: PageId, use: Use | None) -> None:
        if (tree := self._trees.get(page.namespace)) is None:
            return
        if use is None:
            tree.remove(page.key)
        else:
            tree.add(page.key, *use)

    def _choose(self, missing: int) -> list[PageId] | None:
        if missing > self._held:
            return None  # Nothing may be taken out of a tree for it.
        chosen: dict[PageId, None] = {}
        for info in self._victims(self._infos(), missing):
            page = PageId(Namespace.called(info.namespace).digest.hex(), info.key)
            if page in self._pages and page not in chosen:
                for one in self._with_family(page):
                    if one in self._pages and one not in chosen:
                        chosen[one] = None
                        missing -= self._pages[one].stored_bytes
            if missing <= 0:
                return list(chosen)
        self._replant(chosen)
        return None

    def _with_family(self, page: PageId) -> list[PageId]:
        """What goes when it is this page's turn: the family of its namespace that goes first, not always its own."""
        tree = self._trees.get(page.namespace)
        if tree is None:
            return [page]
        return [PageId(page.namespace, key) for key in tree.evict()] or [page]

    def _replant(self, pages: Iterable[PageId]) -> None:
        """They stay after all."""
        for page in pages:
            self._plan(page, self._pages[page])

    def _infos(self) -> Iterator[PageInfo]:
        for page, use in self._pages.items():
            yield PageInfo(self._name_of(page.namespace), page.key, use.stored_bytes, use.last_used)
