"""Accepted findings: failures that a team knows, has a reason for, and lives with until a date.

Acceptance changes what a run comes to for whoever names the file, and nothing else: the kept verdict stays the
analyzer's. Nothing is accepted of a run with a fault: it shows whether the checks see the fault. Only a finding of a
failure can be accepted, and with it the shadow that it casts: a request that starts at
a wrong p is also scheduled otherwise than the control's, which `geometry` reports as unknown. What makes evidence
evidence cannot be accepted, and missing evidence cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from samestate.checks import (
    coverage,
    geometry,
    integrity,
    marker_ranks,
    marker_reconcile,
    marker_sent,
    marker_server,
    marker_whole,
    repetitions,
)
from samestate.checks.analyzers import ANALYZERS, Judgement
from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.plan_identity import CHECK as PLAN_IDENTITY
from samestate.checks.verdicts import conclude, run_verdict
from samestate.checks.written import Written, WrittenError, read_written
from samestate.plans.errors import nearest

CHECK = "known"
NEVER = (
    integrity.CHECK,
    coverage.CHECK,
    PLAN_IDENTITY,
    repetitions.CHECK,
    marker_sent.PROBES,
    marker_sent.ATTEMPTS,
    marker_sent.GATES,
    marker_server.IDENTITY,
    marker_server.ECHO,
    marker_whole.CHECK,
    marker_ranks.CHECK,
    marker_reconcile.CHECK,
)
"""Without these nothing else that a run says holds."""
SHADOW = (geometry.CHECK, "geometry_mismatch")
"""Unknown, seen in records of both sides, and what an accepted failure of the same operation leads to."""


class Running(NamedTuple):
    """What ran, as far as it can be read; entries are held to it."""

    versions: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """Of the engines' packages, by arm."""
    engines: Mapping[str, str] = MappingProxyType({})
    """By arm: ``vllm`` or ``sim``."""
    plan: str | None = None
    """Its name."""
    repairs: tuple[str, ...] | None = None
    """Of vLLM, that the plan puts on; None: it is no marker plan."""
    fault: str | None = None
    """That was declared to be injected."""


_Said = Annotated[str, Field(min_length=1, max_length=1000)]


UNREAD = Running()
"""Nothing is known of what ran."""


class Entry(Written, Place):
    """One accepted finding: every place field that is given must be the finding's own."""

    check: str
    code: str
    reason: _Said
    expires: date
    """The last day, UTC, on which it is accepted."""
    by: _Said
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the engine, by package, that has the fault; every arm that is meant must have run these. Empty: any."""
    engine: Literal["vllm", "sim", "transformers"] | None = None
    """That every arm that is meant must have run on. None: any."""
    plan: str | None = None
    """Name of the plan that must have run. None: any."""
    repairs: list[str] | None = None
    """Of vLLM, that the plan must put on, no more and no fewer; empty: none may be. None: any."""

    @field_validator("reason", "by")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is blank; say it")
        return value

    def covers(self, check: str, finding: Finding) -> bool:
        """Whether `finding`, of a check of that id, is the one meant."""
        wanted = self.model_dump(include=set(Place.model_fields), exclude_none=True)
        at = finding.place.model_dump()
        return (check, finding.code) == (self.check, self.code) and all(
            at[name] == value for name, value in wanted.items()
        )

    def runs(self, running: Running) -> bool:
        """Whether the entry's plan ran with its repairs, and every arm that is meant on its engine and versions."""
        arms = list(running.versions) if self.arm is None else [self.arm]
        versions = [running.versions.get(arm, {}).items() for arm in arms]
        engines = {running.engines.get(arm) for arm in arms}
        return (
            (self.plan is None or self.plan == running.plan)
            and (self.repairs is None or (running.repairs is not None and {*self.repairs} == {*running.repairs}))
            and (self.engine is None or engines == {self.engine})
            and (not self.versions or (bool(versions) and all(self.versions.items() <= one for one in versions)))
        )

    @property
    def bound(self) -> str:
        """What must have run for the entry to hold."""
        parts = [f"{package} {version}" for package, version in self.versions.items()]
        parts += [f"engine {self.engine}"] if self.engine else []
        parts += [f"plan {self.plan}"] if self.plan else []
        parts += [f"repairs {', '.join(self.repairs) or 'none'}"] if self.repairs is not None else []
        return ", ".join(parts)

    def __str__(self) -> str:
        place = self.model_dump(include=set(Place.model_fields), exclude_none=True)
        where = "".join(f" {name} {value}" for name, value in place.items())
        return f"{self.check} {self.code}{where}"


class _File(Written):
    known: list[Entry]


def read_known(path: Path) -> list[Entry]:
    """Read a file of accepted findings. Raises WrittenError for a malformed file, and for what nobody can accept."""
    entries = read_written(path, _File).known
    checks = {check for analyzer in ANALYZERS.values() for check in analyzer.checks}
    for index, entry in enumerate(entries):
        field = f"{path}: known[{index}].check"
        if entry.check in NEVER:
            raise WrittenError(f"{field}: findings of {entry.check} are never accepted; remove the entry")
        if entry.check not in checks:
            raise WrittenError(f"{field}: no check {entry.check!r}{nearest(entry.check, checks)}; name one of a plan")
    return entries


def accept(judgement: Judgement, entries: Collection[Entry], today: date, running: Running = UNREAD) -> Judgement:
    """Take accepted failures out of the verdict, and say so; entries that accept nothing are named, and why.

    A check passes under acceptance when every one of its findings is accepted. Whatever else it found decides it as
    before. A run that is not a fail is left as it is: nothing in it can be accepted.
    """
    if running.fault is not None:
        word = f"Nothing is accepted of a run with a fault: {running.fault} was declared, so known findings count."
        return _noted(judgement, [word])
    current = [entry for entry in entries if today <= entry.expires]
    live = [entry for entry in current if entry.runs(running)]
    used: set[int] = set()
    failed = {
        (finding.place.arm, finding.place.op)
        for result in judgement.results
        for finding in result.findings
        if finding.verdict is Verdict.FAIL and finding.place.op and _entry(result.check, finding, live)
    }
    results, accepted = [], 0
    for result in judgement.results:
        under, count = _accept(result, live, failed, used)
        results.append(under)
        accepted += count if result.check in judgement.required else 0
    mine = [entry for entry in entries if entry.plan in (None, running.plan)]
    notes = _notes(judgement, mine, current, live, used)
    if foreign := sorted({entry.plan for entry in entries if entry.plan not in (None, running.plan)}):
        notes.append(f"Known findings of other plans accept nothing here: {', '.join(foreign)}.")
    if not accepted or judgement.verdict is not Verdict.FAIL:
        return _noted(judgement, notes)
    verdict = run_verdict(judgement.required, results)
    summary = f"{_many(accepted)} accepted; without acceptance the verdict is fail"
    row = conclude(CHECK, [], unit="findings", examined=accepted, summary=summary)
    word = f"{verdict.value.capitalize()} with {_many(accepted)} accepted; without acceptance the verdict is fail."
    changed = judgement.model_copy(update={"verdict": verdict, "results": [*results, row]})
    return _noted(changed, [word, *notes])


def _entry(check: str, finding: Finding, entries: list[Entry]) -> Entry | None:
    covering = (entry for entry in entries if entry.covers(check, finding))
    return next(covering, None) if check not in NEVER else None


def _accept(
    result: CheckResult, entries: list[Entry], failed: Collection[tuple[str | None, str | None]], used: set[int]
) -> tuple[CheckResult, int]:
    """The result under acceptance, and how many findings that is. `failed`: operations with an accepted failure."""
    findings, left, count = [], [], 0
    for finding in result.findings:
        entry = _entry(result.check, finding, entries)
        shadow = (result.check, finding.code) == SHADOW and bool(finding.evidence)
        follows = shadow and (finding.place.arm, finding.place.op) in failed
        if entry is None or not (finding.verdict is Verdict.FAIL or follows):
            findings.append(finding)
            left.append(finding)
            continue
        used.add(id(entry))
        count += 1
        word = f"accepted until {entry.expires} by {entry.by} ({entry.reason}): {finding.message}"
        findings.append(finding.model_copy(update={"message": word}))
    if not count:
        return result, 0
    verdict = conclude(result.check, left, unit=result.unit, examined=result.examined, summary="").verdict
    if verdict is Verdict.PASS and result.examined <= 0:
        verdict = Verdict.UNKNOWN
    summary = f"{result.summary}; {_many(count)} accepted"
    return result.model_copy(update={"verdict": verdict, "summary": summary, "findings": findings}), count


def _notes(
    judgement: Judgement, entries: Collection[Entry], current: list[Entry], live: list[Entry], used: set[int]
) -> list[str]:
    """What whoever keeps the file should know of it."""
    notes = []
    for entry in entries:
        if id(entry) in used:
            continue
        met = [
            finding.verdict
            for result in judgement.results
            for finding in result.findings
            if entry.covers(result.check, finding)
        ]
        if entry not in current:
            notes.append(f"Known finding {entry} expired on {entry.expires} and accepts nothing: renew or remove it.")
        elif entry not in live:
            notes.append(f"Known finding {entry} accepts nothing: it is one of {entry.bound}, which did not run here.")
        elif met:
            words = ", ".join(sorted({verdict.value for verdict in met}))
            notes.append(f"Known finding {entry} is not accepted: it is {words} here, and only a fail can be accepted.")
        else:
            notes.append(
                f"Known finding {entry} met nothing in this archive: remove it once it is repaired everywhere."
            )
    return notes


def _noted(judgement: Judgement, notes: list[str]) -> Judgement:
    return judgement.model_copy(update={"limitations": [*notes, *judgement.limitations]}) if notes else judgement


def _many(count: int) -> str:
    return "1 finding" if count == 1 else f"{count} findings"
