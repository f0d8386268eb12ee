"""``reference``: a recorded arm was chosen before anything was done here (requirements 59, 60).

Its seal is older than the attempt, which names it by hash in its first record, and no engine of this run started before
that record. So a reference that came out unequal cannot be exchanged afterwards: this archive keeps the one that it
named, and what `paired-equality` or `controls-equal` say of it. Not exercised where all arms ran live.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from samestate.checks.base import CheckResult, Finding, Place
from samestate.checks.history import ArmHistory, Attempt, History
from samestate.checks.verdicts import conclude, fail, not_exercised, unknown

CHECK = "reference"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
"""As seals and streams write it: only such times sort as text."""


def reference(history: History) -> CheckResult:
    """Every imported arm against the attempt's first record, and that against every live arm."""
    imported = [arm for arm in history.ordered if arm.imported_from is not None]
    if not imported:
        return not_exercised(CHECK, "not_planned", "all arms ran live", unit="recorded arms")
    attempt = history.attempt
    findings: list[Finding] = []
    for arm in imported:
        findings += _older(arm, attempt)
    for arm in history.ordered:
        if arm.imported_from is None:
            findings += _later(arm, attempt)
    said = ", ".join(f"{arm.name} {(arm.imported_from or '')[:12]}" for arm in imported)
    return conclude(CHECK, findings, unit="recorded arms", examined=len(imported), summary=f"named beforehand: {said}")


def _older(arm: ArmHistory, attempt: Attempt) -> Iterator[Finding]:
    place = Place(arm=arm.name)
    if not _dated(arm.sealed_at) or not _dated(attempt.opened_at):
        message = f"arm {arm.name}: when its archive was sealed, or when the attempt began, cannot be read"
        yield unknown("not_dated", message, place, [attempt.where])
    elif (arm.sealed_at or "") > (attempt.opened_at or ""):
        message = (
            f"arm {arm.name}: its archive was sealed at {arm.sealed_at}, the attempt that names it began at "
            f"{attempt.opened_at}: a clock was set back, or it was chosen afterwards"
        )
        yield unknown("chosen_later", message, place, [attempt.where])


def _dated(time: str | None) -> bool:
    return time is not None and _TIME.fullmatch(time) is not None


def _later(arm: ArmHistory, attempt: Attempt) -> Iterator[Finding]:
    """By the clock that all processes of a host share."""
    seens = [(seen.t_ns, seen.where) for seen in arm.engines] + [(seen.t_ns, seen.where) for seen in arm.started]
    first = min(seens, default=None)
    if first is not None and first[0] < attempt.t_ns:
        message = f"arm {arm.name} had begun before the attempt named its reference"
        yield fail("begun_before", message, Place(arm=arm.name), [attempt.where, first[1]])
