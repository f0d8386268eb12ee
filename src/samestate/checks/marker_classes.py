"""Token classes: of every committed token, whether the budget forced it or the sampler chose it. Pure functions.

A store is not a forced token: only one on the exact row that the token was committed from counts (requirement 142).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from samestate.checks.budget_oracle import Markers
from samestate.checks.marker_history import Committed
from samestate.evidence.marker_records import LogitsRow


class TokenClass(StrEnum):
    """How a committed token came about."""

    FORCED = "forced"
    """A store of this id on its exact row, where another id led before."""
    SAMPLED = "sampled"
    """No store on its row."""
    STORE_OVERRIDDEN = "store_overridden"
    """Its row had a store of another id."""
    NATURAL_COINCIDENT = "natural_coincident"
    """A store of this id on its row, and the row's arg-max before the store was the same id."""
    POST_STOP = "post_stop"
    """Past what the API delivered, the tail accounted for."""
    UNKNOWN = "unknown"
    """Its row is not recorded, contradicts itself, or it lies in a tail that is not accounted for."""


class Marker(NamedTuple):
    """A complete marker in a sequence of output tokens."""

    position: int
    """Output position of its first id."""
    ids: tuple[int, ...]


def class_of(token: int, row: LogitsRow | None) -> TokenClass:
    """The class of a delivered token, from the row that it was committed from."""
    if row is None or row.store != (row.stored is not None):
        return TokenClass.UNKNOWN
    if not row.store:
        return TokenClass.SAMPLED
    if row.stored != token:
        return TokenClass.STORE_OVERRIDDEN
    return TokenClass.NATURAL_COINCIDENT if row.argmax == token else TokenClass.FORCED


def classify(committed: Sequence[Committed], delivered: int, *, tail_known: bool) -> list[TokenClass]:
    """One class a committed token; the first `delivered` of them reached the API.

    `tail_known`: the tokens after them are accounted for, as `samestate.checks.marker_reconcile` does it.
    """
    tail = TokenClass.POST_STOP if tail_known else TokenClass.UNKNOWN
    return [class_of(one.token, one.row) if at < delivered else tail for at, one in enumerate(committed)]


def class_of_marker(classes: Sequence[TokenClass]) -> TokenClass:
    """Of a marker of several ids: unknown where one is, else that of the first id, which decides the close."""
    if not classes or TokenClass.UNKNOWN in classes:
        return TokenClass.UNKNOWN
    return classes[0]


def closes(tokens: Sequence[int], markers: Markers) -> list[Marker]:
    """Complete end markers in output tokens, in order; none overlaps another."""
    return list(_closes(tokens, markers.end))


def _closes(tokens: Sequence[int], end: tuple[int, ...]) -> Iterator[Marker]:
    at = 0
    while end and at <= len(tokens) - len(end):
        if tuple(tokens[at : at + len(end)]) == end:
            yield Marker(at, end)
            at += len(end)
        else:
            at += 1


def counted(classes: Sequence[TokenClass]) -> str:
    """``74 sampled, 1 forced, 1 post_stop``, the most frequent first."""
    return ", ".join(f"{count} {name.value}" for name, count in Counter(classes).most_common()) or "no token"
