"""Streams of this process: one writer per file, shared by every instrument that writes to it."""

from __future__ import annotations

import threading
from pathlib import Path

from samestate.evidence.stream import StreamWriter

_streams: dict[Path, StreamWriter] = {}
_lock = threading.Lock()


def stream(stream_dir: Path, arm: str, process: str) -> StreamWriter:
    """The process's writer for ``<stream_dir>/<process>.jsonl``, opened on first use.

    The writer is tolerant: a full disk is remembered in ``.failure`` and counted in
    ``.dropped``, and never reaches the engine.
    """
    path = stream_dir / f"{process}.jsonl"
    with _lock:
        if path not in _streams:
            _streams[path] = StreamWriter(path, arm, process, tolerant=True)
        return _streams[path]


def flush() -> None:
    """Hand everything written so far to the operating system."""
    for writer in list(_streams.values()):
        writer.flush()


def failure() -> str | None:
    """The first write error of any stream of this process, one line, or None."""
    return next((w.failure for w in _streams.values() if w.failure), None)


def close() -> None:
    """Close every stream in order. Later records are lost; call it last."""
    for writer in list(_streams.values()):
        writer.close()
