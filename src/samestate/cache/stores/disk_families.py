"""Which pages of a folder belong together, so that what goes are whole families and none that another one needs.

Beside the pages of a namespace lie::

    groups.json    {"pages": [0], "states": [1, 2]}     of vLLM's cache groups, which are needed where
    links.txt      one line a family: its name and its parent's, in hex

Engines add links before they write pages. Until all pages of a prefix are there, those that are look like orphans: what
was used in the last minute is not taken for one. Both files only say what goes first and what is an orphan: without
them, or with a torn line, a family counts as a first one, and no page is served that would not be otherwise.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from samestate.cache.base import Groups, PageKey
from samestate.cache.family_index import FamilyIndex
from samestate.cache.family_nodes import Family, Want

GROUPS_FILE = "groups.json"
LINKS_FILE = "links.txt"
FEW_LINES = 4096
"""A file of so few dead lines is left as it is."""
GROWING_SECONDS = 60.0
"""For so long after its use more of a prefix may be on its way."""
_GROUP_BYTES = 4
"""At the end of a key, big-endian (vllm/v1/kv_offload/base.py, ``make_offload_key``)."""


def family_of(key: PageKey) -> Family:
    """The family that a page belongs to: vLLM's block hash."""
    return Family(key[:-_GROUP_BYTES])


def _group_of(key: PageKey) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def _key(family: Family, group: int) -> PageKey:
    return PageKey(family + group.to_bytes(_GROUP_BYTES, "big"))


def chain_of(keys: Iterable[PageKey]) -> list[Family]:
    """The families of a prefix, given its pages in order."""
    return list(dict.fromkeys(family_of(key) for key in keys))


class FamilyFiles:
    """What lies beside the pages of a namespace. Thread-safe; several engines may add to it."""

    def __init__(self, folder: str) -> None:
        self._groups_file = Path(folder, GROUPS_FILE)
        self._links_file = Path(folder, LINKS_FILE)
        self._lock = threading.Lock()
        self._parents: dict[Family, Family] | None = None
        self._seen = (0, 0)
        """How far the file of links was read: its inode, and bytes of it."""
        self._dead = 0
        """Lines of the file that nobody here wants any more."""
        self._told: dict[Family, float] = {}
        """When it was last told, or read, of families whose pages may be on their way."""

    def groups(self) -> Groups | None:
        """None: no engine has said so yet, or the file cannot be read."""
        try:
            said = json.loads(self._groups_file.read_bytes())
            return Groups(frozenset(map(int, said["pages"])), frozenset(map(int, said["states"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def parents(self) -> dict[Family, Family]:
        """The parent of every family that has one, as far as it was written down."""
        with self._lock:
            return dict(self._known())

    def learn(self, chain: Sequence[Family], groups: Groups | None) -> list[tuple[Family, Family]]:
        """Write down what is new of a prefix, and return it: each family with its parent. Raises OSError."""
        with self._lock:
            self._told |= dict.fromkeys(chain[1:], time.time())
            known = self._known()
            new = [(family, above) for above, family in pairwise(chain) if family not in known]
            if groups is not None and not self._groups_file.exists():
                said = {name: sorted(ids) for name, ids in groups._asdict().items()}
                self._replace(self._groups_file, json.dumps(said) + "\n")
            if new:
                self._append(new)
                known.update(new)
            return new

    def catch_up(self) -> list[tuple[Family, Family]]:
        """What others wrote down since the file was last read: families with their parents. Raises OSError."""
        with self._lock:
            known = self._known()
            new = [(family, above) for family, above in self._unread() if family not in known]
            known.update(new)
            self._told |= dict.fromkeys((family for family, _ in new), time.time())
            return new

    def keep(self, wanted: Callable[[Family], bool]) -> None:
        """Forget what families are linked to that are neither wanted nor expected; they are learnt when they come back.

        The file is written anew once most of it is of such families. What another engine adds at that moment is lost.
        Raises OSError.
        """
        with self._lock:
            since = time.time() - GROWING_SECONDS
            told = self._told = {family: at for family, at in self._told.items() if at >= since}
            lines = len(self._known())
            self._parents = {
                family: above for family, above in self._known().items() if family in told or wanted(family)
            }
            self._dead += lines - len(self._parents)
            if self._dead <= max(len(self._parents), FEW_LINES):
                return
            # Others' links too: they may have written since this file was read.
            self._seen = (0, 0)
            links = {family: above for family, above in self._unread() if family in told or wanted(family)}
            self._replace(self._links_file, _lines(links.items()))
            self._parents, self._dead = links, 0

    def _replace(self, path: Path, text: str) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        draft.write_text(text)
        draft.replace(path)

    def _append(self, new: list[tuple[Family, Family]]) -> None:
        # In one piece, behind whatever another engine wrote; the first newline ends a line that a crash tore.
        text = f"\n{_lines(new)}".encode()
        with self._links_file.open("ab", buffering=0) as file:
            if file.write(text) != len(text):  # It is tried again with the next page.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            end = file.tell()
            if self._seen == (os.fstat(file.fileno()).st_ino, end - len(text)):
                self._seen = (self._seen[0], end)

    def _known(self) -> dict[Family, Family]:
        if self._parents is None:
            self._parents = dict(self._unread())
        return self._parents

    def _unread(self) -> list[tuple[Family, Family]]:
        """Links in whole lines behind those that were read; from the first on, where the file was written anew."""
        try:
            file = self._links_file.open("rb")
        except FileNotFoundError:
            self._seen = (0, 0)
            return []
        with file:
            seen = os.fstat(file.fileno())
            inode, begin = self._seen
            if inode != seen.st_ino or begin > seen.st_size:
                begin = 0
            file.seek(begin)
            links = []
            for line in file:
                if not line.endswith(b"\n"):
                    break  # Another engine is writing it, or a crash tore it.
                begin += len(line)
                links += _links_of(line)
            self._seen = (seen.st_ino, begin)
        return links


def _lines(links: Iterable[tuple[Family, Family]]) -> str:
    return "".join(f"{family.hex()} {above.hex()}\n" for family, above in links)


def _links_of(line: bytes) -> list[tuple[Family, Family]]:
    """The link that a line says: none, or one."""
    words = line.split()
    with suppress(ValueError):
        # A name that was cut is shorter than the other one.
        if len(words) == 2 and len(words[0]) == len(words[1]):
            family, above = (bytes.fromhex(word.decode()) for word in words)
            return [(Family(family), Family(above))]
    return []


class FamilyTree:
    """The families of one namespace, for a budget. Not thread-safe.

    Args:
        groups: Which groups are needed where.
        files: What lies beside the pages.

    Raises OSError where the files cannot be read.

    """

    def __init__(self, groups: Groups, files: FamilyFiles) -> None:
        self._index = FamilyIndex(groups.pages, groups.states)
        self._files = files
        self._parents = files.parents()
        self._growing: OrderedDict[Family, float] = OrderedDict()
        """When families were last used that may be growing; the least recently used first."""

    @property
    def orphan_bytes(self) -> int:
        """Stored bytes that no restorable prefix needs."""
        return self._index.orphan_bytes

    def filled(self, pages: Iterable[tuple[PageKey, tuple[int, float]]]) -> FamilyTree:
        """Itself, with these pages: each with its stored bytes, and when it was last used."""
        for key, (stored_bytes, last_used) in pages:
            self.add(key, stored_bytes, last_used)
        return self

    def add(self, key: PageKey, stored_bytes: int, last_used: float) -> None:
        """A page is there; it was used at that time, in seconds since the epoch, and later than those added before."""
        family = family_of(key)
        self._index.add(family, _group_of(key), stored_bytes, parent=self._parents.get(family))
        below = self._parents.get(family)
        while below is not None and (above := self._parents.get(below)) is not None:
            if not self._index.link(below, above):
                break
            below = above
        self._index.touch([family])
        if last_used > time.time() - GROWING_SECONDS:
            self._growing[family] = last_used
            self._growing.move_to_end(family)
            self._index.want(family, Want.GROWING)

    def remove(self, key: PageKey) -> None:
        """A page is not there."""
        self._index.remove(family_of(key), _group_of(key))

    def learn(self, links: Iterable[tuple[Family, Family]]) -> None:
        """Families with their parents."""
        for family, above in links:
            self._parents[family] = above
            self._index.link(family, above)

    def catch_up(self) -> None:
        """Learn what other engines wrote down: they did so before they wrote the pages. Raises OSError."""
        self.learn(self._files.catch_up())

    def tidy(self) -> None:
        """Forget links of families that are not there any more. Raises OSError."""
        self._files.keep(lambda family: family in self._index)
        self._parents = self._files.parents()

    def evict(self) -> list[PageKey]:
        """Take out the family that goes first, and those above it that nothing needs then. Empty: there is none."""
        since = time.time() - GROWING_SECONDS
        while self._growing and next(iter(self._growing.values())) < since:
            self._index.want(self._growing.popitem(last=False)[0], Want.NO)
        return [_key(member.family, member.group) for member in self._index.evict(1) or []]
