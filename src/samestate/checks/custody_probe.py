"""The probe's archive: lies beside the journal under the very seal that the journal names, undamaged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.custody_history import CustodyHistory, Noted
from samestate.checks.verdicts import conclude, not_exercised, unknown
from samestate.evidence import custody_records as c
from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import EngineStarted, StreamOpened

PROBE = "custody-probe"
_HEAD = 16
"""Records of a stream among which its engine's start is."""


class Ran(NamedTuple):
    """What an archive is a run of."""

    plan_sha256: str | None
    engine: str | None
    """Names of its engines, sorted; None: none was started, or none can be read."""
    began: str | None
    """RFC 3339; None: cannot be read."""


def probe(history: CustodyHistory) -> CheckResult:
    """Each archive that a probe left is whole, and the one that was sealed then."""
    sealed = [one for one in history.all(c.ProbeEnded) if one.rec.seal_sha256 is not None]
    if not sealed:
        return not_exercised(PROBE, "no_archive", "no probe left a sealed archive", unit="archives")
    findings = [finding for one in sealed for finding in _held(history.folder, one)]
    summary = f"{len(sealed)} archives under the seal that was recorded" if not findings else findings[0].message
    return conclude(PROBE, findings, unit="archives", examined=len(sealed), summary=summary)


def ran(folder: Path) -> Ran:
    """Plan, engines and beginning of the archive in `folder`. Never raises for what lies there."""
    try:
        archive = Archive.open(folder)
        plan = archive.plan_json
        streams = [(arm, name) for arm in archive.arms for name in archive.streams(arm)]
        heads = [line.rec for arm, name in streams for line in islice(archive.records(arm, name), _HEAD)]
        opened = [line.rec.wall_time for line in archive.attempts() if isinstance(line.rec, StreamOpened)]
    except (ArchiveError, OSError):
        return Ran(None, None, None)
    engines = sorted({rec.engine for rec in heads if isinstance(rec, EngineStarted)})
    return Ran(
        sha256_hex(plan) if plan is not None else None,
        ", ".join(engines) or None,
        opened[0] if opened else None,
    )


def archive_of(folder: Path, rec: c.ProbeEnded) -> Path | None:
    """The archive that a record names, beside the journal; None: it names none, or a place elsewhere."""
    if rec.archive is None or rec.archive in ("", ".", "..") or "/" in rec.archive:
        return None
    return folder / rec.archive


def _held(folder: Path, one: Noted) -> Iterator[Finding]:
    where = [one.where]
    place = archive_of(folder, one.rec)
    if place is None:
        yield unknown("missing_archive", f"probe {one.rec.plan}: no archive is named beside the journal", None, where)
        return
    name = one.rec.archive
    try:
        archive = Archive.open(place)
        seal, defects = archive.seal_sha256, archive.defects
    except (ArchiveError, OSError) as error:
        words = str(error).replace(str(place), name)
        yield unknown("missing_archive", f"{name}: cannot be read ({words})", None, where)
        return
    if seal != one.rec.seal_sha256:
        yield unknown("other_seal", f"{name}: is not under the seal that was recorded", None, where)
    for defect in defects:
        yield unknown("damaged_archive", f"{name}/{defect.where}: {defect.what}", None, where)
