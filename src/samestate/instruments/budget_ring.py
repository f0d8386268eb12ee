"""The ring between serving and a stream of budget records: it never waits, never raises, and counts what it loses."""

from __future__ import annotations

from collections import deque

from samestate.evidence.marker_records import RecorderStopped
from samestate.evidence.records import AnyRecord
from samestate.evidence.stream import StreamWriter
from samestate.instruments import recorder


class BudgetRing:
    """Holds at most `capacity` records of one stream until the end of a step, when they are written.

    A record that comes while the ring is full is dropped and counted; so is one that could not be made or
    written. `stop` writes the account. Used by one thread.
    """

    def __init__(self, writer: StreamWriter, rank: int | None, capacity: int) -> None:
        self._writer = writer
        self._rank = rank
        self._capacity = capacity
        self._held: deque[AnyRecord] = deque()
        self._overflowed = 0
        self._written = 0
        self._stopped = False

    @property
    def dropped(self) -> int:
        """Records lost so far, from whatever cause."""
        return self._overflowed + self._writer.dropped

    def put(self, record: AnyRecord) -> None:
        """Hold a record for the end of the step."""
        if len(self._held) >= self._capacity:
            self._overflowed += 1
        else:
            self._held.append(record)

    def lose(self, error: Exception) -> None:
        """Count a record that could not be made."""
        self._writer.lose(f"{type(error).__name__}: {error}")

    def drain(self) -> None:
        """A step is over: write what is held, so that a killed process leaves its steps."""
        if self._held:
            self._write_held()
            self._writer.flush()

    def stop(self) -> None:
        """Write what is held and the account, and release the stream. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._write_held()
        self._writer.append(RecorderStopped(rank=self._rank, written=self._written, dropped=self.dropped))
        recorder.release(self._writer)

    def _write_held(self) -> None:
        while self._held:
            lost = self._writer.dropped
            self._writer.append(self._held.popleft())
            self._written += self._writer.dropped == lost
