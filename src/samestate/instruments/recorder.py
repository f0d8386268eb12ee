"""Streams of this process: one writer per file, shared by every instrument that writes to it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import cast

from samestate.evidence.stream import StreamWriter
from samestate.instruments.rotation import Limits, RotatingWriter

MOST_STREAMS = 1000
"""Names tried for a stream before its folder counts as full."""

Writer = StreamWriter | RotatingWriter

_streams: dict[Path, Writer] = {}
_driven = False
_lock = threading.Lock()


def stream(stream_dir: Path, arm: str, process: str) -> StreamWriter:
    """The process's writer for ``<stream_dir>/<process>.jsonl``, opened on first use.

    The folder is made where it is missing; where the file exists, the stream is ``<process>.2.jsonl`` and so on.

    The writer is tolerant: a full disk is remembered in ``.failure`` and counted in
    ``.dropped``, and never reaches the engine.
    """
    path = stream_dir / f"{process}.jsonl"
    with _lock:
        if path not in _streams:
            stream_dir.mkdir(parents=True, exist_ok=True)
            _streams[path] = _open(path, arm, process)
        # A rotating writer has its methods.
        return cast(StreamWriter, _streams[path])


def rotating(stream_dir: Path, arm: str, process: str, limits: Limits) -> StreamWriter:
    """As `stream`, in several files within `limits`. Raises OSError."""
    path = stream_dir / f"{process}.jsonl"
    with _lock:
        if path not in _streams:
            _streams[path] = RotatingWriter(stream_dir, arm, process, limits)
        return cast(StreamWriter, _streams[path])


def _open(path: Path, arm: str, process: str) -> StreamWriter:
    """A new file: an earlier run's stream is never overwritten, and never keeps a server from starting again."""
    for n in range(2, MOST_STREAMS):
        with suppress(FileExistsError):
            return StreamWriter(path, arm, process, tolerant=True)
        path = path.with_name(f"{process}.{n}.jsonl")
    raise FileExistsError(f"{path.parent}: {MOST_STREAMS} streams of {process} lie there; empty it")


def drive() -> None:
    """This process closes its streams itself, with `close`: `release` then leaves them open."""
    global _driven  # noqa: PLW0603 (one process, one driver)
    _driven = True


def release(writer: StreamWriter) -> None:
    """Its user is done: close the stream, or only hand over what it holds where a driver closes it."""
    if _driven:
        writer.flush()
    else:
        writer.close()


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


def close_in_worker(_worker: object) -> None:
    """`close`, as vLLM's executor calls it in a worker's process."""
    close()


def begin_anew() -> None:
    """A forked process (vLLM's workers on CUDA) has no stream yet, and closes its own."""
    global _driven, _lock  # noqa: PLW0603
    _streams.clear()
    _driven = False
    _lock = threading.Lock()


os.register_at_fork(after_in_child=begin_anew)
