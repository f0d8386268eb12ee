"""A place that keeps the pages of many namespaces, and how one is named in a URL."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from typing_extensions import override

from samestate.cache.base import PageInfo, PageKey, PageStore
from samestate.cache.envelope import Namespace

Victims = Callable[[Iterable[PageInfo], int], Iterable[PageInfo]]
"""Which pages go when so many bytes are missing, in order: given all pages of the place, the least recently used first.

Asked while the place's bookkeeping is locked: it must not call the store. Bytes are those of `PageInfo.stored_bytes`.
"""

OnDamage = Callable[[str, PageKey, str], None]
"""Told of every damaged page that is met: the place, the key, and what is wrong in a few words."""

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def log_damage(place: str, key: PageKey, fault: str) -> None:
    """One line of warning."""
    _log.warning("%s: page %s is damaged: %s", place, key.hex(), fault)


def least_recently_used(pages: Iterable[PageInfo], missing: int) -> Iterable[PageInfo]:
    """The pages in the order given."""
    return pages


class Place(ABC):
    """Many namespaces in one place. Thread-safe; every method may block and raises `StoreError`."""

    shown: str
    """Its URL, without secrets."""

    @abstractmethod
    def namespaces(self) -> list[Namespace]:
        """Those that pages lie in, by name; where finding out costs much, also those that pages lay in."""

    @abstractmethod
    def store(self, namespace: Namespace, alone: bool = False) -> PageStore:
        """The pages of one namespace. Nothing is written before the first page is.

        `alone`: closing the store closes the place.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads. Safe to call twice."""


class PlacedStore(PageStore):
    """One namespace's pages in a place."""

    def __init__(self, place: Place, namespace: Namespace, alone: bool) -> None:
        self.namespace = namespace.name
        self._space = namespace
        self._whole_place = place if alone else None

    @override
    def close(self) -> None:
        if self._whole_place:
            self._whole_place.close()


class Manners(NamedTuple):
    """How a place is opened."""

    create: bool = True
    """Make the place where it is not there yet, if it can be made."""
    keep_damaged: bool = False
    """Leave damaged pages where they are, for whoever wants to look at them."""
    only_looking: bool = False
    """Reading a page does not count as using it, where the place can tell the two apart."""
    on_damage: OnDamage = log_damage
    victims: Victims = least_recently_used
    """Asked by places that have a budget of their own: folders."""


class Address:
    """A URL taken apart: who reads an option takes it away, and what is left at the end is a mistake.

    Raises:
        ValueError: one line that names the option and the remedy.

    """

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._options = dict(parse_qsl(self._parts.query, keep_blank_values=True))
        host = self._parts.netloc.rpartition("@")[2]
        self.shown = urlunsplit(self._parts._replace(netloc=host, query="", fragment=""))
        self.scheme = self._parts.scheme
        self.host = self._parts.hostname
        self.path = unquote(self._parts.path)
        self.user = unquote(self._parts.username) if self._parts.username else None
        self.password = unquote(self._parts.password) if self._parts.password else None
        try:
            self.port = self._parts.port
        except ValueError:
            raise ValueError(f"{self.shown}: the port is no number of 0 to 65535") from None

    def text(self, name: str) -> str | None:
        return self._options.pop(name, None)

    def seconds(self, name: str, default: float) -> float:
        """A positive number."""
        said = self.text(name)
        if said is None:
            return default
        try:
            seconds = float(said)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{self.shown}: {name}={said}: say seconds, e.g. {name}={default:g}")
        return seconds

    def count(self, name: str, default: int) -> int:
        """A positive whole number."""
        said = self.text(name)
        if said is None:
            return default
        if not said.isdecimal() or int(said) < 1:
            raise ValueError(f"{self.shown}: {name}={said}: say a whole number, e.g. {name}={default}")
        return int(said)

    def size(self, name: str) -> int | None:
        said = self.text(name)
        return None if said is None else parse_size(said, f"{self.shown}: {name}")

    def nothing_left(self, known: str) -> None:
        """Raises ValueError where the URL says what nobody asked for."""
        if self._options:
            raise ValueError(f"{self.shown}: no option {', '.join(sorted(self._options))}; use {known}")


def parse_size(text: str, field: str) -> int:
    """Bytes: ``1073741824``, ``100GiB``, ``1.5 MiB``. Raises ValueError that names the field."""
    number = text.strip().rstrip("BKMGTibkmgt")
    unit = text.strip()[len(number) :].upper()
    try:
        size = float(number) * _UNITS[unit]
        if not 0 <= size < 1 << 63:
            raise ValueError
    except (ValueError, KeyError):
        raise ValueError(f"{field}: {text!r} is no size; say bytes or 512MiB, 100GiB, 2TiB") from None
    return int(size)


def is_digest(text: str) -> bool:
    """Whether it is a namespace's digest, in hex."""
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def named_or_lost(digest: str, name: bytes | None) -> Namespace:
    """The namespace of a digest in hex, by the name that lies beside it, where that is its name."""
    lost = Namespace.unnamed(bytes.fromhex(digest))
    try:
        named = Namespace.named(name.decode()) if name else lost
    except ValueError:
        return lost
    return named if named.digest == lost.digest else lost
