"""Which identity a model's last engine had, noted in the store itself: so that a change of layout can be named."""

from __future__ import annotations

import hashlib
import json
import zlib

from samestate.cache.base import PageKey, PageStore, Read
from samestate.cache.identity import Identity, changed

NOTES = "samestate-identities"
"""The namespace of the notes."""
NOTE_BYTES = 64 * 1024
"""Every note is as long: who reads one need not know how much is in it."""


def note(store: PageStore, now: Identity) -> list[str]:
    """Note the identity, and say what differs from the one noted before, field by field; empty: nothing, or no note.

    Raises `StoreError`.
    """
    key = PageKey(hashlib.sha256(now.label.encode()).digest())
    page = bytearray(NOTE_BYTES)
    before = _facts(page) if store.read(key, memoryview(page)) is Read.HIT else None
    if before == now.facts:
        return []
    packed = zlib.compress(now.canonical)
    if len(packed) <= NOTE_BYTES:
        store.delete([key])
        store.write(key, memoryview(packed.ljust(NOTE_BYTES, b"\0")))
    return changed(before, now.facts) if before is not None else []


def _facts(page: bytearray) -> dict[str, str] | None:
    try:
        facts = json.loads(zlib.decompressobj().decompress(bytes(page)))
    except (zlib.error, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
