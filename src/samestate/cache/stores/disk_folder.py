"""How a folder of pages is laid out, and who may use it."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from samestate.cache.base import PageKey, StoreError
from samestate.cache.envelope import FORMAT, Namespace
from samestate.cache.stores.disk_budget import PageId, Use
from samestate.cache.stores.disk_files import Errors, file_name, key_of, unlink
from samestate.cache.stores.place import is_digest, named_or_lost

MARKER = "samestate-pages.json"
NAME_FILE = "namespace.txt"
LEFTOVER_SECONDS = 600.0
"""Age from which a file under `tmp` is what a crash left."""


class Folder:
    """A root that holds pages.

    Args:
        create: Make it where it is not there yet.

    Raises:
        StoreError: it is not there and may not be made, or it is a folder of something else.

    """

    def __init__(self, root: Path, create: bool) -> None:
        self.shown = root.absolute().as_uri()
        self.errors = Errors(self.shown)
        self._root = root
        self._marker = root / MARKER
        self._pages = root / f"v{FORMAT}"
        self._tmp = self._pages / "tmp"
        self._token = secrets.token_hex(8)
        self._counter = itertools.count()
        with self.errors:
            self._open(create)
            self._remove_leftovers()

    def require_there(self) -> None:
        """Raises `StoreError` where the folder is gone: then nothing can be said of its pages."""
        try:
            os.stat(self._marker)
        except FileNotFoundError:
            raise StoreError(
                f"{self.shown}: {MARKER} is gone; was the folder removed, or its disk unmounted?"
            ) from None
        except OSError as error:
            self.errors.raise_for(error)

    def pages_of(self, digest: str) -> str:
        """The folder of a namespace, whose digest is given in hex."""
        return f"{self._pages}/{digest}"

    def path_of(self, page: PageId) -> str:
        """The file of a page, there or not."""
        return f"{self.pages_of(page.namespace)}/{file_name(page.key)}"

    def holds(self, page: PageId) -> bool:
        """Whether a page lies there, whole or not."""
        return os.path.exists(self.path_of(page))

    def new_tmp(self) -> str:
        """A path that no other thread, process or machine chooses."""
        return f"{self._tmp}/{self._token}-{os.getpid()}-{next(self._counter)}"

    def make_folders(self, namespace: Namespace, path: str) -> None:
        """What the page at `path` needs, in a root that is there. Raises OSError and `StoreError`."""
        self.require_there()
        self._tmp.mkdir(parents=True, exist_ok=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        name_file = Path(self.pages_of(namespace.digest.hex()), NAME_FILE)
        if not name_file.exists():
            tmp = Path(self.new_tmp())
            tmp.write_text(namespace.name, encoding="utf-8")
            tmp.replace(name_file)

    def namespaces(self) -> list[Namespace]:
        """Those that have a folder."""
        with self.errors:
            return [self._namespace(entry.name) for entry in self._scan(str(self._pages)) if is_digest(entry.name)]

    def pages(self, digest: str) -> Iterator[tuple[PageKey, Use]]:
        """Every page of a namespace. Files of other names are not ours."""
        with self.errors:
            for fan in self._scan(self.pages_of(digest)):
                if len(fan.name) != 2 or not fan.is_dir(follow_symlinks=False):
                    continue
                for entry in self._scan(fan.path):
                    if (key := key_of(entry.name)) is None:
                        continue
                    # Another engine may remove it meanwhile.
                    with suppress(FileNotFoundError):
                        seen = entry.stat(follow_symlinks=False)
                        yield key, Use(seen.st_size, seen.st_mtime)

    def all_pages(self) -> dict[PageId, Use]:
        """Every page of every namespace."""
        digests = [namespace.digest.hex() for namespace in self.namespaces()]
        return {PageId(digest, key): use for digest in digests for key, use in self.pages(digest)}

    def _scan(self, path: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(path) as entries:
                return list(entries)
        except FileNotFoundError:
            self.require_there()
            return []

    def _open(self, create: bool) -> None:
        if self._marker.exists():
            return
        if not create:
            raise StoreError(f"{self.shown}: holds no pages (no {MARKER} there); check the path")
        self._root.mkdir(parents=True, exist_ok=True)
        foreign = any(path.name != "lost+found" for path in self._root.iterdir())
        if foreign and not self._marker.exists():  # another engine may just have made it
            raise StoreError(
                f"{self.shown}: is a folder of something else (no {MARKER} there); name a new or an empty one"
            )
        self._marker.write_text('{"holds": "pages kept by samestate; to be rid of them, remove the folder"}\n')

    def _remove_leftovers(self) -> None:
        old = time.time() - LEFTOVER_SECONDS
        for entry in self._scan(str(self._tmp)):
            # Another engine may be faster, or the folder read-only.
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < old:
                    unlink(entry.path)

    def _namespace(self, digest: str) -> Namespace:
        try:
            name = Path(self.pages_of(digest), NAME_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            name = None
        return named_or_lost(digest, name)
