"""Which process this is, as no other of the same host can say (`EngineStarted.process`)."""

from __future__ import annotations

import os
import time

from samestate.engines.processes import identity

_IMPORTED_NS = time.monotonic_ns()


def own_process() -> str:
    """As `samestate.engines.processes.identity`; without ``/proc``, when this module was imported, in ns."""
    pid = os.getpid()
    return identity(pid) or f"{pid}@{_IMPORTED_NS}ns"
