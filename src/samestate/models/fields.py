"""The fields of a config.json, each held against what it must be."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

MOST = 10**9
"""No count of a model is larger: what is makes sizes that nothing can hold, or print."""
MOST_LAYERS = 10_000
MOST_RANKS = 4096


class ConfigError(ValueError):
    """A config.json, or what is asked of it, does not fit; one line that names the field and the remedy."""


class UnknownShape(Exception):
    """Nothing is known that this could be calculated from; one line."""


class Fields:
    """The fields of a config.json that cache sizes follow from."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where

    def whole(self, name: str, default: int | None = None, most: int = MOST) -> int:
        """A count from 1 to `most`. Raises `ConfigError`."""
        value = self._config.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: {name} is missing; it is the model's own, take it from its publisher")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._where}: {name} is {reprlib.repr(value)}; make it a whole number above 0")
        if value > most:
            raise ConfigError(f"{self._where}: {name} is {reprlib.repr(value)}; make it at most {most:,}")
        return value

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self._config.get(name) is not None

    def count(self, name: str) -> int:
        """A count that may be 0. Raises `ConfigError`."""
        return 0 if self._config.get(name) == 0 else self.whole(name)

    def text(self, name: str) -> str | None:
        """A string; None where there is none."""
        value = self._config.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        """Whether it is there and true."""
        return self._config.get(name) is True

    def names(self, name: str) -> list[str] | None:
        """A list of strings; None where there is none. Raises `ConfigError`."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{self._where}: {name} is no list of names; write one name a layer")
        return value

    def within(self, name: str) -> Fields | None:
        """The fields of an object inside this one; None where there is none."""
        value = self._config.get(name)
        return Fields(value, f"{self._where}: {name}") if isinstance(value, Mapping) else None

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers. Raises `ConfigError`."""
        value = self._config.get(name)
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise ConfigError(f"{self._where}: {name} is missing or no list of numbers; it says which layers are these")
        return value


def divide(what: str, number: int, ranks: int) -> int:
    """`number` over the ranks, of which there are at most `MOST_RANKS`. Raises `ConfigError` unless it divides."""
    if number % ranks:
        fits = max(n for n in range(1, ranks) if number % n == 0)
        raise ConfigError(
            f"--tensor-parallel: {ranks} ranks do not divide {what} = {number}; the next lower one that does is {fits}"
        )
    return number // ranks
