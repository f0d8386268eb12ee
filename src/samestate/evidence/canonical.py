"""Canonical bytes and their hashes: what every identity in an archive rests on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import rfc8785


def canonical_json(obj: object) -> bytes:
    """RFC 8785 JSON of `obj`. ValueError for what it cannot hold (NaN, integers beyond 2**53 - 1, other types)."""
    return rfc8785.dumps(cast(Any, obj))


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data`, 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks. OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def token_digest(ids: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian int32. ValueError for an id outside int32."""
    try:
        return sha256_hex(struct.pack(f"<{len(ids)}i", *ids))
    except struct.error as error:
        raise ValueError(f"token ids must be 32-bit integers: {error}") from None
