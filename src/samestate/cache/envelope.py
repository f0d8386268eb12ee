"""The envelope of a stored page: what makes a page of another key, another namespace or with a bad byte visible.

A stored page is a header of `HEADER_BYTES` and then the page's bytes, unchanged and nothing behind them::

    at      bytes
      0         8   magic, ``SAMEPAGE``
      8         2   format version
     10         2   bytes of the key
     12         4   bytes of the header
     16         8   bytes of the page
     24        32   namespace: SHA-256 of its name
     56        96   key, filled up with zeros
    152        16   page: XXH3-128
    168        16   header: XXH3-128 of everything else in it
    184        72   zeros

Numbers are little-endian. Version 1. XXH3-128 finds accidents, not forgers: who may write to a store is trusted.
Nothing here copies a page. Pages are hashed in pieces of `PIECE_BYTES`, so that no other thread waits for long.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from samestate.cache.base import PageKey

FORMAT = 1
HEADER_BYTES = 256
MAX_KEY_BYTES = 96
PIECE_BYTES = 1 << 20

_MAGIC = b"SAMEPAGE"
_FIELDS = struct.Struct("<8sHHIQ32s96s16s16s72x")
_HEADER_SUM = slice(168, 184)
_LOST = "(name lost) "
assert _FIELDS.size == HEADER_BYTES


class Namespace(NamedTuple):
    """Everything that pages depend on besides their key, by name."""

    name: str
    digest: bytes
    """SHA-256 of the name."""

    @classmethod
    def named(cls, name: str) -> Namespace:
        """Any text but the empty one, compared byte for byte. Raises ValueError."""
        if not name:
            raise ValueError("namespace: it is empty; name everything that pages depend on")
        return cls(name, hashlib.sha256(name.encode()).digest())

    @classmethod
    def unnamed(cls, digest: bytes) -> Namespace:
        """A namespace whose name is lost, as an administrator may find it."""
        return cls(f"{_LOST}{digest.hex()}", digest)

    @classmethod
    def called(cls, name: str) -> Namespace:
        """The namespace that has this `name`, which may be one of `unnamed`. Raises ValueError."""
        return cls.unnamed(bytes.fromhex(name.removeprefix(_LOST))) if name.startswith(_LOST) else cls.named(name)


def require_key(key: PageKey) -> None:
    """Raises ValueError for a key that no header can hold."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key: {len(key)} bytes; a page's key has 1 to {MAX_KEY_BYTES}")


def flat(page: memoryview) -> memoryview:
    """The same bytes as a row of unsigned bytes. Raises ValueError where they do not lie in one piece."""
    if not page.c_contiguous:
        raise ValueError("page: its bytes do not lie in one piece; pass a contiguous buffer")
    return page if (page.format, page.ndim) == ("B", 1) else page.cast("B")


def pieces(page: memoryview) -> Iterator[memoryview]:
    """A flat page, piece by piece."""
    for start in range(0, len(page), PIECE_BYTES):
        yield page[start : start + PIECE_BYTES]


class Checksum:
    """Of a page, fed in order."""

    def __init__(self) -> None:
        import xxhash  # here and below: commands that read no page need not have it loaded

        self._hash = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        self._hash.update(piece)

    def digest(self) -> bytes:
        return bytes(self._hash.digest())


def checksum(page: memoryview) -> bytes:
    """XXH3-128 of a flat page, 16 bytes."""
    whole = Checksum()
    for piece in pieces(page):
        whole.update(piece)
    return whole.digest()


def make_header(namespace: Namespace, key: PageKey, page: memoryview) -> bytes:
    """The header that goes before `page`, a flat one. Raises ValueError for a key that does not fit."""
    import xxhash

    require_key(key)
    fields = (_MAGIC, FORMAT, len(key), HEADER_BYTES, len(page), namespace.digest, key, checksum(page))
    header = bytearray(_FIELDS.pack(*fields, bytes(16)))
    header[_HEADER_SUM] = xxhash.xxh3_128_digest(header)
    return bytes(header)


def header_fault(header: bytes | bytearray, namespace: Namespace, key: PageKey, page_bytes: int) -> str | None:
    """Why this is not the header of that page, in a few words; None: it is."""
    if len(header) != HEADER_BYTES:
        return f"{len(header)} bytes of a header of {HEADER_BYTES}"
    if not header.startswith(_MAGIC):
        return "no page"
    _, version, key_bytes, _, length, digest, padded, _, total = _FIELDS.unpack(header)
    if version != FORMAT:
        return f"format {version}, not {FORMAT}"
    import xxhash

    unsummed = bytearray(header)
    unsummed[_HEADER_SUM] = bytes(16)
    if xxhash.xxh3_128_digest(unsummed) != total:
        return "checksum of the header"
    if digest != namespace.digest:
        return "of another namespace"
    if padded[:key_bytes] != key:
        return "of another key"
    if length != page_bytes:
        return f"{length} bytes, not {page_bytes}"
    return None


def page_fault(header: bytes | bytearray, digest: bytes) -> str | None:
    """Whether a page with this checksum is the one that a sound header names; None: it is."""
    return None if _FIELDS.unpack(header)[7] == digest else "checksum of the page"
