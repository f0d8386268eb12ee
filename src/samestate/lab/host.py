"""The host's load and memory at one moment, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from samestate.evidence.latency_records import HostSampled

PROC = Path("/proc")
_IDLE = (3, 4)
"""Fields of a ``cpu`` line: idle, and waiting for input or output."""


def sample(op: str, when: Literal["before", "after"], proc: Path = PROC) -> HostSampled | None:
    """None where there is no ``/proc`` that says it: nothing is made up."""
    try:
        load = float((proc / "loadavg").read_text().split()[0])
        ticks = [int(word) for word in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
        memory = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
        total, available = (int(memory[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, IndexError, ValueError):
        return None
    if len(ticks) <= max(_IDLE):
        return None
    idle = sum(ticks[at] for at in _IDLE)
    return HostSampled(
        op=op,
        when=when,
        cpus=len(os.sched_getaffinity(0)),
        load=load,
        busy_ticks=sum(ticks) - idle,
        total_ticks=sum(ticks),
        memory_total=total,
        memory_available=available,
    )
