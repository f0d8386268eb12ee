"""Words for why two outputs differ: a cause, and one cause as it was asked for."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from samestate.checks.history import ArmHistory


class Cause(StrEnum):
    """Why two outputs differ."""

    SCHEDULE = "schedule"
    KERNEL = "kernel"
    STORAGE = "storage"
    STATE = "state"
    UNKNOWN = "unknown"


class Step(NamedTuple):
    """One cause, as it was asked for."""

    cause: Cause
    differs: bool | None
    """None: not recorded, or not in both."""
    said: str
    evidence: list[str]


Side = tuple[ArmHistory, str]
"""An arm and one of its operations."""
