"""Streams and events on CUDA, as far as loads need them: tests drive others in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: Any, /) -> float: ...


class Lane:
    """One stream. What is put on it follows each other without being told to."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._free: list[torch.cuda.Event] = []

    def follow_current(self) -> None:
        """Go on after what the current stream holds now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def follow(self, mark: Any) -> None:
        """Go on after the mark as it was recorded last; at once, where it never was."""
        self._stream.wait_event(mark)

    def entered(self) -> AbstractContextManager[Any]:
        """Make it the current stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """A mark at what the stream holds now."""
        mark = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        mark.record(self._stream)
        return mark

    def give_back(self, *marks: Any) -> None:
        self._free += marks

    def signal(self) -> Any:
        """A mark to be recorded again and again, which tells no times."""
        return torch.cuda.Event()

    def record(self, signal: Any) -> None:
        """Move a signal to what the stream holds now."""
        signal.record(self._stream)

    def drain(self) -> None:
        """Return when all that was put on it is over."""
        self._stream.synchronize()

    def table(self, numbers: int) -> torch.Tensor:
        """New memory for a table."""
        return torch.empty(numbers, dtype=torch.int64, pin_memory=True)
