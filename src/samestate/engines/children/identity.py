"""Which process this is, as no other of the same host can say (`EngineStarted.process`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
_START_TICKS = 19
"""Of the fields after the command's closing bracket (proc(5): the 22nd of all)."""
_IMPORTED_NS = time.monotonic_ns()


def own_process() -> str:
    """``4711@12345678``: process id, and when the kernel started it, in ticks since boot.

    Ids come again, a pair does not. Without ``/proc``, when this module was imported, by the monotonic clock in ns.
    """
    try:
        started = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[_START_TICKS]
    except (OSError, IndexError):
        started = f"{_IMPORTED_NS}ns"
    return f"{os.getpid()}@{started}"
