"""Places: a file inside an archive and a line of it, ``arms/control/client.jsonl:4``.

Lines count from 1, as editors and ``sed -n 4p`` count them; the record there is the one with ``n`` = 3.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_DIGITS = 18
"""Of a line number: more than any file has, and few enough to be read as a number."""


class Place(NamedTuple):
    """A place, taken apart."""

    file: str
    line: int
    """From 0: `n` of an undamaged stream's record."""


def place(file: str, index: int) -> str:
    """Where line `index`, from 0, of a file stands."""
    return f"{file}:{index + 1}"


def read_place(where: str) -> Place | None:
    """A place with a line; None for what is none."""
    file, _, line = where.rpartition(":")
    if not file or not (line.isascii() and line.isdecimal()) or len(line) > MOST_DIGITS or not int(line):
        return None
    return Place(file, int(line) - 1)
