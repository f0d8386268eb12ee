"""Tensors of tiny checkpoints: drawn from SHAKE-256, rounded to bfloat16, written as safetensors.

A drawn tensor's values come from SHAKE-256 over its stream's name, 16 bits each (little-endian), spread evenly over an
interval. No random stream of torch or numpy takes part, so the bytes are the same everywhere.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import shake_256
from math import prod, sqrt
from typing import NamedTuple

ZERO = 0
"""The bits of 0.0."""


class Weight(NamedTuple):
    """One tensor of the checkpoint: its Hugging Face name, its shape, its values as bfloat16 bits."""

    name: str
    shape: tuple[int, ...]
    values: array[int]

    def set(self, row: int, column: int, value: float) -> None:
        """Put `value` into a matrix."""
        self.values[row * self.shape[1] + column] = bfloat16(value)


def drawn(stream: str, name: str, *shape: int, std: float, mean: float = 0.0) -> Weight:
    """A tensor with values of this spread, drawn from ``<stream>/<name>``."""
    return Weight(name, shape, _draw(f"{stream}/{name}", prod(shape), std, mean))


def constant(name: str, *shape: int, value: float) -> Weight:
    """A tensor with the same value everywhere."""
    return Weight(name, shape, array("H", [bfloat16(value)]) * prod(shape))


def bits(stream: str, count: int) -> int:
    """`count` even bits of ``stream`` as one number; a multiple of eight."""
    return int.from_bytes(shake_256(stream.encode()).digest(count // 8), "little")


def bfloat16(value: float) -> int:
    """The bits of `value`, rounded to nearest, ties to even."""
    pattern: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return (pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16


@cache
def evenly_spread(std: float, mean: float) -> array[int]:
    """The 65536 equally likely values of a drawn tensor in rising order, as bfloat16 bits."""
    half_width = sqrt(3.0) * std
    return array("H", _spread(mean, half_width))


def safetensors(weights: Iterable[Weight]) -> bytes:
    """The safetensors format: header length, JSON header padded to eight bytes, data in the same order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    start = 0
    for name, shape, values in sorted(weights):
        content = _little_endian(values).tobytes()
        end = start + len(content)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        data.append(content)
        start = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([struct.pack("<Q", len(head)), head, *data])


def _draw(stream: str, count: int, std: float, mean: float) -> array[int]:
    table = evenly_spread(std, mean)
    raw = _little_endian(array("H", shake_256(stream.encode()).digest(2 * count)))
    return array("H", map(table.__getitem__, raw))


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _spread(mean: float, half_width: float) -> Iterator[int]:
    for n in range(65536):
        yield bfloat16(mean + half_width * ((2 * n + 1) / 65536 - 1))
