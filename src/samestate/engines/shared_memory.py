"""Shared-memory segments by the process that made them, for whoever must leave nothing behind.

torch names a segment ``torch_<pid>_<random>_<n>``, LMCache ``lmcache_kv_<pid>_<n>``. torch's manager process removes
the names of an engine that is gone, even a killed one, after some seconds (ten measured); it may be killed too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"(?:torch|lmcache_kv)_(\d+)_")


def segments(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> list[Path]:
    """Segments that these processes made and that still have a name."""
    wanted = set(pids)
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in names if (found := _NAME.match(path.name)) and int(found[1]) in wanted]


def remove(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> int:
    """Remove the segments of processes that have ended; how many there were.

    Who still maps one keeps the memory until it unmaps it. Never call it for a process that runs: torch
    aborts a process that cannot remove its own segment.
    """
    removed = 0
    for path in segments(pids, folder):
        with suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed
