"""A swap's journal as it is written: one step at a time, under locks that a second swap cannot take."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from samestate.custody.base import CustodyError, Stopped
from samestate.custody.spec import Spec, place
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.custody_journal import JournalWriter
from samestate.evidence.custody_records import (
    JOURNAL,
    CustodyRecord,
    Entry,
    Outcome,
    ProcessStopped,
    SnapshotTaken,
    Step,
    StepBegan,
    StepEnded,
    When,
)
from samestate.folders import cache_root


class Lock:
    """The right to touch one incumbent. The kernel gives it back when this process ends, however that comes.

    Its file keeps the name of the records of a swap that has not ended: none is begun over it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `CustodyError` where another swap holds it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CustodyError(f"{path}: cannot be opened ({error.strerror}); a swap needs it as its lock") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise CustodyError(f"{path}: another swap of this incumbent runs; wait until it has ended") from None

    @property
    def unfinished(self) -> str:
        """Records of a swap that has not ended; empty: none."""
        return os.pread(self._fd, 1 << 16, 0).decode(errors="replace").strip()

    def begin(self, records: Path) -> None:
        """A swap with these records begins."""
        self._write(str(records))

    def end(self) -> None:
        """It has ended."""
        self._write("")

    def close(self) -> None:
        """Give it back; the file stays as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, text: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)
        os.fsync(self._fd)


class Locks:
    """Several at once: two ways to name one incumbent must not make two swaps of it. Raises `CustodyError`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._held: list[Lock] = []
        try:
            for path in dict.fromkeys(paths):
                self._held.append(Lock(path))
        except CustodyError:
            self.close()
            raise

    @property
    def unfinished(self) -> str:
        """Records of a swap that has not ended; empty: none. A swap that came to no journal touched nothing."""
        marks = (lock.unfinished for lock in self._held)
        return next((mark for mark in marks if mark and (Path(mark) / JOURNAL).exists()), "")

    def begin(self, records: Path) -> None:
        """A swap with these records begins."""
        for lock in self._held:
            lock.begin(records)

    def end(self, records: Path) -> None:
        """It has ended; marks of others stay."""
        for lock in self._held:
            if lock.unfinished == str(records):
                lock.end()

    def close(self) -> None:
        """Give them back."""
        for lock in self._held:
            lock.close()


def lock_paths(spec: Spec, own: Path) -> list[Path]:
    """Files that all swaps of this incumbent share: its supervisor's, its address's, its place's in the router."""
    router = spec.router
    if router.socket is not None:
        route = f"{os.path.realpath(router.socket)} {router.backend}/{router.server}"
    else:
        route = f"{place(router.url or '')} {place(spec.incumbent.url)}"
    names = (f"address {place(spec.incumbent.url)}", f"route {route}")
    return [own, *(cache_root() / "locks" / f"{sha256_hex(name.encode())[:16]}.lock" for name in names)]


class Steps:
    """Which step a swap is in. Every change is on the disk before anything is done."""

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self.current: Step | None = None

    def append(self, record: CustodyRecord) -> None:
        """A record of the current step."""
        self._writer.append(record)

    def enter(self, step: Step) -> None:
        """Begin `step`; the one before ends well if nobody said otherwise."""
        self.leave("ok")
        self._writer.append(StepBegan(step=step))
        self.current = step

    def leave(self, outcome: Outcome, note: str = "") -> None:
        """End the current step; nothing where there is none."""
        if self.current is not None:
            self._writer.append(StepEnded(step=self.current, outcome=outcome, note=" ".join(note.split())))
            self.current = None

    def stopped(self, role: Literal["incumbent", "candidate"], how: Stopped) -> None:
        """Record how a process ended. Raises `CustodyError` where something of it did not."""
        self.append(ProcessStopped(role=role, process=how.process, killed=how.killed, left=how.left))
        if how.left:
            raise CustodyError(f"{role}: processes {how.left} could not be ended; end them by hand")

    def close(self) -> None:
        """Close the journal."""
        self._writer.close()


def begun_steps(entries: Sequence[Entry]) -> list[Step]:
    """Steps that began, in order of their records."""
    return [entry.rec.step for entry in entries if isinstance(entry.rec, StepBegan)]


def unfinished_step(entries: Sequence[Entry]) -> Step | None:
    """The step that began and did not end; None where there is none."""
    last: Step | None = None
    for entry in entries:
        if isinstance(entry.rec, StepBegan):
            last = entry.rec.step
        elif isinstance(entry.rec, StepEnded):
            last = None
    return last


def seen_identity(entries: Sequence[Entry], when: When) -> str | None:
    """Who the last snapshot of that time is of; None where there is none, or it does not say."""
    values = seen_values(entries, when)
    pid, began = values.get("pid"), values.get("process_start")
    return f"{pid}@{began}" if pid is not None and began is not None else None


def seen_values(entries: Sequence[Entry], when: When) -> dict[str, str | None]:
    """Fields of the last snapshot of that time; none where there is none."""
    for entry in reversed(entries):
        if isinstance(entry.rec, SnapshotTaken) and entry.rec.when == when:
            return {one.name: one.value for one in entry.rec.fields}
    return {}
