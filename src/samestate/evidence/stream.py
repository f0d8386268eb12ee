"""Streams: one process's records as numbered, hash-chained JSON lines.

Each line names the SHA-256 of the line before it, so a line that is lost, edited,
moved or repeated shows. The format is docs/archive-format.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec

from samestate.evidence.canonical import sha256_hex
from samestate.evidence.places import place
from samestate.evidence.records import FORMAT, AnyRecord, Line, StreamClosed, StreamOpened

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

CHAIN_START = "0" * 64
BUFFER_BYTES = 1 << 16

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode
_NO_RECORD = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding raises for bytes that are no line."""


class Defect(NamedTuple):
    """One place where an archive does not keep its integrity rules."""

    where: str
    """File inside the archive, and line from 1 where there is one: ``arms/control/client.jsonl:4``."""
    what: str
    """One line."""


def utc_now() -> str:
    """Wall time as RFC 3339 in UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def newer_format(claimed: int) -> str:
    """The word for an archive written by a later format."""
    return f"format {claimed} is newer than the format this samestate reads ({FORMAT}): use a newer samestate"


class Stored(NamedTuple):
    """Where a line's bytes lie, and what they were when the stream was checked."""

    path: Path
    offset: int
    size: int
    """Bytes, newline excluded."""
    sha256: bytes
    """Of these bytes, not in hex."""

    def read(self) -> Line | None:
        """The line again; None when the file cannot be read or holds other bytes now."""
        try:
            with self.path.open("rb", buffering=0) as file:
                body = os.pread(file.fileno(), self.size, self.offset)
        except OSError:
            return None
        return _decode(body) if sha256(body).digest() == self.sha256 else None


class Passed(NamedTuple):
    """A line that is a record, as a walk comes by it."""

    line: Line
    body: bytes
    """As it was read, newline excluded."""
    path: Path
    offset: int
    """Of the body in its file, bytes."""
    own: Hash
    """Of the body, SHA-256."""
    beyond: bool
    """After damage that ends what can be checked of the stream: readable, no more."""

    @property
    def stored(self) -> Stored:
        """Where to find the line again."""
        return Stored(self.path, self.offset, len(self.body), self.own.digest())


class StreamWriter:
    """Appends one process's records to a new file. Thread-safe.

    Opening raises OSError in both modes (FileExistsError: another writer has the file).
    After that a `tolerant` writer never raises: it counts what it could not write in
    `dropped` and keeps the first error in `failure`. A strict one also raises: OSError
    for a failed write, ValueError for a record that no reader would accept.

    Records wait in memory until 64 KiB, `flush` or `close`. A failed write loses the
    waiting records as a whole; the file is cut back to the last whole line and its
    chain stays good, so `StreamClosed.dropped` is what tells of the loss. A process forked from
    the one that opened it never touches the file.
    """

    def __init__(self, path: Path, arm: str, process: str, *, tolerant: bool = False) -> None:
        self.path = path
        self.failure: str | None = None
        self.dropped = 0
        self._tolerant = tolerant
        self._lock = threading.RLock()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._n, self._prev = 0, CHAIN_START
        self._written = (0, CHAIN_START)
        self._offset = 0
        self._closed = False
        self._pid = os.getpid()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self.append(StreamOpened(format=FORMAT, arm=arm, process=process, pid=os.getpid(), wall_time=utc_now()))
            self.flush()
        except BaseException:
            self._release()
            raise

    def append(self, record: AnyRecord) -> None:
        """Add a record; see the class for what happens when that fails."""
        with self._lock:
            if self._closed:
                self._fail(ValueError(f"{self.path}: record after the stream was closed"), lost=1)
                return
            try:
                line = _encode(Line(n=self._n, prev=self._prev, t_ns=time.monotonic_ns(), rec=record))
                _decode(line)  # structs are not validated when made, and JSON turns NaN into null
            except Exception as error:
                self._fail(ValueError(f"{self.path}: {type(record).__name__} refused: {error}"), lost=1)
                return
            self._n, self._prev = self._n + 1, sha256_hex(line)
            self._pending.append(line + b"\n")
            self._pending_bytes += len(line) + 1
            if self._pending_bytes >= BUFFER_BYTES:
                self._write()

    def flush(self) -> None:
        """Hand all waiting records to the operating system."""
        with self._lock:
            if not self._closed:
                self._write()

    def lose(self, reason: str) -> None:
        """Count a record that could not even be made. Never raises: its caller serves requests."""
        with self._lock:
            self.dropped += 1
            self.failure = self.failure or " ".join(reason.split())

    def close(self) -> None:
        """Write `StreamClosed` and close the file. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            try:
                self._write()
                self.append(StreamClosed(dropped=self.dropped))
                self._write()
            finally:
                self._release()

    def _write(self) -> None:
        data, lines = b"".join(self._pending), len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        if os.getpid() != self._pid:
            return
        try:
            _write_all(self._fd, data, self._offset)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._offset)
            self._n, self._prev = self._written
            self._fail(error, lost=lines)
            return
        self._offset += len(data)
        self._written = (self._n, self._prev)

    def _fail(self, error: OSError | ValueError, lost: int) -> None:
        self.dropped += lost
        if self.failure is None:
            self.failure = " ".join(f"{error}".split())
        if not self._tolerant:
            raise error

    def _release(self) -> None:
        self._closed = True
        with suppress(OSError):
            os.close(self._fd)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def read_stream(path: Path, name: str | None = None) -> Iterator[Line | Defect]:
    """Yield a stream's lines in order and, between them, every defect. Never raises for what is in the file.

    `name` stands for the file in `Defect.where`. A line that is no record is left out; a
    readable line that breaks a rule follows its defect. Memory does not grow with the file.
    """
    for item in walk_stream(path, name):
        if isinstance(item, Defect):
            yield item
        elif not item.beyond:
            yield item.line


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines that are records, in order, without checking anything else: `read_stream` finds the damage."""
    with suppress(OSError), path.open("rb") as file:
        for raw in file:
            try:
                line = _decode(raw)
            except _NO_RECORD:
                continue
            yield line


def walk_stream(path: Path, name: str | None = None, whole: Hash | None = None) -> Iterator[Passed | Defect]:
    """Yield what `read_stream` and `read_lines` yield, from one reading of every byte; each line once.

    `whole` is updated with every byte of the file, for whoever needs its hash too.
    """
    where = name or path.name
    try:
        with path.open("rb") as file:
            yield from _walk(file, path, where, whole)
    except OSError as error:
        yield Defect(where, f"cannot be read: {error.strerror}")


def _walk(file: BinaryIO, path: Path, where: str, whole: Hash | None) -> Iterator[Passed | Defect]:
    expected, prev, clock, position, offset, beyond = 0, CHAIN_START, 0, -1, 0, False
    last: AnyRecord | None = None
    for position, raw in enumerate(file):
        if whole is not None:
            whole.update(raw)
        at, offset = offset, offset + len(raw)
        if raw[-1:] != b"\n" and not beyond:
            yield Defect(place(where, position), "cut off: the line does not end")
            beyond = True
        body = raw[:-1] if raw[-1:] == b"\n" else raw
        own = sha256(body)
        try:
            line = _decode(body)
        except _NO_RECORD as error:
            if beyond:
                continue
            claimed = _claimed_format(body) if position == 0 else FORMAT
            if claimed > FORMAT:
                yield Defect(place(where, 0), newer_format(claimed))
                beyond = True
                continue
            yield Defect(place(where, position), f"not a record: {error}")
            expected, prev, last = expected + 1, own.hexdigest(), None
            continue
        if not beyond:
            record = line.rec
            orderly = line.n == expected and line.prev == prev and line.t_ns >= clock and type(last) is not StreamClosed
            if not orderly or position == 0 or type(record) is StreamOpened:
                yield from _rules(line, position, where, expected, prev, clock, last)
            if type(record) is StreamOpened and position == 0 and record.format != FORMAT:
                beyond = True
            expected, prev, clock, last = line.n + 1, own.hexdigest(), line.t_ns, record
        yield Passed(line, body, path, at, own, beyond)
    if beyond:
        return
    if position < 0:
        yield Defect(where, "empty: not even stream_opened")
    elif type(last) is not StreamClosed:
        yield Defect(where, "no stream_closed at the end: its process died, or the file was cut")
    elif last.dropped:
        yield Defect(place(where, position), f"incomplete: {last.dropped} records could not be written")


def _rules(
    line: Line, position: int, where: str, expected: int, prev: str, clock: int, last: AnyRecord | None
) -> Iterator[Defect]:
    """What a line breaks, given what was due and the line before."""
    record = line.rec
    if line.n != expected:
        word = f"numbered {line.n} where {expected} was due: lines were lost, repeated or reordered"
        yield Defect(place(where, position), word)
    elif line.prev != prev:
        yield Defect(place(where, position), "the chain is broken: the line before is not the one that was written")
    if line.t_ns < clock:
        yield Defect(place(where, position), f"the monotonic clock went back by {clock - line.t_ns} ns")
    if (type(record) is StreamOpened) != (position == 0):
        yield Defect(place(where, position), "stream_opened must be the first record, and only the first")
    elif type(record) is StreamOpened and record.format != FORMAT:
        newer = record.format > FORMAT
        yield Defect(place(where, 0), newer_format(record.format) if newer else f"no such format: {record.format}")
        return
    if type(last) is StreamClosed:
        yield Defect(place(where, position), "a record after stream_closed")


def _claimed_format(first_line: bytes) -> int:
    """Format that an otherwise unreadable first line claims; 0 when it claims none."""
    try:
        claimed = msgspec.json.decode(first_line)["rec"]["format"]
    except Exception:
        return 0
    return claimed if type(claimed) is int else 0
