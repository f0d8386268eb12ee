"""What an administrator does with a place: look, verify, evict, copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import hexdigits
from typing import NamedTuple

from samestate.cache.base import PageInfo, PageKey, PageStore, Read, Write
from samestate.cache.envelope import HEADER_BYTES, Namespace
from samestate.cache.stores.place import Place

Told = Callable[[int], None]
"""Told of every page that is done: its stored bytes."""
FEWEST_DIGITS = 4
FEWEST_KEY_DIGITS = 8


class Stat(NamedTuple):
    """A namespace from afar."""

    namespace: Namespace
    pages: int
    stored_bytes: int
    """With their envelopes."""
    last_used: float | None
    """Seconds since the epoch; None where there are no pages, or the place does not know."""
    orphan_bytes: int | None = None
    """Stored bytes that no restorable prefix needs; None: the place cannot tell."""


class Verified(NamedTuple):
    """Every page of a namespace, read."""

    namespace: Namespace
    whole: int
    stored_bytes: int
    """Of the whole ones."""
    damaged: list[PageKey]
    gone: int
    """Pages that were there when it began and then were not."""


class Evicted(NamedTuple):
    """What went, or would go."""

    pages: int
    stored_bytes: int


class Warmed(NamedTuple):
    """Pages of a namespace, copied."""

    namespace: Namespace
    copied: int
    stored_bytes: int
    """Of the copied ones."""
    present: int
    """Were there before."""
    no_room: int
    damaged: list[PageKey]
    """At their source, and so not copied."""


def choose(place: Place, wanted: str | None) -> list[Namespace]:
    """All namespaces of a place, or the one of that name or whose digest begins so. Raises ValueError for none."""
    spaces = place.namespaces()
    if wanted is None:
        return spaces
    named = [space for space in spaces if space.name == wanted]
    begin = [space for space in spaces if len(wanted) >= FEWEST_DIGITS and space.digest.hex().startswith(wanted)]
    found = named or begin
    if len(found) != 1:
        known = ", ".join(space.digest.hex()[:12] for space in found or spaces) or "none"
        raise ValueError(f"--namespace: {len(found)} of them are {wanted!r}; there: {known}")
    return found


def stat(place: Place, namespaces: Iterable[Namespace]) -> list[Stat]:
    """Count the pages. Raises `StoreError`."""
    return [_stat(space, place.store(space)) for space in namespaces]


def verify(store: PageStore, namespace: Namespace, told: Told) -> Verified:
    """Read every page and its checksum. Damaged ones go, unless the place was opened to keep them."""
    whole = held = gone = 0
    damaged: list[PageKey] = []
    for info, seen, _ in _read_all(store, list(store.scan())):
        if seen is Read.DAMAGED:
            damaged.append(info.key)
        elif seen is Read.MISS:
            gone += 1
        else:
            whole, held = whole + 1, held + info.stored_bytes
        told(info.stored_bytes)
    return Verified(namespace, whole, held, damaged, gone)


def evict(
    place: Place,
    namespaces: Iterable[Namespace],
    used_before: float | None = None,
    leave_bytes: int | None = None,
    dry: bool = False,
    beginning: str = "",
) -> Evicted:
    """Remove pages: those not used since `used_before`, then the least recently used until `leave_bytes` are left.

    Neither: all of them. Families are not looked at: an engine takes what is left of one for a miss.

    Args:
        beginning: Only pages whose key in hex begins so: a whole key names a page, its hash alone a family.

    Raises:
        ValueError: the place does not know when pages were used, and `used_before` asks for it; or `beginning` is no
            beginning of a key, or so short that it may stand for anything.

    """
    beginning = beginning.lower()
    if beginning and (len(beginning) < FEWEST_KEY_DIGITS or set(beginning) - set(hexdigits)):
        raise ValueError(
            f"--key: {beginning!r}: give {FEWEST_KEY_DIGITS} hex digits or more, as `cache list` shows them"
        )
    found = (info for space in namespaces for info in place.store(space).scan())
    infos = [info for info in found if info.key.hex().startswith(beginning)]
    infos.sort(key=lambda info: info.last_used or 0.0)
    if used_before is None and leave_bytes is None:
        going = infos
    else:
        going = _old(infos, used_before) if used_before is not None else []
        if leave_bytes is not None:
            going += _too_many(infos[len(going) :], leave_bytes)
    if dry:
        return Evicted(len(going), sum(info.stored_bytes for info in going))
    pages = held = 0
    for space in {info.namespace: None for info in going}:
        mine = [info for info in going if info.namespace == space]
        pages += place.store(Namespace.called(space)).delete([info.key for info in mine])
        held += sum(info.stored_bytes for info in mine)
    return Evicted(pages, held)


def warm(source: PageStore, target: PageStore, namespace: Namespace, told: Told) -> Warmed:
    """Copy every whole page that the target lacks, the least recently used first."""
    copied = held = present = no_room = 0
    damaged: list[PageKey] = []
    infos = sorted(source.scan(), key=lambda info: info.last_used or 0.0)
    there = target.contains([info.key for info in infos])
    for info, seen, page in _read_all(source, [info for info, at in zip(infos, there, strict=True) if not at]):
        told(info.stored_bytes)
        if seen is Read.DAMAGED:
            damaged.append(info.key)
        if seen is not Read.HIT:
            continue
        match target.write(info.key, page):
            case Write.WRITTEN:
                copied, held = copied + 1, held + info.stored_bytes
            case Write.PRESENT:
                present += 1
            case Write.NO_ROOM:
                no_room += 1
    return Warmed(namespace, copied, held, present + sum(there), no_room, damaged)


def _stat(namespace: Namespace, store: PageStore) -> Stat:
    pages = held = 0
    last: float | None = None
    for info in store.scan():
        pages, held = pages + 1, held + info.stored_bytes
        if info.last_used is not None:
            last = max(last or 0.0, info.last_used)
    return Stat(namespace, pages, held, last, store.measure_orphans())


def _read_all(store: PageStore, infos: list[PageInfo]) -> Iterable[tuple[PageInfo, Read, memoryview]]:
    """Each page in one buffer, which the next one takes."""
    sizes = [max(0, info.stored_bytes - HEADER_BYTES) for info in infos]
    buffer = memoryview(bytearray(max(sizes, default=0)))
    for info, size in zip(infos, sizes, strict=True):
        yield info, store.read(info.key, buffer[:size]), buffer[:size]


def _old(infos: list[PageInfo], used_before: float) -> list[PageInfo]:
    if any(info.last_used is None for info in infos):
        raise ValueError("--older-than: this place does not know when its pages were used; use --bytes or --namespace")
    return [info for info in infos if (info.last_used or 0.0) < used_before]


def _too_many(infos: list[PageInfo], leave_bytes: int) -> list[PageInfo]:
    """The first ones, until the others take no more than that."""
    held, going = sum(info.stored_bytes for info in infos), 0
    while held > leave_bytes:
        held -= infos[going].stored_bytes
        going += 1
    return infos[:going]
