"""Types of the judging side: verdicts, findings, check results."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from samestate.checks.history import History


class Verdict(StrEnum):
    """What a check, or a whole run, came to."""

    PASS = "pass"
    FAIL = "fail"
    """Positive contrary evidence."""
    UNKNOWN = "unknown"
    """Evidence missing, incomplete or vacuous, or the checker crashed."""
    NOT_EXERCISED = "not_exercised"
    """The question did not come up."""
    EXCLUDED = "excluded"
    """Never entered the sample, with the reason."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Place(_Model):
    """Where a finding points. None: does not apply, or cannot be named."""

    arm: str | None = None
    case: str | None = None
    op: str | None = None
    request: str | None = None
    rank: int | None = None
    group: int | None = None
    layer: str | None = None
    boundary: int | None = None
    repetition: int | None = None
    """From 1; None also where there is but one."""


class Finding(_Model):
    """One observation that decides or explains a check's verdict."""

    code: str
    """Stable, lower case, e.g. ``retained_lookup_boundary``."""
    verdict: Verdict
    message: str
    """One line: what was seen, what was expected, where."""
    place: Place = Place()
    evidence: list[str] = []
    """``arms/candidate/scheduler.jsonl:17``: file and line (from 1) of the records."""


class CheckResult(_Model):
    """What one check came to."""

    check: str
    verdict: Verdict
    summary: str
    """One line for the table, counts included: ``36/36 generations equal``."""
    unit: str
    """Unit of analysis: ``operations``, ``comparisons``, ``reloads``, ``records``, …"""
    examined: int
    """How many units were looked at. 0 is never a pass."""
    findings: list[Finding] = []


Check = Callable[["History"], CheckResult]
"""A check: a pure function from the history of a run to its result."""
