"""What a resumption needs and nobody else: kept beside the records for the tool alone, and no part of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from samestate.custody.base import CustodyError
from samestate.custody.spec import Spec
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_journal import read_journal
from samestate.evidence.custody_records import PRIVATE, SwapStarted

SPEC, LIMITS, RESERVE = "spec.json", "limits.json", "reserve"
RESERVED = 16 << 20
"""Bytes: a journal's way back, raw responses and documents."""


def frozen_spec(folder: Path) -> Spec:
    """The spec that the swap in `folder` began with. Raises `CustodyError` where it is gone or is not that one."""
    path = folder / PRIVATE / SPEC
    started = next((one.rec for one in read_journal(folder).entries if isinstance(one.rec, SwapStarted)), None)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CustodyError(f"{path}: cannot be read ({error.strerror}); name a spec whose swap was begun") from None
    if started is not None and sha256_hex(data) != started.spec_sha256:
        raise CustodyError(f"{path}: is not the spec that the swap began with; restore the incumbent by hand")
    return Spec.model_validate_json(data)


def reserve(folder: Path) -> None:
    """Room for the way back, which `release` frees: a full disk must not hold the incumbent. Raises `CustodyError`."""
    try:
        (folder / PRIVATE).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / PRIVATE / RESERVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVED)
        finally:
            os.close(fd)
    except OSError as error:
        release(folder)
        raise CustodyError(
            f"records: {folder} has no room for {RESERVED >> 20} MiB ({error.strerror}); make some"
        ) from None


def release(folder: Path) -> None:
    """Free it."""
    with suppress(OSError):
        (folder / PRIVATE / RESERVE).unlink()


def keep(folder: Path, name: str, data: bytes) -> None:
    """A file that only its owner reads, on the disk when this returns. Raises OSError."""
    (folder / PRIVATE).mkdir(mode=0o700, exist_ok=True)
    path = folder / PRIVATE / name
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
