"""Child processes that lead a session of their own: who belongs to it, and the end of all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOG_TAIL_BYTES = 4096
_PROC = Path("/proc")
_START_TICKS = 19
"""Of the fields after the command's closing bracket (proc(5): the 22nd of all)."""


def identity(pid: int) -> str | None:
    """``4711@12345678``: process id, and when the kernel started it, in ticks since boot; None without ``/proc``.

    Ids come again, a pair does not.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return f"{pid}@{stat.rpartition(')')[2].split()[_START_TICKS]}"
    except (OSError, IndexError):
        return None


def session_members(leader: int) -> set[int]:
    """Processes of a session as far as they can be seen, its leader included."""
    members = {leader}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == leader:
                members.add(int(entry.name))
    return members


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session that `process` leads, and reap it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_end(pids: Iterable[int], seconds: float) -> set[int]:
    """Wait until these processes have ended, reaped or not; those that have not after so long."""
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _runs(pid: int) -> bool:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def log_tail(path: Path) -> str:
    """The end of a log file, possibly empty."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
