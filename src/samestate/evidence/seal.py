"""The two files that seal an archive: `SHA256SUMS` and `seal.json`.

`SHA256SUMS` holds every sealed file's hash; `seal.json` holds the hash of `SHA256SUMS`
and, because nothing else covers it, a hash of itself.
"""

from __future__ import annotations

import re

import msgspec

from samestate import __version__
from samestate.evidence.canonical import canonical_json, sha256_hex
from samestate.evidence.places import place
from samestate.evidence.records import FORMAT, NonNegative, Sha256
from samestate.evidence.stream import Defect, newer_format, utc_now

SUMS_NAME = "SHA256SUMS"
SEAL_NAME = "seal.json"
OUTSIDE = ("amendments", "signatures", "verdicts")
"""Folders that the seal leaves out."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_SUMS_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


class Seal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `seal.json`."""

    format: int
    sha256sums_sha256: Sha256
    files: NonNegative
    """Number of lines of `SHA256SUMS`."""
    plan_sha256: Sha256
    wall_time: str
    """When it was sealed: UTC, RFC 3339."""
    samestate_version: str
    self_sha256: Sha256
    """Of the canonical JSON of all fields but this one."""


def sealable(name: str) -> bool:
    """Whether `name` may stand in `SHA256SUMS`: a plain relative path, inside, not outside the seal."""
    return (
        _NAME.fullmatch(name) is not None
        and name not in (SUMS_NAME, SEAL_NAME)
        and name.partition("/")[0] not in OUTSIDE
    )


def sums_bytes(sums: dict[str, str]) -> bytes:
    """`SHA256SUMS` for file name -> SHA-256."""
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode("ascii")


def read_sums(data: bytes, where: str) -> tuple[dict[str, str], list[Defect]]:
    """File name -> SHA-256, and what is wrong with the lines. Names that leave the archive are dropped."""
    sums: dict[str, str] = {}
    defects: list[Defect] = []
    last = ""
    *lines, rest = data.decode("utf-8", "replace").split("\n")
    if rest:
        defects.append(Defect(where, "cut off: the last line does not end"))
    for number, line in enumerate(lines):
        match = _SUMS_LINE.fullmatch(line)
        if match is None:
            defects.append(Defect(place(where, number), "not a line of sha256sum"))
            continue
        digest, name = match.groups()
        if not sealable(name):
            defects.append(Defect(place(where, number), f"names {name!a}, which no archive may list"))
            continue
        if name <= last:
            defects.append(Defect(place(where, number), f"{name} is listed twice or out of order"))
        last = name
        sums[name] = digest
    return sums, defects


def seal_bytes(sums: bytes, plan_sha256: str) -> bytes:
    """`seal.json` over the bytes of `SHA256SUMS`, as of now."""
    fields: dict[str, str | int] = {
        "format": FORMAT,
        "sha256sums_sha256": sha256_hex(sums),
        "files": sums.count(b"\n"),
        "plan_sha256": plan_sha256,
        "wall_time": utc_now(),
        "samestate_version": __version__,
    }
    return canonical_json({**fields, "self_sha256": sha256_hex(canonical_json(fields))})


def read_seal(data: bytes, where: str) -> tuple[Seal | None, list[Defect]]:
    """The seal, and what is wrong with it. None when it cannot be read, or is of a newer format."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, str | int])
        if isinstance(claimed := fields.get("format"), int) and claimed > FORMAT:
            return None, [Defect(where, newer_format(claimed))]
        seal = msgspec.json.decode(data, type=Seal)
        canonical = canonical_json(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return None, [Defect(where, f"not a seal: {error}")]
    del fields["self_sha256"]
    if seal.format != FORMAT:
        return None, [Defect(where, f"no such format: {seal.format}")]
    if canonical != data or sha256_hex(canonical_json(fields)) != seal.self_sha256:
        return seal, [Defect(where, "changed after sealing: self_sha256 does not match")]
    return seal, []


def read_pair(seal_data: bytes, sums_data: bytes, prefix: str) -> tuple[Seal | None, dict[str, str], list[Defect]]:
    """A seal and the list it covers, held against each other. `prefix` goes before both names in defects."""
    seal, defects = read_seal(seal_data, prefix + SEAL_NAME)
    sums, sums_defects = read_sums(sums_data, prefix + SUMS_NAME)
    defects += sums_defects
    if seal is not None and sha256_hex(sums_data) != seal.sha256sums_sha256:
        defects.append(Defect(prefix + SUMS_NAME, "changed after sealing: its SHA-256 is not the one in the seal"))
    if seal is not None and len(sums) != seal.files:
        defects.append(Defect(prefix + SUMS_NAME, f"lists {len(sums)} files where the seal counts {seal.files}"))
    return seal, sums, defects
