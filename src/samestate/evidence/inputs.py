"""The prompts of an archive, four bytes a token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from hashlib import sha256

import msgspec


class Inputs(Mapping[str, list[int]]):
    """Token digest -> token ids; a list is made whenever one is asked for."""

    def __init__(self, packed: dict[str, array[int]]) -> None:
        self._packed = packed

    def __getitem__(self, digest: str) -> list[int]:
        return self._packed[digest].tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def packed(self, digest: str) -> array[int]:
        """The ids as int32; KeyError where `[]` raises it."""
        return self._packed[digest]


def read_inputs(data: bytes) -> tuple[Inputs, list[str]]:
    """The content of `inputs.json`, and the keys that are not the digest of their value, sorted; these are left out.

    Raises what `msgspec.json.decode` raises.
    """
    packed: dict[str, array[int]] = {}
    false: list[str] = []
    for digest, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        try:
            ids = msgspec.json.decode(raw, type=list[int])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            msgspec.json.decode(data, type=dict[str, list[int]])  # raises, and says where in the file
            raise
        try:
            packed[digest] = array("i", ids)
        except OverflowError:
            false.append(digest)
            continue
        if packed_digest(packed[digest]) != digest:
            false.append(digest)
            del packed[digest]
    return Inputs(packed), sorted(false)


def packed_digest(ids: array[int]) -> str:
    """`token_digest` of ids that are int32 already."""
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return sha256(ids).hexdigest()
