"""The journal of a swap: appended, flushed to the disk record by record, hash-chained.

It may be cut off by a kill at any byte. `read_journal` says what is wrong with it; `JournalWriter.reopen` takes a torn
last line away, which was never acknowledged, and goes on.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_records import FORMAT, JOURNAL, CustodyRecord, Entry, Resumed, SwapStarted
from samestate.evidence.places import place
from samestate.evidence.stream import CHAIN_START, Defect, utc_now

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class JournalRead(NamedTuple):
    """What a journal holds, as far as it can be read."""

    entries: list[Entry]
    defects: list[Defect]
    torn: bool
    """The last line does not end."""


def read_journal(folder: Path) -> JournalRead:
    """Read ``journal.jsonl`` in `folder`. Never raises for what is in the file."""
    try:
        data = (folder / JOURNAL).read_bytes()
    except OSError as error:
        return JournalRead([], [Defect(JOURNAL, f"cannot be read: {error.strerror}")], torn=False)
    *lines, rest = data.split(b"\n")
    entries: list[Entry] = []
    defects: list[Defect] = []
    prev, clock = CHAIN_START, 0
    for index, body in enumerate(lines):
        where = place(JOURNAL, index)
        try:
            entry = _decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            defects.append(Defect(where, f"not a record: {error}"))
            prev = sha256_hex(body)
            continue
        if entry.n != index:
            defects.append(
                Defect(where, f"numbered {entry.n} where {index} was due: lines were lost, repeated or reordered")
            )
        elif entry.prev != prev:
            defects.append(Defect(where, "the chain is broken: the line before is not the one that was written"))
        if isinstance(entry.rec, Resumed):
            clock = 0  # the machine may have been started again
        if entry.t_ns < clock:
            defects.append(Defect(where, f"the monotonic clock went back by {clock - entry.t_ns} ns"))
        if isinstance(entry.rec, SwapStarted) != (index == 0):
            defects.append(Defect(where, "swap_started must be the first record, and only the first"))
        elif isinstance(entry.rec, SwapStarted) and entry.rec.format != FORMAT:
            defects.append(Defect(where, f"no such format: {entry.rec.format}"))
        entries.append(entry)
        prev, clock = sha256_hex(body), entry.t_ns
    if rest:
        defects.append(Defect(place(JOURNAL, len(lines)), "cut off: the line does not end"))
    if not entries and not defects:
        defects.append(Defect(JOURNAL, "empty"))
    return JournalRead(entries, defects, torn=bool(rest))


class JournalWriter:
    """Appends to one journal. Thread-safe. Each record is on the disk when `append` returns. Raises OSError."""

    def __init__(self, folder: Path, fd: int, n: int, prev: str) -> None:
        self._folder = folder
        self._fd = fd
        self._at = n, prev
        self._lock = threading.Lock()

    @classmethod
    def create(cls, folder: Path) -> JournalWriter:
        """A new journal in an existing folder. Raises FileExistsError where one is there."""
        fd = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _sync_folder(folder)
        return cls(folder, fd, 0, CHAIN_START)

    @classmethod
    def reopen(cls, folder: Path) -> JournalWriter:
        """Go on after its last whole line. Whoever calls it holds the swap's lock."""
        data = (folder / JOURNAL).read_bytes()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        fd = os.open(folder / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if whole < len(data):
            os.ftruncate(fd, whole)
            os.fsync(fd)
        return cls(folder, fd, len(lines), sha256_hex(lines[-1]) if lines else CHAIN_START)

    def append(self, record: CustodyRecord) -> None:
        """Write a record and flush it to the disk. Raises OSError, and ValueError for what no reader would accept."""
        with self._lock:
            before = n, prev = self._at
            line = _encode(Entry(n=n, prev=prev, t_ns=time.monotonic_ns(), wall=utc_now(), rec=record))
            try:
                _decode(line)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"{JOURNAL}: {type(record).__name__} refused: {error}") from None
            after = n + 1, sha256_hex(line)
            size = os.fstat(self._fd).st_size
            rest = memoryview(line + b"\n")
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                self._at = after  # before the flush: an interrupted one must not number the next line alike
            except BaseException:
                if self._at is before:
                    os.ftruncate(self._fd, size)
                raise
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
