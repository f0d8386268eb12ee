"""Prompt lengths as a plan says them: ``"2C-1"``, ``"C"``, ``"3C+1"``, ``"3584"``."""

from __future__ import annotations

import re
from typing import NamedTuple

from samestate.plans.errors import PlanError, quoted

_LENGTH = re.compile(
    r"(?:(?P<k>[1-9][0-9]{0,8})?C(?P<d>[+-][0-9]{1,9})?|(?P<tokens>[1-9][0-9]{0,8}))",
    re.ASCII,
)


class Length(NamedTuple):
    """``intervals * C + tokens``."""

    intervals: int
    tokens: int


def parse(length: str) -> Length:
    """Read a length. Raises `PlanError` for anything but k·C+d or a count of tokens."""
    match = _LENGTH.fullmatch(length)
    if match is None:
        raise PlanError(f"{quoted(length)} is no prompt length; write '2C-1', 'C', '3C+1' or a number of tokens")
    if match["tokens"]:
        return Length(0, int(match["tokens"]))
    return Length(int(match["k"] or 1), int(match["d"] or 0))


def evaluate(length: str, c: int) -> int:
    """N in tokens at checkpoint interval `c`. Raises `PlanError` when it is below 1."""
    intervals, tokens = parse(length)
    n = intervals * c + tokens
    if n < 1:
        raise PlanError(f"{length!r} is {n} tokens at C={c}; a prompt has at least 1")
    return n


def check_lengths(lengths: list[str]) -> None:
    """Raise `PlanError` for no length at all, an unreadable one or one said twice."""
    if not lengths:
        raise PlanError("lengths: is empty; name at least one prompt length")
    seen: dict[Length, str] = {}
    for index, length in enumerate(lengths):
        try:
            parsed = parse(length)
        except PlanError as error:
            raise error.within(f"lengths[{index}]") from None
        if parsed in seen:
            raise PlanError(f"lengths[{index}]: {length!r} repeats {seen[parsed]!r}; remove one")
        seen[parsed] = length
