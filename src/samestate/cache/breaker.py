"""When to leave a store alone: after failures in a row it is paused, for longer each time until it works again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Lets calls through until `failures` of them in a row failed, then none for a while. Thread-safe.

    After the pause calls go through again; if the first of them fails, the next pause is twice as long.

    Args:
        failures: In a row, until it is paused.
        first_pause_s: Seconds.
        longest_pause_s: Seconds.
        clock: Monotonic seconds.

    """

    def __init__(
        self,
        failures: int = 3,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._first = first_pause_s
        self._longest = longest_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._until = 0.0
        self.pauses = 0
        """How often it was paused."""

    @property
    def paused(self) -> bool:
        """Whether calls are to be left out now."""
        return self._clock() < self._until

    def succeeded(self) -> None:
        """A call worked."""
        with self._lock:
            self._failures, self._pause, self._until = 0, 0.0, 0.0

    def failed(self) -> bool:
        """A call failed or took too long; whether that begins a pause."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit or self.paused:
                return False
            self._pause = min(self._pause * 2, self._longest) if self._pause else self._first
            self._until = self._clock() + self._pause
            # After the pause one failure is enough for the next.
            self._failures = self._limit - 1
            self.pauses += 1
            return True
