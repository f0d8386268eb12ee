"""Amendments: remarks that came after the seal. They are appended and numbered, and never change what is there.

Each names the seal and the SHA-256 of the amendment before it, so one that is lost from the middle, edited or
moved shows. One lost from the end shows only where a signature counted it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from samestate.evidence.archive import Archive, ArchiveError
from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.outside import VERDICTS, add_file, read_files
from samestate.evidence.records import Positive, Sha256
from samestate.evidence.seal import SEAL_NAME
from samestate.evidence.stream import CHAIN_START, Defect, newer_format, utc_now

FOLDER = "amendments"
FORMAT = 1
LONGEST_TEXT = 10_000
"""Characters."""
MOST_VERDICT_BYTES = 1 << 28


Decision = Literal["accepted", "rejected", "held", "inconclusive"]
"""``held``: the candidate stays where it is, and nothing is promoted. ``inconclusive``: closed without an answer."""
DECISIONS: tuple[str, ...] = get_args(Decision)


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A verdict that its readers should no longer rely on. The verdict's file stays as it is."""

    file: str
    """``verdicts/boundary-v1.json``."""
    sha256: Sha256
    analyzer: str
    verdict: str
    reason: str


class Amendment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``amendments/NNNN.json``."""

    format: int
    number: Positive
    prev: Sha256
    """Of the bytes of the amendment before; 64 zeros in the first."""
    seal_sha256: Sha256
    wall_time: str
    """UTC, RFC 3339."""
    by: str | None
    """As its author gave it; nothing vouches for it but a signature."""
    text: str
    finding: str | None
    """Code of the finding that it corrects; None: of the archive as a whole, or of the verdict it withdraws."""
    withdraws: Withdrawal | None
    decision: Decision | None = None
    """What people decided on the candidate. No verdict does (requirement 119)."""


class KeptVerdict(NamedTuple):
    """A file of ``verdicts`` that names this archive's seal."""

    file: str
    sha256: str
    analyzer: str
    verdict: str
    codes: frozenset[str]
    """Of its findings."""


class Amendments(NamedTuple):
    """All amendments of an archive, in order, as far as they are readable."""

    items: list[Amendment]
    hashes: list[str]
    """SHA-256 of each one's bytes."""
    defects: list[Defect]


def read_amendments(root: Path, seal_sha256: str | None) -> Amendments:
    """Read what lies in ``amendments``; never raises for what is there."""
    files, defects = read_files(root, FOLDER)
    items: list[Amendment] = []
    hashes: list[str] = []
    prev = CHAIN_START
    for position, (name, data) in enumerate(sorted(files.items()), 1):
        where = ascii(f"{FOLDER}/{name}")[1:-1]
        try:
            one = msgspec.json.decode(data, type=Amendment)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            claimed = _claimed_format(data)
            defects.append(Defect(where, newer_format(claimed) if claimed > FORMAT else f"no amendment: {error}"))
            prev = sha256_hex(data)
            continue
        defects += [Defect(where, what) for what in _faults(one, position, name, prev, seal_sha256)]
        prev = sha256_hex(data)
        items.append(one)
        hashes.append(prev)
    return Amendments(items, hashes, defects)


def kept_verdicts(root: Path, seal_sha256: str | None) -> list[KeptVerdict]:
    """The kept verdicts of this seal, by file name; what is none is left out."""
    found = []
    for name, data in read_files(root, VERDICTS, MOST_VERDICT_BYTES)[0].items():
        try:
            said = msgspec.json.decode(data, type=_Verdict)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        if said.seal_sha256 == seal_sha256:
            codes = frozenset(finding.code for result in said.results for finding in result.findings)
            found.append(KeptVerdict(f"{VERDICTS}/{name}", sha256_hex(data), said.analyzer, said.verdict, codes))
    return found


def amend(
    archive: Archive,
    text: str,
    *,
    by: str | None = None,
    finding: str | None = None,
    withdraws: Withdrawal | None = None,
    decision: Decision | None = None,
) -> Path:
    """Append an amendment; returns its path.

    ArchiveError for an unsealed archive, for amendments that are damaged, for texts that are empty or too long, and
    for an acceptance without a kept verdict of pass that nobody withdrew.
    """
    seal = archive.seal_sha256
    if seal is None:
        raise ArchiveError(
            f"{archive.root} has no {SEAL_NAME}, so nothing can be said of it that lasts; amend a sealed one"
        )
    if not text.strip() and withdraws is None:
        raise ArchiveError("--text: is empty; say what is to be corrected")
    for option, value in (("--text", text), ("--by", by or ""), ("--reason", withdraws.reason if withdraws else "")):
        if len(value) > LONGEST_TEXT:
            raise ArchiveError(f"{option}: has {len(value)} characters; say it in at most {LONGEST_TEXT}")
    # Two at once want one number: the second reads again.
    while True:
        there = read_amendments(archive.root, seal)
        if there.defects:
            where, what = there.defects[0]
            raise ArchiveError(f"{archive.root}: {where}: {what}; restore the amendments before adding one")
        if decision == "accepted":
            _require_pass(archive.root, seal, there.items)
        number = len(there.items) + 1
        one = Amendment(
            format=FORMAT,
            number=number,
            prev=there.hashes[-1] if there.hashes else CHAIN_START,
            seal_sha256=seal,
            wall_time=utc_now(),
            by=by,
            text=text,
            finding=finding,
            withdraws=withdraws,
            decision=decision,
        )
        try:
            data = canonical_json(msgspec.to_builtins(one))
        except ValueError:
            raise ArchiveError("--text, --by, --reason: hold bytes that are no UTF-8; use plain text") from None
        if add_file(archive.root, FOLDER, _name(number), data):
            return archive.root / FOLDER / _name(number)


class _Finding(msgspec.Struct, frozen=True):
    code: str


class _Result(msgspec.Struct, frozen=True):
    findings: list[_Finding]


class _Verdict(msgspec.Struct, frozen=True):
    """As much of a verdict's file as is read here."""

    analyzer: str
    verdict: str
    seal_sha256: str | None
    results: list[_Result]


def _require_pass(root: Path, seal_sha256: str, before: list[Amendment]) -> None:
    """A pass promotes nothing, and nothing is accepted without one."""
    away = {one.withdraws.file for one in before if one.withdraws is not None}
    standing = {one.file: one.verdict for one in kept_verdicts(root, seal_sha256) if one.file not in away}
    if "pass" not in standing.values() or "fail" in standing.values():
        said = ", ".join(sorted(set(standing.values()))) or "none"
        raise ArchiveError(
            f"--decision accepted: the archive's kept verdicts are: {said}; judge it with `samestate check`, or decide "
            "held, rejected or inconclusive"
        )


def _name(number: int) -> str:
    return f"{number:04}.json"


def _faults(one: Amendment, position: int, name: str, prev: str, seal_sha256: str | None) -> list[str]:
    faults = []
    if one.format != FORMAT:
        faults.append(newer_format(one.format) if one.format > FORMAT else f"no such format: {one.format}")
    if one.number != position or name != _name(position):
        faults.append(f"is number {one.number} where {position} was due: amendments were lost, added or renamed")
    if one.prev != prev:
        faults.append("does not follow the amendment before it: one was changed or replaced")
    if one.seal_sha256 != seal_sha256:
        faults.append("is of another seal")
    return faults


def _claimed_format(data: bytes) -> int:
    try:
        claimed = msgspec.json.decode(data)["format"]
    except Exception:
        return 0
    return claimed if type(claimed) is int else 0
