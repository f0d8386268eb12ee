"""How the transformers engine looks up, saves and restores. This conduct is right; a fault is a subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from samestate.engines.children.transformers_cache import STATE, Entry, Layout, Page
from samestate.engines.children.transformers_store import External, Key
from samestate.evidence.records import EntryKind


class FaultError(ValueError):
    """A fault cannot be armed here. One line."""


class Conduct:
    """The hooks, in the order in which a request meets them."""

    needs: ClassVar[frozenset[EntryKind]] = frozenset()
    """Kinds of entries of which the model must have one."""

    def lookup_tokens(self, tokens: int) -> int:
        """Of a prompt's `tokens`, how many the external lookup may cover: never the last one."""
        return tokens - 1

    def moves(self, entry: Entry) -> bool:
        """Whether a load brings this entry at all."""
        return True

    def fetch(self, entry: Entry, key: Key, external: External) -> Page:
        """What the external cache gives for a key."""
        return external.get(key)

    def arrives(self, entry: Entry) -> bool:
        """Whether the page of a load is put in place; else its destination stays as it was made."""
        return True


class _FullLookup(Conduct):
    @override
    def lookup_tokens(self, tokens: int) -> int:
        return tokens


class _StalePage(Conduct):
    needs = STATE

    @override
    def fetch(self, entry: Entry, key: Key, external: External) -> Page:
        stale = external.last_of(entry.number, but=key) if entry.kind in STATE else None
        return external.get(key) if stale is None else stale


class _AttentionOnly(Conduct):
    needs = STATE

    @override
    def moves(self, entry: Entry) -> bool:
        return entry.kind not in STATE


class _ZeroPage(Conduct):
    needs = STATE

    @override
    def arrives(self, entry: Entry) -> bool:
        return entry.kind not in STATE


class _TailNotRestored(Conduct):
    needs = frozenset({EntryKind.TAIL})

    @override
    def arrives(self, entry: Entry) -> bool:
        return entry.kind is not EntryKind.TAIL


class _IndexerNotRestored(Conduct):
    needs = frozenset({EntryKind.INDEXER})

    @override
    def arrives(self, entry: Entry) -> bool:
        return entry.kind is not EntryKind.INDEXER


CONDUCTS: dict[str, Callable[[], Conduct]] = {
    "full-lookup": _FullLookup,
    "stale-page": _StalePage,
    "attention-only": _AttentionOnly,
    "zero-page": _ZeroPage,
    "tail-not-restored": _TailNotRestored,
    "indexer-not-restored": _IndexerNotRestored,
}
"""By name, as the catalogue of faults has them."""


def conduct(fault: str | None, layout: Layout) -> Conduct:
    """The conduct under a fault; None: the right one. Raises `FaultError`."""
    if fault is None:
        return Conduct()
    if fault not in CONDUCTS:
        raise FaultError(f"fault {fault!r}: the transformers engine has only {', '.join(sorted(CONDUCTS))}")
    chosen = CONDUCTS[fault]()
    kinds = {entry.kind for entry in layout.entries}
    if chosen.needs - kinds:
        missing = ", ".join(sorted(kind.value for kind in chosen.needs - kinds))
        pools = EntryKind.INDEXER in kinds
        more = " (a tail needs a block size that is no multiple of index_kpool)" if pools else ""
        message = f"fault {fault!r}: this model's cache has no {missing} entry{more}; choose another fault or model"
        raise FaultError(message)
    return chosen
