"""A stream in several files, so that a server that runs for months fills no disk."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from samestate.evidence.records import AnyRecord, EngineStarted, RankRegistered, SchedulerConfigured
from samestate.evidence.stream import StreamWriter

LEAST_BYTES = 1 << 16
LEAST_FILES = 2
HEADS = (EngineStarted, RankRegistered, SchedulerConfigured)
"""Records without which the others say little: every later file begins with them again."""


class AuditConfigError(ValueError):
    """The ``samestate`` part of ``kv_connector_extra_config`` is wrong; one line."""


class Limits(NamedTuple):
    """How much of a process's records is kept."""

    rotate_bytes: int
    """A file that has grown to it is closed, at the end of a step."""
    keep_files: int
    """Of the process, the one that is being written among them; the oldest go."""


def limits_of(options: dict[str, Any]) -> Limits | None:
    """How files rotate; None: they do not. Raises `AuditConfigError`."""
    names = {"rotate_bytes": LEAST_BYTES, "keep_files": LEAST_FILES}
    if not any(name in options for name in names):
        return None
    for name, least in names.items():
        value = options.get(name)
        if type(value) is not int or value < least:
            raise AuditConfigError(
                f"samestate.{name}: {value!r} is no whole number of at least {least}; "
                f"files rotate where {' and '.join(names)} are both given"
            )
    return Limits(options["rotate_bytes"], options["keep_files"])


class RotatingWriter:
    """A tolerant `StreamWriter` over several files: ``scheduler.jsonl``, ``scheduler.2.jsonl``, … Thread-safe.

    Each file is a whole stream by itself. Numbers only grow, over restarts too. After the first file is open nothing
    here ever raises: what cannot be written is counted in `dropped`, and opening is tried again at every `flush`.
    """

    def __init__(self, folder: Path, arm: str, process: str, limits: Limits) -> None:
        """Raises OSError where no file can be opened."""
        self._folder = folder
        self._process = process
        self._limits = limits
        self._open: Callable[[Path], StreamWriter] = lambda path: StreamWriter(path, arm, process, tolerant=True)
        self._lock = threading.RLock()
        self._heads: dict[type, AnyRecord] = {}
        self._failure: str | None = None
        self._lost = 0
        self._closed = False
        self._writer: StreamWriter | None = self._next()
        self._forget()

    @property
    def path(self) -> Path:
        """The file that is being written; the folder where none is."""
        return self._writer.path if self._writer else self._folder

    @property
    def dropped(self) -> int:
        """Records lost since the beginning, over all files."""
        return self._lost + (self._writer.dropped if self._writer else 0)

    @property
    def failure(self) -> str | None:
        """The first error, one line."""
        return self._failure or (self._writer.failure if self._writer else None)

    def append(self, record: AnyRecord) -> None:
        """Add a record; it is counted as lost where no file is open."""
        with self._lock:
            if isinstance(record, HEADS):
                self._heads[type(record)] = record
            if self._writer is None or self._closed:
                self._lost += 1
            else:
                self._writer.append(record)

    def flush(self) -> None:
        """Hand waiting records to the operating system, and begin the next file where this one is full."""
        with self._lock:
            if self._closed:
                return
            if self._writer is None:
                self._begin()
                return
            self._writer.flush()
            with suppress(OSError):
                if self._writer.path.stat().st_size < self._limits.rotate_bytes:
                    return
            # Full, or removed under our hands: either way the next one.
            self._end()
            self._begin()

    def lose(self, reason: str) -> None:
        """Count a record that could not even be made."""
        with self._lock:
            if self._writer is None:
                self._lost += 1
                self._failure = self._failure or " ".join(reason.split())
            else:
                self._writer.lose(reason)

    def close(self) -> None:
        """Close the last file. A second call does nothing."""
        with self._lock:
            self._end()
            self._closed = True

    def _begin(self) -> None:
        try:
            self._writer = self._next()
        except OSError as error:
            self._failure = self._failure or " ".join(f"{error}".split())
            return
        for head in self._heads.values():
            self._writer.append(head)
        self._forget()

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._failure = self._failure or writer.failure
            writer.close()
            self._lost += writer.dropped

    def _next(self) -> StreamWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max(self._files(), default=0) + 1
        name = self._process if number == 1 else f"{self._process}.{number}"
        return self._open(self._folder / f"{name}.jsonl")

    def _files(self) -> dict[int, Path]:
        """Files of this process by number."""
        pattern = re.compile(rf"{re.escape(self._process)}(?:\.([1-9][0-9]*))?\.jsonl")
        found = ((pattern.fullmatch(path.name), path) for path in self._folder.iterdir())
        return {int(match[1] or 1): path for match, path in found if match}

    def _forget(self) -> None:
        """Remove the oldest files beyond the limit."""
        with suppress(OSError):
            files = self._files()
            for number in sorted(files)[: -self._limits.keep_files]:
                with suppress(OSError):
                    files[number].unlink()
