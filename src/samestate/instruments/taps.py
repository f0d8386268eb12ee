"""A stream that others listen to: what is written is told to them too, and their failures are no failure of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from samestate.evidence.records import AnyRecord
from samestate.evidence.stream import StreamWriter


class TappedWriter:
    """A writer with the methods of a `StreamWriter`. `failed` hears of a listener's exception; nothing is raised."""

    def __init__(
        self,
        writer: StreamWriter,
        taps: Sequence[Callable[[AnyRecord], None]],
        failed: Callable[[Exception], None],
    ) -> None:
        self._writer = writer
        self._taps = taps
        self._failed = failed

    @property
    def path(self) -> Path:
        """Of the stream."""
        return self._writer.path

    @property
    def failure(self) -> str | None:
        """The stream's first error."""
        return self._writer.failure

    @property
    def dropped(self) -> int:
        """Records that the stream lost."""
        return self._writer.dropped

    def append(self, record: AnyRecord) -> None:
        """Write, then tell."""
        self._writer.append(record)
        for tap in self._taps:
            try:
                tap(record)
            except Exception as error:
                self._failed(error)

    def flush(self) -> None:
        """As the stream's."""
        self._writer.flush()

    def lose(self, reason: str) -> None:
        """As the stream's."""
        self._writer.lose(reason)

    def close(self) -> None:
        """As the stream's."""
        self._writer.close()
