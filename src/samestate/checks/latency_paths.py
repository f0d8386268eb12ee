"""Where a request's reused tokens really came from, whatever was attempted (requirements 113–117).

A pure function over what records say of one request: p, what of it was local, the bytes that were loaded and the
places in which they lay. Sources that contradict each other name no path.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class ActualPath(StrEnum):
    """How a request came by its first p tokens."""

    RECOMPUTE = "recompute"
    """p = 0."""
    LOCAL = "local"
    EXTERNAL_MEMORY = "external-memory"
    EXTERNAL_DISK = "external-disk"
    EXTERNAL_REMOTE = "external-remote"
    EXTERNAL = "external"
    """From outside, and no record says from where."""
    MIXED = "mixed"
    """From more than one of these."""


FIVE = (
    ActualPath.RECOMPUTE,
    ActualPath.LOCAL,
    ActualPath.EXTERNAL_MEMORY,
    ActualPath.EXTERNAL_DISK,
    ActualPath.EXTERNAL_REMOTE,
)
"""Those of which a complete comparison would consist."""


class CachePlace(StrEnum):
    """Where an external cache keeps pages."""

    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"


class PathEvidence(NamedTuple):
    """What the records say of one request. None: they do not say."""

    tokens: int
    """N."""
    credited: int | None
    """p, from the first batch."""
    local: int | None
    """Tokens of p that were in the local cache."""
    moved: int | None
    """Bytes that completed loads brought, over all ranks; 0: no load."""
    places: Mapping[CachePlace, int] | None
    """Of the loaded bytes, how many lay where."""


class Taken(NamedTuple):
    """The path of one request."""

    path: ActualPath | None
    """None: the records name none, or contradict each other."""
    why: str
    """One line where it is None or `EXTERNAL`; else empty."""


def classify(evidence: PathEvidence) -> Taken:
    """Name the path. Never guesses: what is not recorded names none."""
    p, local, moved = evidence.credited, evidence.local, evidence.moved
    if p is None:
        return Taken(None, "no first batch is recorded")
    if p >= evidence.tokens:
        return Taken(None, f"{p} of {evidence.tokens} tokens credited: nothing was left to compute")
    if local is None:
        return Taken(None, "how much of p was local is not recorded")
    if local > p:
        return Taken(None, f"{local} tokens local, and only {p} credited")
    external = p - local
    if external == 0:
        if moved:
            return Taken(None, f"{moved} bytes loaded, and no token credited for them")
        return Taken(ActualPath.LOCAL if local else ActualPath.RECOMPUTE, "")
    if moved == 0:
        return Taken(None, f"{external} tokens from outside, and no byte loaded")
    if local:
        return Taken(ActualPath.MIXED, "")
    held = [place for place, held in (evidence.places or {}).items() if held]
    if not held:
        return Taken(ActualPath.EXTERNAL, "where the loaded bytes lay is not recorded")
    if len(held) > 1:
        return Taken(ActualPath.MIXED, "")
    return Taken(ActualPath(f"external-{held[0].value}"), "")
